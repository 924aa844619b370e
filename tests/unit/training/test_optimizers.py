"""Optimizers by name: each steps as its library does, stops and resumes bit for bit, and holds masked rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from axes import sampled
from bitsandbytes.optim import AdamW8bit
from built import built
from phases import begin_phase
from tiny import ENGINES, Lab, Stop, run, trace
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from transformers import Trainer, TrainingArguments

from raycl.config import as_tree, validate
from raycl.config.unused import unused_in
from raycl.errors import ConfigError
from raycl.methods.base import trained_names
from raycl.operations.plan.numbers import numbers, opened
from raycl.storage import Storage
from raycl.testing.packages import on_path, write_package
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import TorchEngine
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor
from raycl.training.optimizers.parameters import hold, release, specs_of, state_bytes, state_of
from raycl.training.optimizers.registry import OPTIMIZERS, optimizer_kind
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.phase.disk_space import plan_of
from raycl.training.setup.method_checks import check_engine, check_optimizer
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))


class Toy(Optimizer):
    """Moves against the sign of a mean of gradients, at a rate that halves with every step."""

    def __init__(self, groups: list[Group], lr: float, beta: float) -> None:
        super().__init__(groups, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"done": 0, "mean": torch.zeros_like(parameter, dtype=torch.float16)}
                state["mean"].lerp_(parameter.grad.half(), 1 - group["beta"])
                state["done"] += 1
                parameter.sub_(state["mean"].float().sign(), alpha=group["lr"] / 2 ** state["done"])


class ToyKind(OptimizerKind):
    """Its entry in the table, with a beta that is not AdamW's."""

    settings: ClassVar[Mapping[str, Any]] = {"betas": (0.5, 0.75)}

    def build(self, groups: list[Group]) -> Optimizer:
        return Toy(groups, self.train.learning_rate, self.values["betas"][0])

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        return {"mean": StateTensor(tuple(parameter.shape), torch.float16)}

    def counters(self, parameter: torch.Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        return {"done": steps}


@pytest.fixture(scope="module", autouse=True)
def package_with_toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make `train.optimizer=toy` work, as an installed package does."""
    entries = {"optimizer": {"toy": f"{__name__}:ToyKind"}}
    with on_path(write_package(tmp_path_factory.mktemp("packages"), "toys", entries)):
        yield


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "adafactor": {"optimizer": "adafactor", "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "plain sgd": {"optimizer": "sgd"},
    "adamw_8bit": {"optimizer": "adamw_8bit", "weight_decay": 0.1},
    "muon": {"optimizer": "muon", "weight_decay": 0.1},
}

OWN: dict[str, dict[str, Any]] = {**SETTINGS, "toy": {"optimizer": "toy"}}
"""The settings and those of an optimizer that is registered here."""


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"a": (4, 3), "b": (5,), "c": (80, 60)}
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


class Both:
    """Two optimizers one after the other, as torch's documentation of Muon has it."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()


def theirs(trained: list[nn.Parameter], name: str, train: TrainConfig) -> Optimizer | Both:
    """Return what the papers' code or the libraries would build."""
    if name == "adamw_8bit":
        return AdamW8bit(trained, lr=train.learning_rate, weight_decay=train.weight_decay)  # type: ignore[no-untyped-call]
    if name == "muon":
        matrices, others = ([p for p in trained if (p.dim() == 2) is wanted] for wanted in (True, False))
        settings = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
        return Both(Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings), AdamW(others, **settings))
    if name == "adamw":
        return AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay)
    if name == "adafactor":
        arguments = TrainingArguments(optim="adafactor", learning_rate=train.learning_rate, report_to=[], use_cpu=True)
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        return kind(trained, weight_decay=train.weight_decay, **settings)
    return SGD(trained, lr=train.learning_rate, momentum=train.momentum or 0, weight_decay=train.weight_decay)


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_the_library_and_go_on_from_their_state(name: str) -> None:
    train = TrainConfig(learning_rate=0.05, **SETTINGS[name])
    mine, other, later = parameters(), parameters(), parameters()
    (kind, ours, specs), reference, resumed = built(mine, train), theirs([*other.values()], name, train), None
    for step in range(6):
        if step == 3:
            resumed = built(later, train)[1]
            for key, parameter in later.items():
                parameter.data.copy_(mine[key].data)
                copies = {part: tensor.clone() for part, tensor in state_of(kind, ours, mine[key], specs[key]).items()}
                resumed.state[parameter] = {**copies, **kind.counters(parameter, specs[key], 3)}
        for group in (mine, other, later):
            draw = torch.Generator().manual_seed(step)
            for parameter in group.values():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
        ours.step()
        reference.step()
        if resumed is not None:
            resumed.step()
    assert all(torch.allclose(mine[key], other[key], atol=1e-6) for key in mine)
    assert all(torch.equal(mine[key], later[key]) for key in mine)


