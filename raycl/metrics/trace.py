"""Scores as the code of the TRACE benchmark computes them, where they are no others under their own name.

Wang et al. 2023, "TRACE: A Comprehensive Benchmark for Continual Learning in Large Language Models" (arXiv
2310.06762), and the released code (metrics.py, evaluations/). Its Rouge-L and SARI have quirks, which are variants
here: a published number can only be compared with theirs.
"""

import re
from collections.abc import Sequence

from raycl.metrics.answers import Compute, mean_best

_EMPTY_TAGS = ("<STR_LIT>", "<CHAR_LIT>")
_TAG = re.compile(r"<(?:STR|NUM|CHAR)_LIT:(.*?)>", re.DOTALL)
_SMALL = 1e-8
"""The `rouge` package adds this below the line of its F-measure."""


first_character: Compute = mean_best(
    lambda prediction, reference: float(bool(prediction) and prediction[0] == reference[:1])
)
"""Equality of the first characters (ScienceQA: the letter of the choice, after which the answer gives its reasons).

TRACE's evaluations/eval_ScienceQA.py raises at an empty answer, which is wrong here.
"""


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; sentences end at dots, words at white space, and nothing is lower-cased.

    A sentence of white space alone is one empty word, as in the `rouge` package.
    """
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common_words(left: Sequence[str], right: Sequence[str]) -> set[str]:
    """Return the words of a longest common subsequence; of several the one that the `rouge` package finds."""
    lengths = [[0] * (len(right) + 1)]
    for word in left:
        above, row = lengths[-1], [0]
        for column, other in enumerate(right):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        lengths.append(row)
    words, i, j = set[str](), len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            words.add(left[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _rouge_l(prediction: str, reference: str) -> float:
    said, expected = _sentences(prediction), _sentences(reference)
    said_words, expected_words = ({word for sentence in text for word in sentence} for text in (said, expected))
    if not said_words or not expected_words:
        return 0.0
    # the code passes the reference as the hypothesis: its sentences are on the right of each pair
    common = set[str]().union(*(_common_words(left, right) for left in said for right in expected))
    precision, recall = len(common) / len(expected_words), len(common) / len(said_words)
    return 2.0 * precision * recall / (precision + recall + _SMALL)


rouge_l: Compute = mean_best(_rouge_l)
"""Rouge-L of the package `rouge` 1.0.1, which TRACE's metrics.py uses (`caculate_rouge`).

F-measure of the distinct words that are in a longest common subsequence of any sentence of the answer and any of the
reference, among the distinct words of both. Words are not lower-cased or stemmed, and punctuation but the dot is part
of them. An answer of dots alone is an error there, and scores 0 here as an empty one does.
"""


def without_tags(code: str) -> str:
    """Return code without the tags that stand for literals in Py150: `<NUM_LIT>` is 0, `<STR_LIT>` and `<CHAR_LIT>` are
    nothing, and `<STR_LIT:text>` is `text` (TRACE and CodeXGLUE, eval_Py150.py)."""
    code = code.replace("<NUM_LIT>", "0")
    for tag in _EMPTY_TAGS:
        code = code.replace(tag, "")
    return _TAG.sub(r"\1", code)


def _code_similarity(prediction: str, reference: str) -> float:
    from rapidfuzz.fuzz import ratio

    said, expected = without_tags(prediction), without_tags(reference)
    return round(ratio(said, expected)) / 100.0 if said and expected else 0.0


edit_similarity_py150: Compute = mean_best(_code_similarity)
"""Edit similarity of lines of code after `without_tags`, in whole percent for each line (TRACE's `caculate_fuzz`).

An empty answer or reference scores 0. As by fuzzywuzzy with python-Levenshtein; fuzzywuzzy alone compares with difflib,
which finds fewer common characters, and TRACE's requirements name fuzzywuzzy alone.
"""
