"""MIGU on adapters, its settings, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from migu_started import WORLD, Started, sgd
from tiny import Lab, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.migu import GradientsOnly
from raycl.errors import ConfigError, RunError
from raycl.methods.base import Method
from raycl.methods.migu.migu import MEASURED, Migu
from raycl.methods.migu.row_selection import masked_count
from raycl.methods.modifier import Modifiers
from raycl.methods.registry import METHODS, WRAPPERS, method_class
from raycl.methods.wrapper import Wrapper
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.step import train_step
from raycl.training.setup.checks import check
from raycl.types import Objective, Phase

# ---- adapters ------------------------------------------------------------------------------------------------------


def test_lora_masks_a_by_its_units_and_b_by_the_whole_output(lab: Lab) -> None:
    """At the start B is 0, so `B A x` is zero: B's mask comes from `W x`."""
    started = Started(lab, "bert", {"name": "lora", "r": 8}, threshold=0.7)
    path = "encoder.layer.0.attention.self.query"
    layer: Any = started.parts.backbone.model.get_submodule(path)
    batch = started.batch([0, 1, 4])
    inputs: list[Tensor] = []
    handle = layer.base.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    sums = started.magnitudes(batch)
    handle.remove()
    x, real = inputs[0], (batch.source_mask > 0).unsqueeze(-1)
    low, output = (started.migu._layout.units[path, part].span for part in ("low", "output"))  # type: ignore[index]
    torch.testing.assert_close(sums[low], 4 * ((x @ layer.lora_A.T).abs() * real).sum((0, 1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[output], (layer.base(x).abs() * real).sum((0, 1)), rtol=1e-4, atol=1e-4)
    rows = started.migu._layout.rows
    assert rows[f"model.{path}.lora_A"].span == low and rows[f"model.{path}.lora_B"].span == output
    assert int(started.mask()[low].sum()) == 3 and int(started.mask()[output].sum()) == 32 - 22
    assert f"model.{path}.base.weight" not in rows


def test_every_slot_of_slm_competes_by_itself(lab: Lab) -> None:
    started = Started(lab, "bert", lab.slots(r=4), threshold=0.5)
    batch = started.batch([0, 1, 2, 3])
    started.step(batch)
    for (_, part), units in started.migu._layout.units.items():
        if part == "low":
            assert units.groups == (4, 4, 4, 4)
            assert started.mask()[units.span].view(4, 4).sum(1).tolist() == [2, 2, 2, 2]


def test_gpt2_keeps_its_weights_the_other_way_round(lab: Lab) -> None:
    started = Started(lab, "gpt2")
    sgd(started.engine)
    before = started.values()
    started.step(started.batch([0, 1]))
    name = "model.transformer.h.0.mlp.c_fc.weight"
    own = started.migu._layout.rows[name]
    moved = (started.values()[name] != before[name]).any(0)
    still = ~started.mask()[own.span]
    assert own.axis == 1 and not moved[still].any() and moved[~still].any()


# ---- settings ------------------------------------------------------------------------------------------------------


def forms_some_rows(migu: Migu) -> bool:
    return any(choice.rows is not None for choice in migu._sparse._choices.values())


def test_the_control_draws_as_many_rows_anew_in_every_step(lab: Lab) -> None:
    started = Started(lab, random_update=True, threshold=0.7)
    masks = []
    for seed in (1, 2, 2):
        train_step(started.engine, started.parts.method, [started.batch([0, 1])], WORLD, seed, started.parts.modifiers)
        masks.append(started.mask())
    for units in started.migu._layout.units.values():
        size = units.span.stop - units.span.start
        assert int((~masks[0][units.span]).sum()) == masked_count(0.7, size)
    assert not torch.equal(masks[0], masks[1]) and torch.equal(masks[1], masks[2])


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        *((kind, "float32", {}) for kind in ("bert", "t5", "llama")),
        ("bert", "bfloat16", {}),
        *(("bert", "float32", {name: value}) for name, value in [("rule", "quantile"), ("mask_scope", "micro_batch")]),
        ("bert", "float32", {"mask_update": True}),
    ],
)
def test_row_sparse_is_the_masked_dense_step_to_rounding(
    lab: Lab, kind: str, dtype: str, settings: dict[str, Any]
) -> None:
    """Weights after a few steps of one and of two micro-batches, and the loss they give; also as a GPU forms rows."""
    left, losses = [], []
    for sparse, width in ((False, None), (True, None), (True, 8)):
        started = Started(lab, kind, row_sparse=sparse, backbone={"dtype": dtype}, **settings)
        if not settings.get("mask_update"):
            sgd(started.engine)
        started.migu._sparse.width = width
        started.migu.record.steps = 2  # the first ones are measured, and therefore dense
        for rows in ([0, 1, 2, 3], [4, 5]):
            started.step(started.batch(rows), started.batch(rows[:1]))
            started.step(started.batch(rows))
        assert forms_some_rows(started.migu) is sparse
        losses.append(started.step(started.batch([9])).loss)
        left.append(started.values())
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert losses == pytest.approx(losses[:1] * 3, rel=tolerance)
    for weights in left[1:]:
        for name, value in left[0].items():
            torch.testing.assert_close(weights[name], value, rtol=tolerance, atol=tolerance)


