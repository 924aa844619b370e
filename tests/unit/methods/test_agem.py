"""A-GEM: the projection, which rows the reference gradient is of, and what it changes in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from axes import sampled
from phases import begin_phase
from tiny import ENGINES, Lab, exported, matrix, run, trace
from torch import Tensor

from raycl.errors import ConfigError
from raycl.methods.gradients.agem import Agem, AgemConfig, project
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
AGEM = {"name": "agem", "share": 0.5, "batch": 4}


def projected(g: list[float], r: list[float]) -> list[float]:
    """Return the projection of vectors whose entries are parameters of their own: it is that of the whole vector."""
    gradients, reference = ({str(index): torch.tensor([float(v)]) for index, v in enumerate(item)} for item in (g, r))
    result = project(gradients, reference)
    assert all(value.dtype == torch.float32 for value in result.values())
    return [float(value) for value in result.values()]


def test_the_projection_of_two_vectors() -> None:
    assert projected([1, 0], [-1, 1]) == [0.5, 0.5]
    assert projected([-2, 1], [0.5, 0.5]) == [-1.5, 1.5], "the mean of two old gradients, still against the first"
    assert projected([1, 0], [-1, 0]) == [0, 0]


def test_a_gradient_that_agrees_or_has_nothing_to_agree_with_stays_as_it_is() -> None:
    assert projected([1, 2], [0, 1]) == projected([1, 2], [-2, 1]) == projected([1, 2], [0, 0]) == [1, 2]


def test_small_products_are_not_lost_in_large_sums() -> None:
    """In float32 1e8 - 2 is 1e8, and the product of these two would be 0."""
    gradient = project({"g": torch.tensor([1e8, -2.0, -1e8])}, {"g": torch.ones(3)})["g"]
    assert float(gradient[1]) == pytest.approx(-2 + 2 / 3)


def test_rows_are_drawn_from_all_earlier_tasks_by_the_steps_seed(lab: Lab) -> None:
    context, _ = build(lab.config("bert", {**AGEM, "share": 1.0, "batch": 9}), WORLD)
    method = context.method
    assert isinstance(method, Agem)
    begin_phase(context, 0)
    assert not method.stored
    begin_phase(context, 1)
    method.stored.append((context.stream.tasks[1], np.arange(100, 120)))
    own = {task.name: set(rows.tolist()) for task, rows in method.stored}
    drawn = {seed: method._drawn(seed) for seed in (1, 2, 1)}
    for rows in drawn.values():
        assert [task.name for task, _ in rows] == ["colour", "animal"]
        assert sum(len(set(chosen.tolist())) for _, chosen in rows) == 9
        assert all(set(chosen.tolist()) <= own[task.name] for task, chosen in rows)
    same = method._drawn(1)
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(drawn[1], same, strict=True))
    assert any(not np.array_equal(a, b) for (_, a), (_, b) in zip(drawn[1], drawn[2], strict=True))


def finished(lab: Lab, folder: Path, method: Any, **sections: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config("bert", method, **sections), storage)
    return storage


def test_one_task_is_the_learners_own_bit_for_bit(lab: Lab, tmp_path: Path) -> None:
    item = {"stream": {"tasks": lab.tasks[:1]}}
    plain, result = (finished(lab, tmp_path / str(n), m, **item) for n, m in enumerate(("lora", AGEM)))
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)


@pytest.mark.parametrize("learner", ["finetune", "olora"])
def test_no_step_goes_against_the_earlier_tasks(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: str
) -> None:
    """The optimizer's gradients have no negative product with the reference gradient, and sometimes had one before."""
    products: list[tuple[float, float]] = []

    def observe_forward(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Tensor]:
        output = project(gradients, reference)
        before, after = (sum(float((item[n] * reference[n]).sum()) for n in item) for item in (gradients, output))
        products.append((before, after))
        return output

    monkeypatch.setattr("raycl.methods.gradients.agem.project", observe_forward)
    finished(lab, tmp_path, {**AGEM, "learner": learner}, train={"epochs": 3, "learning_rate": 0.003})
    assert len(products) == 12, "every step of the second task"
    assert min(before for before, _ in products) < -1e-4
    assert min(after for _, after in products) > -1e-5
    assert all(after == before for before, after in products if before >= 0)


def test_the_second_task_forgets_less(lab: Lab, tmp_path: Path) -> None:
    train = {"epochs": 4, "learning_rate": 0.03}
    plain, result = (
        finished(lab, tmp_path / str(number), method, train=train)
        for number, method in enumerate(("lora", {**AGEM, "share": 1.0, "batch": 14}))
    )
    assert matrix(result)[0] == matrix(plain)[0]
    assert matrix(result)[1][0] >= matrix(plain)[1][0]
    assert trace(result)[-1][2] != trace(plain)[-1][2]


SPLIT = {"learning_rate": 0.003, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def on_torch(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Learner -> the steps of a run with plain torch."""

    @cache
    def steps(learner: str) -> list[Any]:
        return trace(finished(lab, tmp_path_factory.mktemp("torch"), {**AGEM, "learner": learner}, train=SPLIT))

    return steps


@pytest.mark.parametrize(
    ("learner", "engine"),
    sampled([(learner, engine) for learner in ("lora", "finetune") for engine in ("zero0", "zero1", "zero2")]),
)
def test_every_engine_projects_as_plain_torch_does(
    lab: Lab, tmp_path: Path, on_torch: Callable[[str], list[Any]], learner: str, engine: str
) -> None:
    other = trace(finished(lab, tmp_path, {**AGEM, "learner": learner}, train=SPLIT, engine=ENGINES[engine]))
    for mine, step in zip(other, on_torch(learner), strict=True):
        assert mine == pytest.approx(step, abs=1e-4, rel=1e-3)


def test_an_engine_that_shards_parameters_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method 'agem' computes gradients of its own, which engine.zero_stage=3"):
        check(lab.config("bert", AGEM, ENGINES["zero3"]))
    check(lab.config("bert", AGEM, ENGINES["zero2"]))


def test_the_first_phase_does_not_depend_on_the_buffer() -> None:
    agem_config, other = AgemConfig(share=0.1), AgemConfig(share=0.2, batch=3)
    assert agem_config.cache_key(0, ("a", "b")) == other.cache_key(0, ("a", "b")) != {}
    assert agem_config.cache_key(1, ("a", "b")) != other.cache_key(1, ("a", "b"))


def test_a_learner_with_adapters_for_its_own_texts_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"method\.learner is slm, which trains each task's adapters on its own"):
        build(lab.config("bert", {"name": "agem", "learner": lab.slots()}), WORLD)
