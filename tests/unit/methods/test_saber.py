"""SABER: which earlier prompts agree, by hand, and that refinement keeps off what they have used."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import Lab, run
from torch import Tensor

from raycl.bank.tensor_groups import TensorGroups
from raycl.errors import BankError, ConfigError
from raycl.methods.context import Step
from raycl.methods.prompts.saber import PROMPTS, Saber, agrees, directions, extended, mean_overlap, wasserstein
from raycl.storage import Storage
from raycl.testing import check_method
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.data import PhaseData
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
SETTINGS = {"name": "saber", "prompt_length": 3, "refine_after": 1}


def test_what_is_compared_by_hand() -> None:
    basis = torch.eye(3)[:, :2]
    assert mean_overlap(torch.tensor([[3.0, 0.0, 4.0], [0.0, 2.0, 0.0]]), basis) == pytest.approx((0.6 + 1.0) / 2)
    assert mean_overlap(torch.zeros(1, 3), basis) == 0
    found = directions(torch.tensor([[9.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 5.0]]), 2)
    torch.testing.assert_close(found.abs(), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    wider = extended(basis, torch.tensor([5.0, 5.0, 0.1]))
    torch.testing.assert_close(wider.T @ wider, torch.eye(3))
    assert wider.is_contiguous(), "as a checkpoint gives it back: else the last bits differ after a resume"
    assert extended(basis, torch.tensor([1.0, 2.0, 0.0])) is basis and extended(basis, torch.zeros(3)) is basis
    assert wasserstein(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([5.0, 6.0, 8.0])) == pytest.approx(5)
    assert wasserstein(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 3.0])) == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"overlap": 0.2, "cosine": 0.1}, True),
        ({"overlap": 0.05, "cosine": 0.1}, False),
        ({"overlap": 0.2, "cosine": 0.0}, False),
        ({"gap": 0.3}, True),
        ({"gap": 0.1}, False),
        ({"overlap": 0.2, "cosine": 0.1, "gap": 0.1}, False),
        ({"overlap": 0.05, "cosine": 0.1, "gap": 0.3}, False),
        ({"overlap": 0.2, "cosine": 0.1, "gap": 0.3}, True),
    ],
)
def test_a_prompt_is_refined_where_all_that_is_measured_agrees(scores: dict[str, float], expected: bool) -> None:
    assert agrees(scores, 0.1, 0.2) is expected


def begun(lab: Lab, kind: str = "llama", **settings: Any) -> tuple[Saber, TrainingContext, PhaseData]:
    """Return the method in the second task."""
    context, _ = build(lab.config(kind, {**SETTINGS, **settings}, train={"epochs": 2}), WORLD)
    method = context.method
    assert isinstance(method, Saber)
    end_phase(context, begin_phase(context, 0))
    return method, context, begin_phase(context, 1)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_an_earlier_prompt_is_judged_alone_and_stands_as_it_was_learned(lab: Lab, kind: str) -> None:
    method, context, _ = begun(lab, kind, overlap=0.0, criterion="both", gap=-9.0)
    old = method._learned["colour"].prompt
    assert old is not None and method._kept["saber/basis"]["colour"].shape == (old.numel(), 3)
    assert set(method.scores["colour"]) == {"overlap", "cosine", "gap"}
    trained = dict(context.backbone.named_parameters())[PROMPTS]
    assert len(trained) == 1 + len(method.chosen)
    if method.chosen:
        assert torch.equal(trained[1], old)
    again, _, _ = begun(lab, kind, overlap=1.0)
    assert again.chosen == [], "an overlap of 1 agrees with nothing"
    assert again.scores["colour"]["overlap"] == pytest.approx(method.scores["colour"]["overlap"], abs=1e-5)


def test_steps_train_the_tasks_prompt_first_and_then_chosen_ones_off_their_directions(lab: Lab) -> None:
    method, _, data = begun(lab)
    method.chosen = ["colour"]
    steps = -(-data.count("train") // data.batch_size)
    draw = torch.Generator().manual_seed(0)
    change = torch.randn(2, 3, 32, generator=draw)
    before = torch.randn(2, 3, 32, generator=draw)
    basis = method._kept["saber/basis"]["colour"]
    assert (change[1].flatten() @ basis).abs().max() > 0.01
    for step, refines in ((0, False), (steps - 1, False), (steps, True)):
        data.step = Step(step)
        assert method.refines is refines
        gradient = method.transform_gradients({PROMPTS: change})[PROMPTS]
        assert method.constraint is not None and list(method.constraint.names) == [PROMPTS]
        moved = method.constraint(PROMPTS, before, before + change) - before
        for result in (gradient, moved):
            held, changed = (0, 1) if refines else (1, 0)
            assert not result[held].any() and result[changed].any()
            if refines:
                assert float((result[1].flatten() @ basis).abs().max()) < 1e-5
                rest = change[1].flatten() - result[1].flatten()
                torch.testing.assert_close(basis @ (basis.T @ rest), rest, atol=1e-5, rtol=1e-4)


def prompts_of(method: Saber) -> dict[str, Tensor]:
    states = {name: state.prompt for name, state in method._learned.items()}
    return {name: prompt for name, prompt in states.items() if prompt is not None}


@pytest.mark.parametrize("agree", [True, False])
def test_a_run_refines_prompts_that_agree_and_no_others(lab: Lab, tmp_path: Any, agree: bool) -> None:
    """The second epoch refines; a refinement keeps off the prompt's directions, and is one of them afterwards."""
    settings = {**SETTINGS, "criterion": "loss", "gap": -9.0 if agree else 9.0}
    config = lab.config("llama", settings, train={"epochs": 2})
    first = run(lab.config("llama", settings, stream={"tasks": lab.tasks[:1]}, train={"epochs": 2}), store(tmp_path, 0))
    both = run(config, store(tmp_path, 1)).context.method
    alone = first.context.method
    assert isinstance(both, Saber) and isinstance(alone, Saber)
    change = (prompts_of(both)["colour"] - prompts_of(alone)["colour"]).flatten()
    assert both.refined == {"colour": [], "animal": ["colour"] if agree else []}
    basis = both._kept["saber/basis"]["colour"]
    if agree:
        assert change.norm() > 1e-3
        assert float((alone._kept["saber/basis"]["colour"].T @ change).norm() / change.norm()) < 1e-4
        assert basis.shape[1] == 4 and float((basis.T @ change).norm() / change.norm()) == pytest.approx(1, abs=1e-4)
        with pytest.raises(BankError, match=r"task 'animal' has refined the prompts of colour .* cannot be taken out"):
            Saber.without_task(*both.state_dict(), "animal", ["animal"], False)
    else:
        assert not change.any() and basis.shape[1] == 3
        left = Saber.without_task(*both.state_dict(), "animal", ["animal"], False)[1]
        assert any(name.startswith("saber/") for name in left) and not any("animal" in name for name in left)


