"""A made-up result file: what a finished run leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

WORKED: list[list[float | None]] = [[90.0, None, None], [80.0, 85.0, None], [70.0, 80.0, 95.0]]


def _result(method: str = "sapt", seed: int = 0, ap: float = 81.667) -> dict[str, Any]:
    cells = [[None if v is None else {"value": v, "count": 10, "extra": {}} for v in row] for row in WORKED]
    return copy.deepcopy(
        {
            "raycl": "0.1.0",
            "fingerprint": "f" * 16,
            "config": {
                "seed": seed,
                "stream": {"name": "long-a"},
                "backbone": {"name": "models/mini-t5"},
                "method": {"name": method, "rank": 8},
            },
            "stream": {"name": "long-a", "tasks": ["agnews", "dbpedia", "yahoo"], "notes": ["dev equals test"]},
            "stages": ["agnews", "dbpedia", "yahoo"],
            "matrix": cells,
            "singles": None,
            "metrics": {
                "ap": ap,
                "f_ra": 12.5,
                "fwt": None,
                "bwt": -12.5,
                "bwt_m": -8.333,
                "average_accuracy": ap,
                "f_t": [10.0, 12.5],
            },
            "stage_times": [],
            "tokens_per_s": 1234.5,
            "wall_s": 75.0,
        }
    )


@pytest.fixture
def make_result() -> Callable[..., dict[str, Any]]:
    """Builds a result tree of the worked example; call it with `method`, `seed`, `ap`."""
    return _result
