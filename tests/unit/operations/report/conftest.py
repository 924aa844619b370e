"""Made-up result files: what finished runs leave behind.

raycl is imported where it is needed: pytest imports this file before it starts the processes that get tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

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
                "method": {"name": method, "r": 8},
            },
            "stream": {"name": "long-a", "tasks": ["agnews", "dbpedia", "yahoo"], "notes": ["dev equals test"]},
            "phases": ["agnews", "dbpedia", "yahoo"],
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
            "phase_times": [],
            "tokens_per_s": 1234.5,
            "wall_s": 75.0,
        }
    )


def _routed(tasks: list[str], router: str = "discriminant", slots: int = 4, **settings: Any) -> dict[str, Any]:
    """Return a run of SLM over these tasks: keys around a direction of each task, in six groups of eight dimensions."""
    draw, groups = np.random.default_rng(0), 6
    result = _result("slm", **settings)
    blank = [[None] * len(tasks) for _ in tasks]
    result |= {"phases": tasks, "matrix": blank, "stream": {"name": "long-a", "tasks": tasks, "notes": []}}
    centres = draw.normal(size=(len(tasks), 1, groups, 8)) + 0.8
    keys = (centres + 0.5 * draw.normal(size=(len(tasks), slots, groups, 8))).reshape(-1, groups, 8)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    cosines = np.einsum("igh,jgh->ij", keys, keys) / groups
    result["phase_summaries"] = [
        _facts(tasks[: count + 1], router, slots, cosines[: slots * (count + 1), : slots * (count + 1)], draw)
        for count in range(len(tasks))
    ]
    return result


def _facts(
    tasks: list[str], router: str, slots: int, cosines: np.ndarray[Any, Any], draw: np.random.Generator
) -> dict[str, Any]:
    """Return facts as `Slm.summary` gives them after the last of `tasks`."""
    worst = {"keys": 70.0, "discriminant": 90.0, "eq13": 60.0}
    places = draw.normal(size=(len(tasks), slots, 6, 2)) + 9 * np.array([[n % 3, n // 3] for n in range(6)])
    return {
        "router": router,
        "own_shares": {
            kind: {task: float(draw.uniform(least, 100)) for task in tasks} for kind, least in worst.items()
        },
        "confusion": {
            kind: {task: {task: 75.0, tasks[0]: 25.0} if task != tasks[0] else {task: 100.0} for task in tasks}
            for kind in ("keys", "discriminant")
        },
        "novelty": {tasks[-1]: 93.75} if len(tasks) > 1 else {},
        "ood": {
            "kept": 64 * len(tasks),
            "learned": {task: [0.04, 0.2, 0.45 + 0.01 * number, 0.7, 0.93] for number, task in enumerate(tasks)},
            "outside": {tasks[-1]: [0.6, 0.9, 1.0, 1.0, 1.0]} if len(tasks) > 1 else {},
        },
        "truncated_queries": 0,
        "slot_similarity": cosines[-slots:].round(3).tolist(),
        "key_plane": [
            {"x": x, "y": y, "slot": f"{task}.{slot}", "group": group}
            for task, slots_xy in zip(tasks, places.tolist(), strict=True)
            for slot, groups_xy in enumerate(slots_xy)
            for group, (x, y) in enumerate(groups_xy)
        ],
    }


@pytest.fixture
def make_routed() -> Callable[..., dict[str, Any]]:
    """Return what builds a result tree of SLM: call it with tasks' names and perhaps `router`, `slots`, `seed`."""
    return _routed


@pytest.fixture
def make_result() -> Callable[..., dict[str, Any]]:
    """Return what builds a result tree of the worked example: call it with `method`, `seed`, `ap`."""
    return _result


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures behind the files written in a test."""
    from raycl.operations.report import plots

    figures: list[Figure] = []
    save = plots.save_png

    def keep(figure: Figure, path: str | Path) -> Path:
        figures.append(figure)
        return save(figure, path)

    monkeypatch.setattr(plots, "save_png", keep)
    return figures
