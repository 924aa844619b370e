"""What a run leaves behind: checkpoints that notice damage, adapters and models that other libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import KINDS, Complete, Done, run
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from raycl.data.loader import eval_batches
from raycl.errors import RunError
from raycl.methods.registry import METHODS

AUTO: dict[str, Any] = {"bert": AutoModel, "t5": AutoModelForSeq2SeqLM, "llama": AutoModelForCausalLM}
CASES = [
    *((kind, method, "torch") for kind in KINDS for method in METHODS),
    *((kind, method, "zero3") for kind in KINDS for method in ("lora", "finetune")),
]


def outputs(model: Any, done: Done) -> torch.Tensor:
    """Logits, or the hidden states of an encoder, on the first test rows."""
    codec, task = done.parts.backbone.codec, done.parts.stream.tasks[0]
    batch = next(iter(eval_batches(done.parts.stream.table(task, "test", codec), None, 0, 1, 4, codec.pad_id)))
    inputs = {"input_ids": batch.source_ids, "attention_mask": batch.source_mask}
    if codec.kind == "encoder-decoder":
        inputs["labels"] = batch.source_ids
    with torch.no_grad():
        found = model.eval()(**inputs)
    states: torch.Tensor = found.last_hidden_state if codec.needs_labels else found.logits
    return states


@pytest.mark.parametrize(("kind", "method", "engine"), CASES)
def test_exports_give_the_trained_models_outputs_elsewhere(
    complete: Complete, kind: str, method: str, engine: str
) -> None:
    done = complete(kind, method, engine)
    stage = done.parts.stages[-1]
    folder = Path(done.storage.root) / "learned" / f"{stage.index:03d}-{stage.name}"
    if (folder / "adapter_config.json").exists():
        fresh = AUTO[kind].from_pretrained(done.config.backbone.name, use_safetensors=True)
        before = outputs(fresh, done)
        loaded = PeftModel.from_pretrained(fresh, str(folder))
    else:
        before = outputs(AUTO[kind].from_pretrained(done.config.backbone.name), done)
        loaded, facts = AUTO[kind].from_pretrained(folder, output_loading_info=True)
        assert not any(facts.values()), f"the folder and the model differ: {facts}"
    trained = outputs(done.parts.backbone.model, done)
    torch.testing.assert_close(outputs(loaded, done), trained, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before, trained, atol=1e-4), "training changed nothing, so this test says nothing"


@pytest.mark.parametrize("method", METHODS)
def test_the_label_head_lies_beside_the_export(complete: Complete, method: str) -> None:
    done = complete("bert", method, "torch")
    stage, head = done.parts.stages[-1], done.parts.backbone.head
    assert head is not None
    name = f"learned/{stage.index:03d}-{stage.name}"
    assert done.storage.read_json(f"{name}/labels.json") == head.labels
    tensors = load_file(f"{done.storage.root}/{name}/label_head.safetensors")
    assert torch.equal(tensors["head.weight"], head.weight)
    assert torch.equal(tensors["head.bias"], head.bias)
    assert len(head.labels) == (2 if method == "separate" else 4), "a model of its own knows its own labels only"


def test_which_stages_are_exported(complete: Complete, lab: Any, tmp_path: Path) -> None:
    done = complete("bert", "lora", "torch")
    assert done.storage.list("learned") == ["000-colour", "001-animal"]
    for export, folders in (("last", ["001-animal"]), ("none", [])):
        config = lab.config("bert", checkpoint={"export": export})
        storage = done.storage.at(tmp_path / export)
        run(config, storage)
        assert storage.list("learned") == folders


def test_checkpoints_are_safetensors_and_a_manifest_and_only_the_newest_stay(complete: Complete) -> None:
    done = complete("bert", "lora", "torch")
    names = done.storage.list("checkpoints")
    assert names == ["stage001-step0000002-attempt0001", "stage001-step0000004-attempt0001"]
    for name in names:
        files = done.storage.list(f"checkpoints/{name}")
        assert files == ["manifest.json", "optimizer.safetensors", "parameters.safetensors"]
        learned = load_file(f"{done.storage.root}/checkpoints/{name}/parameters.safetensors")
        assert set(learned) == set(done.parts.method.learned_names()), "frozen weights are not stored again"


@pytest.mark.parametrize("file", ["parameters.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_by_name(complete: Complete, tmp_path: Path, file: str, harm: str) -> None:
    done = complete("bert", "lora", "torch")
    storage = done.copy(tmp_path)
    name = f"checkpoints/{storage.list('checkpoints')[-1]}"
    path = Path(storage.root) / name / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[:-3])
    if (file, harm) == ("manifest.json", "flip"):
        path.write_bytes(path.read_bytes().replace(b"{", b"[", 1))
    with pytest.raises(RunError) as caught:
        run(done.config, storage)
    assert f"{name}/{file}" in str(caught.value)
