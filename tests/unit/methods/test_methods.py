"""Tests of what each method makes live, what it forgets at a new task, and what it exports."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import pytest
import torch
from phases import bare, begin_phase, end_phase
from tiny import ENGINES, RUNS, TASKS, Lab

from raycl.methods.base import Method, phase_labels, trained_names
from raycl.methods.wrapper import Wrapper
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase, Task

LABELS = {task: sorted(label for label, _ in classes) for task, classes in TASKS.items()}


def made(lab: Lab, method: Any, kind: str = "bert") -> TrainingContext:
    return build(lab.config(kind, method, ENGINES["torch"]), DistributedContext.alone(torch.device("cpu")))[0]


def begin(context: TrainingContext, phase: int, resumed: bool = False) -> Method:
    begin_phase(context, phase, resumed)
    return context.method


def test_phase_labels_are_ordered_and_unique() -> None:
    tasks = (
        Task("a", ("yes", "no"), "exact_match"),
        Task("b", None, "rouge_l"),
        Task("c", ("no", "so"), "exact_match"),
    )
    assert phase_labels(Phase(0, "joint", tasks)) == ["yes", "no", "so"]


def public(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isfunction(value) and not name.startswith("_")}


def test_the_contract_has_ten_hooks_and_wrappers_forward_them_all() -> None:
    assert len(public(Method)) == 10
    assert public(Method) == public(Wrapper) - {"require_shared_adapters"}


@pytest.mark.parametrize("name", RUNS)
def test_a_task_resumed_keeps_its_values_and_state_gives_a_fresh_model_the_same_shape(lab: Lab, name: str) -> None:
    first, second = made(lab, name), made(lab, name)
    begin(first, 0)
    state = first.method.state_dict()
    with torch.no_grad():
        for parameter in first.backbone.parameters():
            parameter += 1
    before = {name: p.detach().clone() for name, p in first.backbone.named_parameters()}
    begin(first, 0, resumed=True)
    assert all(torch.equal(p, before[name]) for name, p in first.backbone.named_parameters())
    second.method.load_state_dict(*state)
    begin(second, 0, resumed=True)
    shapes = [
        {n: (p.shape, p.requires_grad) for n, p in context.backbone.named_parameters()} for context in (first, second)
    ]
    assert shapes[0] == shapes[1]
    assert trained_names(first.backbone) == trained_names(second.backbone)


def test_lora_trains_its_adapter_and_the_head_only(lab: Lab) -> None:
    context = made(lab, {"name": "lora", "r": 3, "target_modules": ["attention.key", "ffn"]})
    method = begin(context, 0)
    assert all(".lora_" in name or name.startswith("head.") for name in trained_names(method.backbone))
    trainable = {name: p for name, p in context.backbone.named_parameters() if "lora_A" in name}
    assert len(trainable) == 6 and all(p.shape[0] == 3 for p in trainable.values())
    assert not any(p.any() for name, p in context.backbone.named_parameters() if "lora_B" in name), "it starts at zero"


@pytest.mark.parametrize(("given", "adapters"), [("all-linear", 12), ("attention.query", 2), (r"layer\.0\..*dense", 3)])
def test_one_string_chooses_linears(lab: Lab, given: str, adapters: int) -> None:
    context = made(lab, {"name": "lora", "target_modules": given})
    assert context.method.config.target_modules == (given,)
    assert sum("lora_A" in name for name, _ in context.backbone.named_parameters()) == adapters
    assert not any("pooler" in name and "lora" in name for name, _ in context.backbone.named_parameters())


def test_the_seed_decides_how_lora_starts(lab: Lab) -> None:
    def start(seed: int) -> torch.Tensor:
        context = build(lab.config("bert", "lora", seed=seed), DistributedContext.alone(torch.device("cpu")))[0]
        return next(p.detach() for name, p in context.backbone.named_parameters() if "lora_A" in name)

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


@pytest.mark.parametrize("learner", ["lora", "finetune"])
def test_separate_starts_every_task_where_the_first_one_started(lab: Lab, learner: str) -> None:
    context = made(lab, ("separate", learner))
    first = {
        name: p.detach().clone() for name, p in context.backbone.named_parameters() if not name.startswith("head.")
    }
    begin(context, 0)
    with torch.no_grad():
        for parameter in context.backbone.parameters():
            if parameter.requires_grad:
                parameter += 1
    begin(context, 1)
    now = {name: p for name, p in context.backbone.named_parameters() if not name.startswith("head.")}
    assert [name for name in first if not torch.equal(first[name], now[name])] == []
    head = context.backbone.head
    assert head is not None and head.labels == LABELS["animal"] and not head.weight.any()


def test_sequential_methods_keep_the_rows_of_former_tasks(lab: Lab) -> None:
    for name in ("lora", "finetune"):
        context = made(lab, name)
        begin(context, 0)
        head = context.backbone.head
        assert head is not None
        torch.nn.init.ones_(head.weight)
        begin(context, 1)
        assert head.labels == LABELS["colour"] + LABELS["animal"]
        assert head.weight[:2].all() and not head.weight[2:].any()


def test_a_phase_leaves_an_adapter_or_a_whole_model(lab: Lab) -> None:
    query = "model.layers.0.self_attn.q_proj"
    for name in ("lora", "separate", "finetune"):
        context = made(lab, name, "llama")
        learned = end_phase(context, begin_phase(context))
        assert learned is not None and learned.labels == []
        if name == "finetune":
            assert f"{query}.weight" in learned.model and learned.adapters == {}
        else:
            assert list(learned.adapters) == ["lora" if name == "lora" else context.phases[0].name]
            state = next(iter(learned.adapters.values()))
            assert state.rank == 8 and state.scale == 4 and query in state.linears and learned.model == {}


def test_a_method_without_hooks_of_its_own_adds_nothing(lab: Lab) -> None:
    context = made(lab, "lora")
    assert Method(context.method.config, context.backbone, 0).penalty(None, None) is None  # type: ignore[arg-type]
    assert Method(context.method.config, context.backbone, 0).end_task(bare(context.phases[0])) is None
