"""Published deviations from the numbers in `matrix` under the same names.

A number may be printed beside a published one only if both follow the same formula. Each variant reproduces what one
paper states or one repository's code does, with the source in one line.

`reference` is what a variant subtracts: `singles` (each task trained alone), `untrained` (each task before any
training), or nothing. The notation is that of `matrix`; None where a number is undefined.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from raycl.metrics.matrix import (
    AccuracyMatrix,
    Values,
    ap,
    bwt,
    bwt_m,
    changes,
    diagonal,
    drops,
    f_ra,
    f_t,
    fwt,
    is_sequence,
    mean,
)

References = Sequence[float | None]

SAPT_CONSTANT = 50.94
"""SAPT's `score.py` subtracts this in place of the single-task mean, whatever the method and stream."""


class Variant(NamedTuple):
    """A published way to compute a number.

    Attributes:
        function: values, and one reference per task unless `reference` is "none" -> number or None.
        source: its origin and rule, in one line.
        reference: the kind of references to pass.
    """

    function: Callable[..., float | None]
    source: str
    reference: Literal["none", "singles", "untrained"] = "none"


def compute_variants(
    matrix: AccuracyMatrix, singles: Mapping[str, float] | None = None, untrained: Mapping[str, float] | None = None
) -> dict[str, float | None]:
    """Return every variant of a matrix by name.

    Args:
        singles: task -> score when trained alone.
        untrained: task -> score of the untrained model.
    """
    values = matrix.values()
    known = {"singles": singles or {}, "untrained": untrained or {}}
    references = {kind: [scores.get(task) for task in matrix.tasks] for kind, scores in known.items()}
    return {
        name: variant.function(values, *([] if variant.reference == "none" else [references[variant.reference]]))
        for name, variant in VARIANTS.items()
    }


def _mean_diagonal(values: Values) -> float | None:
    return mean(diagonal(values)) if is_sequence(values) else None


def _fwt_constant(values: Values) -> float | None:
    score = _mean_diagonal(values)
    return None if score is None else score - SAPT_CONSTANT


def _fwt_untrained(values: Values, untrained: References) -> float | None:
    if not is_sequence(values):
        return None
    pairs = [(values[j - 1][j], untrained[j]) for j in range(1, len(values))]
    return mean([None if score is None or start is None else score - start for score, start in pairs])


def _forgetting_never_negative(values: Values) -> float | None:
    return mean([None if drop is None else max(drop, 0.0) for drop in drops(values)])


def _bwt_clamped(values: Values) -> float | None:
    losses = mean([None if change is None else min(change, 0.0) for change in changes(values)])
    return None if losses is None else losses * (len(values) - 1) / len(values)


def _bwt_all_phases(values: Values) -> float | None:
    """Return `2 / (M (M-1)) * sum_{i>=3} sum_{j<=i-2} (a[i][j] - a[j][j])`; the task just before phase i is skipped."""
    if not is_sequence(values) or len(values) < 3:
        return None
    tasks = len(values)
    until = [[row[:phases] for row in values[:phases]] for phases in range(3, tasks + 1)]
    known = mean([change for part in until for change in changes(part)[:-1]])
    return None if known is None else known * (tasks - 2) / tasks


def _forgetting_skipping(values: Values) -> float | None:
    """Return `sum_{j<=M-2} (a[j][j] - a[M][j]) / (M-1)`; the last task but one is skipped, yet counted below the
    line."""
    losses = mean(changes(values)[:-1])
    return None if losses is None else -losses * (len(values) - 2) / (len(values) - 1)


VARIANTS: dict[str, Variant] = {
    "ap_sapt": Variant(ap, "SAPT section 5.1.2 and score.py 'Cl': mean of the last row"),
    "f_ra_sapt": Variant(f_ra, "SAPT section 5.1.2 and score.py 'Fgt': best before the last phase minus final"),
    "fwt_sapt": Variant(fwt, "SAPT section 5.1.2: diagonal minus single-task scores", "singles"),
    "fwt_sapt_code": Variant(_fwt_constant, f"SAPT score.py 'Fwt': mean diagonal minus {SAPT_CONSTANT}"),
    "bwt_sapt": Variant(bwt, "SAPT section 5.1.2: final minus diagonal, divided by M-1"),
    "bwt_sapt_code": Variant(bwt_m, "SAPT score.py 'Bwt' and its printed tables: divided by M"),
    "fwt_gainlora": Variant(_mean_diagonal, "GainLoRA score.py 'Fwt': mean diagonal, nothing subtracted"),
    "forgetting_gainlora": Variant(f_ra, "GainLoRA score.py 'Fgt': best before the last phase minus final"),
    "bwt_gainlora": Variant(bwt_m, "GainLoRA score.py 'Bwt': divided by M"),
    "bwt_mammoth": Variant(bwt, "Mammoth utils/metrics.py backward_transfer: divided by M-1"),
    "fwt_mammoth": Variant(
        _fwt_untrained, "Mammoth utils/metrics.py forward_transfer: score one phase early minus untrained", "untrained"
    ),
    "forgetting_mammoth": Variant(
        _forgetting_never_negative, "Mammoth utils/metrics.py forgetting: maximum includes the last row"
    ),
    "bwt_libcontinual": Variant(
        _bwt_all_phases, "LibContinual compute_bwt: over all phases, the task just learned before is skipped"
    ),
    "forgetting_libcontinual": Variant(
        _forgetting_skipping, "LibContinual compute_frgt: diagonal minus final, last task but one skipped"
    ),
    "bwt_treelora": Variant(_bwt_clamped, "TreeLoRA collect_results.py: gains count as 0, divided by M"),
    "f_t_slm": Variant(
        lambda values: next(reversed(f_t(values)), None),
        "SLM section 4.4, eq. 8: F_M, best score of any earlier phase minus final",
    ),
}
"""Name `<number>_<source>` -> variant; `_code` marks released code that differs from its paper."""
