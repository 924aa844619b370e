"""Tests of what a run leaves behind: checkpoints that notice damage, adapters and models that other libraries load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import FULL, sampled
from peft import PeftModel
from safetensors.torch import load_file
from tiny import EXPORTED, KINDS, NOT_SERVED, RUNS, SAMPLE, Complete, Done, Taught, run
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from raycl.backbone.encoder import LabelHead
from raycl.bank import Bank, Snapshot
from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import activate_trainable, trained_names
from raycl.methods.lora.inclora import IncLora
from raycl.methods.per_task_adapter import PerTaskAdapter
from raycl.methods.registry import METHODS, WRAPPERS, method_class
from raycl.operations.banks.exchange import card_metadata, export_merged, export_peft, mixed
from raycl.operations.banks.maintenance import verify
from raycl.serve.snapshots.parts import backbone_of
from raycl.types import Mixture, Phase

AUTO: dict[str, Any] = {"bert": AutoModel, "t5": AutoModelForSeq2SeqLM, "llama": AutoModelForCausalLM}
ALL_CASES = [
    *((kind, method, "torch") for kind in KINDS for method in EXPORTED),
    *((kind, method, "torch") for kind in KINDS for method in ("lora-dora", "lora-pissa", "inclora-patterns")),
    ("llama", "lora-copies", "torch"),
    *((kind, method, "zero3") for kind in KINDS for method in ("lora", "finetune")),
]
SHARED = [case for case in ALL_CASES if FULL or case[2] != "torch" or case[:2] in SAMPLE]
"""Cases of complete runs that other suites look at too."""


def needed(case: tuple[str, str, str]) -> tuple[str, ...]:
    """Return what a sample must hold: methods around another one leave what that one learned, and are one family."""
    kind, method, engine = case
    return kind, "wrapper" if method in WRAPPERS else method, engine


CASES = sampled(SHARED, keep=[("bert", "finetune", "torch"), ("bert", "lora", "zero3")], needed=needed)
OWN_HEAD = {name for name in METHODS if issubclass(method_class(name), PerTaskAdapter)}
HEADS = [name for name in METHODS if name in RUNS and name not in (*OWN_HEAD, *NOT_SERVED)]
"""Methods with one label head for all tasks."""
HEAD_CASES = sampled(
    [(method,) for method in ("separate", *HEADS)],
    keep=[("replay",)],
    needed=lambda case: ["wrapper" if case[0] in WRAPPERS else case[0]],
)


def outputs(model: Any, done: Done) -> torch.Tensor:
    """Return logits, or the hidden states of an encoder, on the first test rows."""
    codec, task = done.context.backbone.codec, done.context.stream.tasks[0]
    batch = next(iter(eval_batches(Collate([done.context.stream.table(task, "test", codec)], codec.pad_id), 4)))
    inputs = {"input_ids": batch.source_ids, "attention_mask": batch.source_mask}
    if codec.kind == "encoder-decoder":
        inputs["labels"] = batch.source_ids
    with torch.no_grad():
        result = model.eval()(**inputs)
    states: torch.Tensor = result.last_hidden_state if codec.needs_labels else result.logits
    return states


@pytest.mark.parametrize(("kind", "method", "engine"), CASES)
def test_exports_give_the_trained_models_outputs_elsewhere(
    complete: Complete, tmp_path: Path, kind: str, method: str, engine: str
) -> None:
    done = complete(kind, method, engine)
    phase, base = done.context.phases[-1], AUTO[kind].from_pretrained(done.config.backbone.name, use_safetensors=True)
    before = outputs(base, done)
    with activate(done, 4):
        trained = outputs(done.context.backbone.model, done)
    assert not torch.allclose(before, trained, atol=1e-4), "training changed nothing, so this test shows nothing"
    for loaded in elsewhere(done, kind, phase, base, tmp_path):
        torch.testing.assert_close(outputs(loaded, done), trained, atol=1e-5, rtol=1e-5)


def weights_of(done: Done, newest: Snapshot) -> dict[str, float]:
    """Return what to export: the adapter of the last phase, or its slots together; all where all phases train the
    same."""
    phase = done.context.phases[-1]
    if not done.context.own_adapters:
        return dict.fromkeys((entry.name for entry in newest.adapters), 1.0)
    mine = [entry.name for entry in newest.adapters if entry.name.partition(".")[0] == phase.name]
    return dict.fromkeys(mine, 1.0 / len(mine))


def activate(done: Done, examples: int) -> AbstractContextManager[None]:
    """Return the same adapters in the run's own model."""
    method = done.context.method
    if method.stack is None or method.stack.trainable:
        return activate_trainable(method, examples)
    newest = Bank(done.storage.sub("bank")).newest()
    whole = dict.fromkeys(method.stack.states if isinstance(method, IncLora) else [done.context.phases[-1].name], 1.0)
    weights = whole if newest is None else weights_of(done, newest)
    return method.stack.activate(Mixture.same(weights, examples))


