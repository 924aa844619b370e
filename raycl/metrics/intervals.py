"""The 95 % confidence interval of a score over a sample of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVEL = 0.95


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper limit of the mean of the rows' scores, 0 to 100.

    Rows that are right or wrong have Wilson's interval of a share, which is no point where all are right; others the
    bias-corrected and accelerated bootstrap of 9,999 resamples with a fixed seed (both of scipy). Rows are taken as
    drawn from endlessly many: for a sample that is a large part of its test set the interval is wider than it need be.
    """
    from scipy import stats  # half a second of imports, only paid by runs that sample

    values = np.asarray(scores, dtype=np.float64)
    if np.isin(values, (0.0, 100.0)).all():
        limits = stats.binomtest(int((values > 0).sum()), len(values)).proportion_ci(LEVEL, method="wilson")
        return 100.0 * float(limits.low), 100.0 * float(limits.high)
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    limits = stats.bootstrap((values,), np.mean, n_resamples=9_999, confidence_level=LEVEL, rng=0).confidence_interval
    return float(limits.low), float(limits.high)