@pytest.mark.parametrize("name", OWN)
def test_a_run_resumes_bit_for_bit(lab: Lab, tmp_path: Path, name: str) -> None:
    """Matrices, a head and its bias; every task begins with a fresh optimizer, so that one task shows all."""
    config = lab.config("bert", "lora", train=OWN[name], stream={"tasks": lab.tasks[:1]})
    whole, parts = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "parts")
    run(config, whole)
    with pytest.raises(Stop):
        run(config, parts, after=3)
    run(config, parts)
    assert trace(parts) == trace(whole) and len(trace(whole)) == 4


@pytest.fixture(scope="module")
def on_torch(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Optimizer -> the losses of one task under plain torch."""

    @cache
    def losses(name: str) -> list[float]:
        storage = Storage.at(tmp_path_factory.mktemp("torch"))
        run(lab.config("bert", "lora", train=SETTINGS[name], stream={"tasks": lab.tasks[:1]}), storage)
        return [step[2] for step in trace(storage)]

    return losses


@pytest.mark.parametrize(
    ("name", "engine"),
    sampled([(name, engine) for name in ("adamw", "sgd", "plain sgd") for engine in ENGINES if engine != "torch"]),
)
def test_engines_that_share_out_parameters_run_what_is_elementwise(
    lab: Lab, tmp_path: Path, on_torch: Callable[[str], list[float]], name: str, engine: str
) -> None:
    """With weight decay, biases are a group of their own."""
    config = lab.config("bert", "lora", ENGINES[engine], train=SETTINGS[name], stream={"tasks": lab.tasks[:1]})
    check_engine(config)
    whole, parts = (Storage.at(tmp_path / part) for part in ("whole", "parts"))
    run(config, whole)
    with pytest.raises(Stop):
        run(config, parts, after=3)
    run(config, parts)
    assert trace(parts) == trace(whole) and len(trace(whole)) == 4
    assert [step[2] for step in trace(whole)] == pytest.approx(on_torch(name), abs=1e-5)


@pytest.mark.parametrize("name", OWN)
def test_plan_and_disk_space_count_what_is_kept(lab: Lab, tmp_path: Path, name: str) -> None:
    """A checkpoint inside a task holds weights and state, and nothing was estimated otherwise."""
    config = lab.config("t5", "lora", train={**OWN[name], "learning_rate": 0.001}, checkpoint={"every_steps": 1})
    context, open_engine = build(config, WORLD)
    begin_phase(context)
    engine = open_engine(1, 4)
    written = engine.share(trained_names(context.backbone))
    weights, state = (sum(t.nbytes for t in part.values()) for part in (written.parameters, written.optimizer))
    estimate = plan_of(context, context.phases[0], (4, 4)).inside
    numbers_of_run = numbers(opened(config))[3]
    assert estimate == weights + state == numbers_of_run.disk["checkpoint"]
    assert numbers_of_run.optimizer_bytes == 4 * state / weights
    assert {"adamw": 8, "sgd": 4, "plain sgd": 0, "toy": 2}.get(name, 4 * state / weights) == 4 * state / weights


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"train\.optimizer is 'adamv': did you mean 'adamw'\?"):
        TrainConfig(optimizer="adamv")


def decayed(context: TrainingContext, train: TrainConfig) -> set[str]:
    return {name for name, spec in specs_of(context.backbone, train, {}).items() if spec.decays}


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_weight_decay_leaves_out_what_the_hugging_face_trainer_leaves_out(lab: Lab, kind: str) -> None:
    context, _ = build(lab.config(kind, "finetune"), WORLD)
    begin_phase(context)
    theirs = {f"model.{name}" for name in Trainer.get_decay_parameter_names(None, context.backbone.model)}
    trained = set(trained_names(context.backbone))
    assert decayed(context, TrainConfig(weight_decay=0.1)) == (theirs | {"head.weight"}) & trained
    for settings in ({"weight_decay": 0.1, "decay_norms_and_biases": True}, {"weight_decay": 0.0}):
        assert decayed(context, TrainConfig.model_validate(settings)) == trained


def test_weight_decay_acts_on_the_matrices_of_adapters(lab: Lab) -> None:
    context, open_engine = build(lab.config("bert", "lora", train={"weight_decay": 0.1}), WORLD)
    begin_phase(context)
    engine = open_engine(1, 4)
    assert isinstance(engine, TorchEngine)
    decay = {id(p): group["weight_decay"] for group in engine.optimizer.param_groups for p in group["params"]}
    kept = {name for name, parameter in engine.trained.items() if not decay[id(parameter)]}
    assert kept == {"head.bias"} and set(decay.values()) == {0.0, 0.1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_entries_of_the_table_know_all_their_library_keeps(name: str) -> None:
    """State and counters are what the optimizer has after a step, no more and no less."""
    trained, train = parameters(), TrainConfig(optimizer=name, momentum=0.9)
    kind, optimizer, specs = built(trained, train)
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for key, parameter in trained.items():
        kept = optimizer.state[parameter]
        assert kept.keys() == {*kind.state(specs[key]), *kind.counters(parameter, specs[key], 1)}
        for part, tensor in kind.state(specs[key]).items():
            assert (tuple(kept[part].shape), kept[part].dtype) == (tensor.shape, tensor.dtype)


def test_eight_bits_are_a_quarter_of_adamws_state() -> None:
    kind, large = optimizer_kind(TrainConfig(optimizer="adamw_8bit")), [ParameterSpec(torch.Size((80, 64)))]
    assert state_bytes(kind, large) == 2 * (80 * 64 + 20 * 4)
    assert state_bytes(kind, [ParameterSpec(torch.Size((5,)))]) == 2 * 5 * 4


def test_muon_leaves_embeddings_heads_and_vectors_to_adamw(lab: Lab) -> None:
    context, open_engine = build(lab.config("bert", "finetune", train={"optimizer": "muon"}), WORLD)
    begin_phase(context)
    engine = open_engine(1, 4)
    assert isinstance(engine, TorchEngine)
    matrices = {name for name in engine.trained if set(engine.kind.state(engine.specs[name])) == {"momentum_buffer"}}
    others = {name for name in engine.trained if name not in matrices}
    assert {name for name in others if engine.trained[name].dim() == 2} == {
        "head.weight",
        *(f"model.embeddings.{table}_embeddings.weight" for table in ("word", "position", "token_type")),
    }
    assert matrices and all(engine.trained[name].dim() == 2 for name in matrices)


def test_what_is_not_there_is_refused_before_any_work(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lab.config("bert", "lora", train={"optimizer": "adamw_8bit"})
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"adamw_8bit needs the package bitsandbytes: pip install"):
            check_optimizer(config)
    with monkeypatch.context() as patch:
        patch.setattr(AdamW8bit, "step", refuse)
        check_optimizer(config)  # the device of the workers is not known yet
        with pytest.raises(ConfigError, match=r"adamw_8bit does not work on this device \('cpu'\)"):
            build(config, WORLD)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"muon needs torch 2\.9 or newer, and this is"):
        check_optimizer(lab.config("bert", "lora", train={"optimizer": "muon"}))


def refuse(self: Optimizer) -> None:
    raise NotImplementedError("no kernel")


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "plain sgd"])
def test_held_rows_do_not_move(name: str) -> None:
    trained, train = parameters(), TrainConfig(learning_rate=0.1, **SETTINGS[name])
    kind, optimizer, specs = built(trained, train)
    held = torch.tensor([True, False, True, False])[:, None]
    before = trained["a"].detach().clone()
    for _ in range(2):
        trained["a"].grad = torch.tensor([[1.0, -1.0, 1.0], [2.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [1.0, 2.0, -1.0]])
        kept = hold(trained["a"], state_of(kind, optimizer, trained["a"], specs["a"]), held)
        optimizer.step()
        release(kept)
    moved = (trained["a"] != before).all(1)
    assert moved.tolist() == [False, True, False, True]


def test_a_run_with_masked_rows_trains_with_each(lab: Lab, tmp_path: Path) -> None:
    def at(number: int) -> Storage:
        return Storage.at(tmp_path / str(number))

    for number, name in enumerate(("adafactor", "sgd", "adamw_8bit", "muon", "sgd")):
        train = {**SETTINGS[name], **({"weight_decay": 0.0} if number == 4 else {})}  # whose momentum is checked
        migu, stream = {"mask_update": number < 4, "skip_first_task": False}, {"tasks": lab.tasks[:1]}
        run(lab.config("bert", "finetune", train=train, modifiers={"migu": migu}, stream=stream), storage := at(number))
        assert len(trace(storage)) == 4


def test_settings_that_a_user_leaves_out_are_the_optimizers_own(lab: Lab) -> None:
    """The resolved config leaves them out too, so that a sweep over optimizers gives each its own."""
    config = validate(RunConfig, as_tree(lab.config("bert", "lora", train={"optimizer": "toy"})))
    assert optimizer_kind(config.train).values == {"betas": (0.5, 0.75)}
    built_toy = optimizer_kind(config.train).build([{"params": [nn.Parameter(torch.ones(2))]}])
    assert built_toy.param_groups[0]["beta"] == 0.5
    adamw = lab.config("bert", "lora")
    assert optimizer_kind(adamw.train).values == {"betas": (0.9, 0.999), "epsilon": 1e-8}
    with pytest.raises(ConfigError, match=r"train.betas"):
        lab.config("bert", train={"betas": [1.5, 0.9]})
    given = TrainConfig.model_validate({"optimizer": "toy", "betas": [0.25, 0.0]})
    assert optimizer_kind(given).values == {"betas": (0.25, 0.0)}
    assert {name: optimizer_kind(TrainConfig(optimizer=name)).values["momentum"] for name in ("sgd", "muon")} == {
        "sgd": 0.0,
        "muon": 0.95,
    }


def test_settings_of_another_optimizer_and_engine_are_named(lab: Lab) -> None:
    unused = {name: unused_in(TrainConfig(optimizer=name)) for name in ("adamw", "adafactor", "sgd")}
    assert "momentum" in unused["adamw"] and "betas" not in unused["adamw"]
    assert {"betas", "epsilon", "momentum"} <= set(unused["adafactor"]) and "momentum" not in unused["sgd"]
    config = lab.config("bert", "lora", {"name": "deepspeed"}, train={"optimizer": "adafactor"})
    with pytest.raises(
        ConfigError, match=r"adafactor updates whole parameters, which engine=deepspeed shares out: expected"
    ):
        check_engine(validate(RunConfig, as_tree(config)))