TRANSFORMING = [
    name
    for name in METHODS
    if method_class(name).transform_gradients not in (Method.transform_gradients, Wrapper.transform_gradients)
    and name != "saber"  # it trains prompts, of which MIGU masks nothing
]


@pytest.mark.parametrize(
    ("method", "micro_batch"), sampled([(method, micro) for method in TRANSFORMING for micro in (4, 2)])
)
def test_row_sparse_changes_nothing_where_the_method_transforms_gradients(
    lab: Lab, tmp_path: Path, method: str, micro_batch: int
) -> None:
    """Weights after two tasks, of whose four steps two are not measured, and so may leave rows out.

    GEM first finds a gradient against an earlier task in the second epoch.
    """
    settings: dict[str, Any] = {"name": method, **({"learner": "finetune"} if method in WRAPPERS else {})}
    settings |= {"share": 0.3} if method == "agem" else {}  # a single row seldom disagrees
    train = {"optimizer": "sgd", "learning_rate": 0.6, "max_grad_norm": 0, "micro_batch_size": micro_batch}
    train |= {"epochs": 2} if method == "gem" else {}
    left = []
    for sparse in (True, False):
        migu = {"name": "migu", "threshold": 0.5, "skip_first_task": False, "row_sparse": sparse, "layers": ["ffn"]}
        config = lab.config("bert", settings, modifiers=[migu], train=train)
        left.append(run(config, Storage.at(tmp_path / str(sparse))).context.backbone.state_dict())
    for name, value in left[0].items():
        torch.testing.assert_close(value, left[1][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("method", "is_sparse"), [("das", True), ("hat", True), ("ogd", False), ("ewc", True)])
def test_rows_are_left_out_unless_gradients_are_mixed(lab: Lab, method: str, is_sparse: bool) -> None:
    """Factors of single values, and penalties, leave a masked row zero whatever stood in it."""
    settings = {"name": method, **({"learner": "finetune"} if method in WRAPPERS else {})}
    assert bool(Started(lab, "bert", settings).migu._sparse._choices) is is_sparse


@pytest.mark.parametrize(
    ("method", "settings", "micro_batches", "seed", "passed_on"),
    [
        ("finetune", {}, 1, 1, True),
        ("finetune", {"mask_scope": "micro_batch"}, 2, 1, True),
        ("finetune", {}, 2, 1, False),
        ("finetune", {}, 1, MEASURED, False),
        ("finetune", {"row_sparse": False}, 1, 1, False),
        ({"name": "ewc", "learner": "finetune"}, {}, 1, 1, False),
    ],
    ids=["one pass", "mask before backward", "whole before the mask", "measured", "dense", "penalty"],
)
def test_a_gradient_of_kept_rows_is_not_masked_again(
    lab: Lab, method: Any, settings: dict[str, Any], micro_batches: int, seed: int, passed_on: bool
) -> None:
    started = Started(lab, "bert", method, **settings)
    migu, batches = started.migu, [started.batch([0, 1]), started.batch([2, 3])][:micro_batches]
    migu.record.steps = 2
    kept: Any = GradientsOnly(started.engine)  # type: ignore[arg-type]
    train_step(kept, started.parts.method, batches, WORLD, seed, started.parts.modifiers)
    for name in migu._layout.rows:
        masked = migu.masked(name)
        assert masked is not None and masked.any() and not (kept.found[name] * masked).any()
        assert bool((migu(name, torch.ones_like(kept.found[name])) * masked).any()) is passed_on


def test_between_forward_and_backward_no_value_is_read(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would be waited for, by numbers that Python reads and by shapes that depend on values."""
    started = Started(lab, "t5", threshold=0.7)
    started.migu.record.steps = 2
    ops: set[str] = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    choose = Migu._choose

    def seen(migu: Migu) -> None:
        with Seen(), monkeypatch.context() as patched:
            patched.setattr(Tensor, "tolist", lambda tensor: pytest.fail("a value is read"))
            choose(migu)

    monkeypatch.setattr(Migu, "_choose", seen)
    started.step(started.batch([0, 1, 2]))
    assert forms_some_rows(started.migu) and "sort" in ops
    assert not ops & {"_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "unique"}


def test_a_weight_that_another_module_reads_is_masked(lab: Lab) -> None:
    started = Started(lab, "bert")
    model, path = started.parts.backbone.model, "encoder.layer.0.attention.self.query"
    model.another = nn.Linear(32, 32)
    model.another.weight = model.get_submodule(path).weight  # type: ignore[assignment]
    started.parts.modifiers.end_task()
    started.parts.modifiers.begin_task(started.phase, only=True, resumed=False)
    started.migu.record.steps = 2
    name = f"model.{path}.weight"
    started.step(started.batch([0, 1]))
    masked, seen = started.migu.masked(name), torch.ones(32, 32)
    assert masked is not None and started.migu._sparse.formed(name)
    assert not (started.migu(name, seen) * masked).any()


def test_layers_are_restored_after_the_task(lab: Lab) -> None:
    started = Started(lab)
    layers = [module for module in started.parts.backbone.modules() if "forward" in vars(module)]
    assert len(layers) == 12
    started.parts.modifiers.end_task()
    assert not any("forward" in vars(module) for module in started.parts.backbone.modules())


@pytest.mark.parametrize("scope", ["step", "micro_batch"])
def test_mask_scope_sets_which_batches_are_summed(lab: Lab, scope: str) -> None:
    started = Started(lab, mask_scope=scope)
    first, second = started.batch([0, 1]), started.batch([2, 3])
    alone = started.magnitudes(first)
    both = started.magnitudes(first, second)
    assert torch.equal(both, alone) is (scope == "micro_batch")


@pytest.mark.parametrize(
    ("setting", "only", "index", "objective", "masks"),
    [
        (None, False, 0, "answer", False),
        (None, True, 0, "answer", True),
        (True, True, 0, "answer", False),
        (False, False, 0, "answer", True),
        (True, False, 1, "answer", True),
        (None, False, 0, "mlm", True),
        (True, False, 0, "mlm", False),
    ],
)
def test_the_first_task_is_skipped_where_there_are_others_that_have_answers(
    lab: Lab, setting: bool | None, only: bool, index: int, objective: Objective, masks: bool
) -> None:
    started = Started(lab, skip_first_task=setting)
    started.parts.modifiers.end_task()
    tasks = tuple(replace(task, objective=objective) for task in started.phase.tasks)
    started.parts.modifiers.begin_task(Phase(index, "x", tasks), only, resumed=False)
    started.step(started.batch([0, 1]))
    name = next(iter(started.migu._layout.rows))
    assert (started.parts.modifiers.masked(name) is not None) is masks
    started.parts.modifiers.end_task()
    summary = started.parts.modifiers.summary()["modifiers"]["migu"]
    assert summary["masked"] is masks and summary["steps"] == 1 and summary["layers"], (
        "seen in measured steps all the same"
    )
    assert 0 < summary["gradient_norm_kept"] < 1


def test_settings_that_match_no_layer_give_one_sentence(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"modifiers.migu.layers: target 'atention' matches no linear layer"):
        check(lab.config("bert", modifiers=[{"name": "migu", "layers": ["atention"]}]))
    with pytest.raises(ConfigError, match=r"modifiers.migu.include_lm_head is true, but this backbone has no"):
        check(lab.config("bert", modifiers=[{"name": "migu", "include_lm_head": True}]))
    with pytest.raises(
        ConfigError, match=r"selects 'encoder.layer.0.attention.output.dense', whose adapters are prefixes"
    ):
        check(lab.config("bert", {"name": "slm", "value": "prefix"}, modifiers=["migu"]))
    with pytest.raises(RunError, match=r"modifiers.migu finds no trained weight in the layers ffn at task 'colour'"):
        Started(lab, "bert", "lora", layers=["ffn"])


def test_no_modifier_changes_nothing() -> None:
    nothing, gradient = Modifiers(), torch.ones(2)
    assert nothing.names == [] and nothing.summary() == {} and nothing.tensors() == {} and nothing.state() == {}
    assert nothing("x", gradient) is gradient and nothing.masked("x") is None and nothing.held("x") is None


def test_the_training_context_has_the_modifiers(lab: Lab) -> None:
    parts: TrainingContext = Started(lab).parts
    assert list(parts.modifiers.members) == ["migu"]


@pytest.mark.parametrize(
    ("layer", "end"),
    [("ffn.in", "wi"), ("ffn.out", "wo"), ("attention.query", "q"), ("attention.key", "k"), ("attention.out", "o")],
)
def test_one_kind_of_layer_can_be_masked_alone(lab: Lab, layer: str, end: str) -> None:
    """One kind of layer can be masked alone, as in table 5 of the paper."""
    started = Started(lab, "t5", layers=[layer])
    names = list(started.migu._layout.rows)
    before = started.values()
    sgd(started.engine)
    started.step(started.batch([0, 1, 2]))
    after = started.values()
    assert names and {name.split(".")[-2] for name in names} == {end}
    for name in names:
        still = started.migu._layout.rows[name].on(~started.mask())
        assert torch.equal(after[name] * still, before[name] * still) and not torch.equal(after[name], before[name])