def store(folder: Any, number: int) -> Storage:
    return Storage.at(folder / str(number))


def test_a_label_head_that_knows_no_new_task_is_refused(lab: Lab) -> None:
    with pytest.raises(
        ConfigError, match="'saber' measures how earlier prompts answer a new task before it is learned"
    ):
        check(lab.config("bert", "saber"))


def test_refinement_of_a_task_that_is_gone_stands_in_no_ones_way() -> None:
    values = {"refined": {"a": [], "b": ["a"]}, "scores": {"a": {}, "b": {}}}
    without_a, _ = Saber._without(values, TensorGroups({}), "a", ())
    assert without_a["refined"] == {"b": []}
    assert Saber._without(without_a, TensorGroups({}), "b", ())[0]["refined"] == {}


@pytest.mark.parametrize(
    ("epochs", "said"), [(10, "from epoch 11 of a task, which 'colour' (10), 'animal' (10)"), (11, "")]
)
def test_epochs_that_refine_nothing_are_warned_of(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, epochs: int, said: str
) -> None:
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    check(lab.config("t5", {"name": "saber", "prompt_length": 3}, train={"epochs": epochs}))
    assert (said in caplog.text) if said else "named for" not in caplog.text


def test_a_run_that_refines_stops_and_resumes_and_is_served() -> None:
    settings = {"prompt_length": 3, "refine_after": 1, "criterion": "both", "overlap": 0.0, "gap": -9.0}
    check_method(Saber, settings, kinds=("t5",), sections={"train": {"epochs": 2, "batch_size": 7}})
