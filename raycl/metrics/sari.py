"""SARI of simplified texts: which word sequences were added, kept and deleted, compared with the references.

Xu et al. 2016, "Optimizing Statistical Machine Translation for Text Simplification", section 4; sequences of one to
four words, F1 of what was added and kept, precision of what was deleted. No maintained package has it without
downloading code, so it is implemented here. As in the script that Hugging Face's `evaluate` downloads, 0/0 counts as 1
and texts are lower-cased and tokenised by sacrebleu.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from raycl.metrics.answers import Answers
from raycl.metrics.overlap import tokenizer_for

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
