"""Loss trace and accuracy matrix of a two-task toy stream per method, kept in `traces.json`.

The encoder's weights, the rows and their order follow from fixed seeds, so these numbers change only when the
meaning of training changes. When that is intended, write them anew and look at the difference before you commit it:

    RAYCL_REGENERATE=1 python -m pytest tests/golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny import KINDS, RUNS, WRITERS, Lab, fits, matrix, run, trace

from raycl.storage import Storage

TRACES = Path(__file__).with_name("traces.json")
ALL = (*RUNS, *WRITERS)
TOLERANCE = 2e-4
"""The tolerance of losses.

Kernels for other processors sum in another order, and each step of training adds to the difference: after 16 steps of
SAPT it was 7e-5 between two.
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def measured(lab: Lab, method: str, folder: Path) -> dict[str, Any]:
    """Return the losses and gradient norms of all steps, and the matrix."""
    storage = Storage.at(folder)
    sections = {
        "stream": {"train_rows": 6},  # a whole batch and half of one in each of two epochs
        "train": {
            "epochs": 2,
            "learning_rate": 0.01,
            "lr_scheduler": "linear",
            "weight_decay": 0.01,
            "micro_batch_size": 2,
        },
    }
    settings: Any = {"name": "slm", "encoder": {"name": "minilm"}} if method == "slm" else method
    kind = next(kind for kind in KINDS if fits(kind, method))
    run(lab.config(kind, WRITERS.get(method, settings), seed=7, **sections), storage)
    steps = trace(storage)
    return {
        "loss": [round(step[2], 8) for step in steps],
        "grad_norm": [round(step[3], 8) for step in steps],
        "matrix": [[None if cell is None else round(cell, 8) for cell in row] for row in matrix(storage)],
    }


@pytest.mark.parametrize("method", ALL)
def test_training_reproduces_the_recorded_traces(lab: Lab, tmp_path: Path, method: str) -> None:
    result = measured(lab, method, tmp_path)
    kept = json.loads(TRACES.read_text()) if TRACES.exists() else {}
    if os.environ.get("RAYCL_REGENERATE"):
        TRACES.write_text(json.dumps({**kept, method: result}, indent=1) + "\n")
        pytest.skip(f"wrote {TRACES.name}")
    assert method in kept, "a new method: write its trace as the first lines of this file say"
    expected = kept[method]
    assert result["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], abs=TOLERANCE * 10)
    assert result["matrix"] == expected["matrix"]


def test_every_method_has_a_trace() -> None:
    if os.environ.get("RAYCL_REGENERATE"):
        pytest.skip("they are being written")
    assert set(json.loads(TRACES.read_text())) == set(ALL)
