"""Scores of overlapping text: Rouge-L, BLEU and edit similarity, by the libraries that define them, and SARI.

Rouge_score reads ASCII letters and digits alone, so that Chinese scores 0 and words with umlauts fall apart; here it
gets words of every script.

SARI: which word sequences a simplified text added, kept and deleted, compared with the references (Xu et al. 2016,
"Optimizing Statistical Machine Translation for Text Simplification", section 4): sequences of one to four words, F1 of
what was added and kept, precision of what was deleted. No maintained package has it without downloading code, so it is
implemented here. As in the script that Hugging Face's `evaluate` downloads, 0/0 counts as 1 and texts are lower-cased
and tokenised by sacrebleu.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from raycl.metrics.answers import Answers, Compute, mean_best

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    r"\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    r"\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
"""Scripts that are written without spaces between words: each character is a word."""
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


class UnicodeTokenizer:
    """A tokenizer of words of every script, for rouge_score; texts in ASCII give what its own tokenizer gives.

    Letters, digits and the marks on them are words, in lower case and in composed form (NFKC). Porter's stemmer, which
    knows English alone, is applied to words in ASCII.
    """

    def __init__(self) -> None:
        from rouge_score.tokenizers import DefaultTokenizer

        self._ascii = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """Return the words in order."""
        if text.isascii():
            return list(self._ascii.tokenize(text))
        letters = "".join(map(_kept, unicodedata.normalize("NFKC", text).lower()))
        words = re.sub(f"([{_UNSPACED}])", r" \1 ", letters).split()
        return [part for word in words for part in (self._ascii.tokenize(word) if word.isascii() else [word])]


def _kept(character: str) -> str:
    """Return letters (L), marks (M) and numbers (N), and a space for anything else."""
    return character if unicodedata.category(character)[0] in "LMN" else " "


@lru_cache(maxsize=2)
def _scorer(ascii_only: bool) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # two seconds of imports, only paid by tasks that need it

    if ascii_only:
        return RougeScorer(["rougeL"], use_stemmer=True)
    return RougeScorer(["rougeL"], tokenizer=UnicodeTokenizer())


def _rouge_l(prediction: str, reference: str, ascii_only: bool = False) -> float:
    if not prediction.strip() and not reference.strip():
        return 1.0
    return float(_scorer(ascii_only).score(target=reference, prediction=prediction)["rougeL"].fmeasure)


rouge: Compute = mean_best(_rouge_l)
"""Rouge-L, F-measure, English words stemmed."""

rouge_ascii: Compute = mean_best(partial(_rouge_l, ascii_only=True))
"""Rouge-L as rouge_score computes it: letters and digits outside ASCII are dropped."""


def tokenizer_for(references: Sequence[Sequence[str]]) -> str:
    """Return sacrebleu's tokenizer: `zh` where a reference has Chinese characters, else its standard `13a`."""
    return "zh" if any(_HAN.search(text) for accepted in references for text in accepted) else "13a"


def bleu(answers: Answers) -> tuple[float, dict[str, float]]:
    """Compute BLEU over all examples and references; `brevity` is the penalty for answers that are too short."""
    from sacrebleu.metrics import BLEU

    most = max(len(accepted) for accepted in answers.references)
    streams = [[(*accepted, *[None] * most)[number] for accepted in answers.references] for number in range(most)]
    score = BLEU(tokenize=tokenizer_for(answers.references))
    score_of_corpus = score.corpus_score([text or "" for text in answers.predictions], streams)
    return float(score_of_corpus.score), {"brevity": float(score_of_corpus.bp)}


def _similarity(prediction: str, reference: str) -> float:
    from rapidfuzz.fuzz import ratio

    return float(ratio(prediction, reference)) / 100.0


edit_similarity: Compute = mean_best(_similarity)
"""Share of characters that need no insertion or deletion: `1 - edits / characters of both`."""


_ORDERS = (1, 2, 3, 4)
_Grams = Counter[tuple[str, ...]]


class _Scores(NamedTuple):
    add: float
    keep: float
    delete: float


def sari(answers: Answers) -> tuple[float, dict[str, float]]:
    """Return the mean over the examples; `add`, `keep` and `delete` are its three parts.

    All references of an example count together.
    """
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    from sacrebleu.tokenizers.tokenizer_zh import TokenizerZh

    assert len(answers.sources) == len(answers.predictions), "sari compares with the input texts"
    tokenize = {"13a": Tokenizer13a, "zh": TokenizerZh}[tokenizer_for(answers.references)]()

    def words(text: str | None) -> list[str]:
        return str(tokenize((text or "").lower())).split()

    parts = [
        _example(words(source), words(prediction), [words(reference) for reference in accepted])
        for source, (prediction, accepted) in zip(answers.sources, answers.pairs(), strict=True)
    ]
    means = _Scores(*(100.0 * sum(part[index] for part in parts) / len(parts) for index in range(3)))
    return sum(means) / 3, means._asdict()


def _example(source: list[str], prediction: list[str], references: Sequence[list[str]]) -> _Scores:
    orders = [_order(n, source, prediction, references) for n in _ORDERS]
    return _Scores(*(sum(part[index] for part in orders) / len(_ORDERS) for index in range(3)))


def _order(n: int, source: list[str], prediction: list[str], references: Sequence[list[str]]) -> _Scores:
    """Score sequences of `n` words; counts of source and prediction are times the number of references."""
    times = len(references)
    wanted = sum((_grams(reference, n) for reference in references), _Grams())
    had = _Grams({gram: count * times for gram, count in _grams(source, n).items()})
    has = _Grams({gram: count * times for gram, count in _grams(prediction, n).items()})
    common, deleted = had & has, had - has
    right = common & wanted
    keep = _f1(_share(right, common), _ratio(right.total(), (had & wanted).total()))
    added, missing = has.keys() - had.keys(), wanted.keys() - had.keys()
    good = len(added & wanted.keys())
    add = _f1(_ratio(good, len(added)), _ratio(good, len(missing)))
    return _Scores(add, keep, _share(deleted - wanted, deleted))


def _grams(words: list[str], n: int) -> _Grams:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _share(right: _Grams, counts: _Grams) -> float:
    """Return the mean over the sequences in `counts` of the share of their count that is right."""
    return sum(right[gram] / count for gram, count in counts.items()) / len(counts) if counts else 1.0


def _ratio(part: float, total: float) -> float:
    return part / total if total else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
