"""GEM: the quadratic program, the projection by hand, and what it changes in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ENGINES, Lab, exported, matrix, run, trace
from torch import Tensor

from raycl.errors import ConfigError
from raycl.methods.gradients import agem
from raycl.methods.gradients.gem import GemConfig, dual, project
from raycl.methods.gradients.projection import product
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
GEM = {"name": "gem", "rows": 7}


def named(vector: list[float]) -> dict[str, Tensor]:
    """Return a gradient whose entries are parameters of their own: the projection is that of the whole vector."""
    return {str(index): torch.tensor([float(value)]) for index, value in enumerate(vector)}


def projected(g: list[float], *references: list[float], margin: float = 0.0) -> list[float]:
    result = project(named(g), [named(reference) for reference in references], margin)
    assert all(value.dtype == torch.float32 for value in result.values())
    return [float(value) for value in result.values()]


def test_the_projection_by_hand() -> None:
    assert projected([1, 0], [-1, 0]) == pytest.approx([0, 0], abs=0.01), "reversed signs give (2, 0)"
    assert projected([-2, 1], [1, 0], [0, 1]) == pytest.approx([0, 1], abs=0.01)
    assert projected([-2, 1], [1, 0], [0, 1], margin=0.5) == pytest.approx([0, 1.5], abs=0.01), "it lifts all v"


def test_a_gradient_that_agrees_with_all_tasks_stays_as_it_is() -> None:
    assert projected([1, 2], [0, 1], [-2, 1], margin=0.5) == [1, 2]
    assert projected([1, 2], [0, 0], margin=0.5) == [1, 2]


def test_one_earlier_task_without_margin_is_agem() -> None:
    g, r = [3.0, -1.0, 2.0], [-20.0, 5.0, 10.0]
    expected = [float(value) for value in agem.project(named(g), named(r)).values()]
    assert projected(g, r) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_the_program_is_solved(margin: float) -> None:
    """Its conditions: v >= margin, P v + q >= 0, and one of both is an equality. Two tasks have one gradient."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows_KD = torch.randn(5, 30, generator=draw, dtype=torch.float64)
        rows_KD = torch.cat([rows_KD, 30 * rows_KD[:1], rows_KD[:1]])
        q_K, gram_KK = rows_KD @ torch.randn(30, generator=draw, dtype=torch.float64), rows_KD @ rows_KD.T
        v_K = dual(gram_KK, q_K, margin)
        slope_K = gram_KK @ v_K + 1e-3 * v_K + q_K
        scale_K = gram_KK.diagonal().sqrt()
        assert bool((v_K >= margin).all()) and bool((slope_K >= -1e-6 * scale_K).all())
        assert ((v_K - margin) * slope_K).abs().max() < 1e-4


def finished(lab: Lab, folder: Path, method: Any, **sections: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config("bert", method, **sections), storage)
    return storage


def test_one_task_is_the_learners_own_bit_for_bit(lab: Lab, tmp_path: Path) -> None:
    item = {"stream": {"tasks": lab.tasks[:1]}}
    plain, result = (finished(lab, tmp_path / str(n), m, **item) for n, m in enumerate(("lora", GEM)))
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)


@pytest.mark.parametrize("learner", ["lora", "finetune"])
def test_no_step_goes_against_an_earlier_task(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: str
) -> None:
    """The optimizer's gradients have no negative product with an earlier task's, of which two are kept in the third."""
    products: list[tuple[float, float]] = []

    def observed(gradients: Any, references: Any, margin: float) -> dict[str, Tensor]:
        result = project(gradients, references, margin)
        least = (min(product(item, r) for r in references) for item in (gradients, result))
        products.append((*least,))
        assert len(references) == (1 if len(products) <= 4 else 2)
        return result

    monkeypatch.setattr("raycl.methods.gradients.gem.project", observed)
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "again"}]
    finished(lab, tmp_path, {**GEM, "learner": learner, "margin": 0.0}, stream={"tasks": tasks})
    assert len(products) == 8, "every step after the first task"
    assert min(before for before, _ in products) < -1e-4
    assert all(after >= 0.02 * before for before, after in products if before < 0), "the ridge leaves 1e-3 v"
    assert all(after == before for before, after in products if before >= 0)


def test_what_it_cannot_work_with_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method 'gem' computes gradients of its own, which engine.zero_stage=3 doe"):
        check(lab.config("bert", "gem", ENGINES["zero3"]))
    with pytest.raises(ConfigError, match=r"method\.learner is slm, which trains each task's adapters on its own"):
        build(lab.config("bert", {"name": "gem", "learner": lab.slots()}), WORLD)


def test_the_first_phase_does_not_depend_on_stored_rows() -> None:
    gem_config, other = GemConfig(rows=2), GemConfig(margin=0.1)
    assert gem_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b"))
    assert gem_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))
    assert gem_config.rereads_rows and gem_config.keeps_data