def elsewhere(done: Done, kind: str, phase: Phase, base: Any, folder: Path) -> Iterator[Any]:
    """Yield what the last phase left, as other libraries load it: adapters by PEFT and merged, or the whole model.

    Args:
        base: the backbone as it was before training; PEFT puts adapters into it.
    """
    bank = Bank(done.storage.sub("bank"))
    newest = bank.newest()
    if newest is None:
        places = [Path(done.storage.root) / "learned" / f"{phase.index:03d}-{phase.name}"]
    else:
        state = mixed(bank, newest, weights_of(done, newest), head=False)
        summary = card_metadata(newest, weights_of(done, newest))
        export_peft(state, summary, str(folder / "peft"))
        yield PeftModel.from_pretrained(base, str(folder / "peft"))
        export_merged(state, summary, backbone_of(newest), str(folder / "merged"))
        places = [folder / "merged"]
    for path in places:
        loaded, pretrained = AUTO[kind].from_pretrained(path, output_loading_info=True)
        assert not any(pretrained.values()), f"the folder and the model differ: {pretrained}"
        yield loaded


def test_every_slot_brings_a_head_of_its_own_labels(taught: Taught) -> None:
    done = taught("bert", "slm")
    bank = Bank(done.storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and [len(task.labels or ()) for task in newest.tasks] == [2, 2]
    for entry in newest.adapters:
        state = bank.fetch(entry, newest.layouts[entry.layout])
        task = next(task for task in newest.tasks if task.name == entry.name.partition(".")[0])
        assert state.labels == task.labels and state.head_weight is not None and bool(state.head_weight.any())


@pytest.mark.parametrize(("method",), HEAD_CASES)
def test_the_label_head_belongs_to_what_was_learned(complete: Complete, method: str) -> None:
    done = complete("bert", method, "torch")
    phase, head = done.context.phases[-1], done.context.backbone.head
    assert isinstance(head, LabelHead)
    bank = Bank(done.storage.sub("bank"))
    newest = bank.newest()
    if newest is None:
        name = f"learned/{phase.index:03d}-{phase.name}"
        labels = done.storage.read_json(f"{name}/labels.json")
        tensors = load_file(f"{done.storage.root}/{name}/label_head.safetensors")
        result = (labels, tensors["head.weight"], tensors["head.bias"])
    else:
        names = [adapter.name for adapter in newest.adapters]
        own = phase.name if method == "separate" else names[0]
        entry = newest.adapter("head" if "head" in names else own)
        state = bank.fetch(entry, newest.layouts[entry.layout])
        result = (list(state.labels), state.head_weight, state.head_bias)
    assert result[0] == head.labels
    assert torch.equal(result[1], head.weight) and torch.equal(result[2], head.bias)
    assert len(head.labels) == (2 if method == "separate" else 4), "a model of its own has its own labels only"


def test_every_phase_leaves_a_snapshot(complete: Complete) -> None:
    lora, separate = complete("bert", "lora", "torch"), complete("bert", "separate", "torch")
    collected = {}
    for name, done in (("lora", lora), ("separate", separate)):
        bank = Bank(done.storage.sub("bank"))
        snapshots = [bank.open(number) for number in bank.snapshots()]
        collected[name] = [[str(entry) for entry in snapshot.adapters] for snapshot in snapshots]
        assert [snapshot.parent for snapshot in snapshots] == [None, 1]
        assert [[task.name for task in snapshot.tasks] for snapshot in snapshots] == [["colour"], ["colour", "animal"]]
        assert verify(bank).problems == [] and verify(bank).leftovers == []
    assert collected == {
        "lora": [["lora@1"], ["lora@2"]],
        "separate": [["colour@1"], ["animal@1", "colour@1"]],
    }


def test_which_phases_of_a_whole_model_are_exported(complete: Complete, lab: Any, tmp_path: Path) -> None:
    done = complete("bert", "finetune", "torch")
    assert done.storage.list("learned") == ["000-colour", "001-animal"]
    for export, folders in (("last", ["001-animal"]), ("none", [])):
        config = lab.config("bert", "finetune", checkpoint={"export": export})
        storage = done.storage.at(tmp_path / export)
        run(config, storage)
        assert storage.list("learned") == folders


def test_checkpoints_are_safetensors_and_a_manifest_and_only_the_newest_stay(complete: Complete) -> None:
    done = complete("bert", "lora", "torch")
    names = done.storage.list("checkpoints")
    assert names == ["phase001-step0000002-attempt0001", "phase001-step0000004-attempt0001"]
    for name in names:
        files = done.storage.list(f"checkpoints/{name}")
        kept = ["manifest.json", "optimizer.safetensors", "parameters.safetensors"]
        assert files == kept + ["snapshot.json"] * ("step0000004" in name), "the end of a phase keeps what it published"
        learned = load_file(f"{done.storage.root}/checkpoints/{name}/parameters.safetensors")
        assert set(learned) == set(trained_names(done.context.backbone)), "frozen weights are not stored again"
