"""Tests on a backbone in four or eight bits: two tasks, a stop, the snapshot alone, exports, and what is refused."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_copies import copied_after, left_after
from tiny import ENGINES, Lab, matrix, opened, run, trace
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from raycl.adapters.layer import plain_weight
from raycl.backbone import BackboneConfig, load_backbone, load_codec
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BackboneError, BankError, ConfigError
from raycl.operations.banks.exchange import card_metadata, export_merged, export_peft, mixed
from raycl.serve.offline.model import OfflineModel
from raycl.serve.snapshots.parts import backbone_of
from raycl.storage import Storage
from raycl.training.setup.checks import check
from raycl.types import Mixture

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a decoder whose linears have whole blocks of 64 inputs."""
    folder = shutil.copytree(lab.model_folder("llama"), tmp_path_factory.mktemp("models") / "wide")
    config = LlamaConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 32
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


STORED = {"nf4": torch.uint8, "int8": torch.int8}
MIGU = [{"name": "migu", "skip_first_task": False, "clusters": 4, "cluster_by": "weight"}]


@pytest.mark.parametrize(
    ("kind", "quantization", "method", "engine", "sections"),
    [
        ("llama", "nf4", "slm", "torch", {}),
        ("t5", "int8", "sapt", "torch", {"backbone": {"dtype": "bfloat16"}}),
        ("bert", "int8", "inclora", "torch", {"modifiers": MIGU, "backbone": {"gradient_checkpointing": True}}),
        ("llama", "nf4", "olora", "zero2", {}),
    ],
    ids=["slm", "sapt", "migu", "zero2"],
)
def test_two_tasks_a_stop_and_the_snapshot_alone(
    lab: Lab,
    wide: str,
    tmp_path: Path,
    kind: str,
    quantization: str,
    method: str,
    engine: str,
    sections: dict[str, Any],
) -> None:
    name = wide if quantization == "nf4" else str(lab.model_folder(kind))
    chosen = {**sections.get("backbone", {}), "name": name, "quantization": quantization}
    config = lab.config(kind, method, ENGINES[engine], **{**sections, "backbone": chosen})
    assert check(config).tasks
    whole = Storage.at(tmp_path / "whole")
    with copied_after(whole, 3):
        context = run(config, whole).context
    stopped = left_after(whole, 3, tmp_path)
    run(config, stopped)
    assert trace(stopped) == trace(whole) and matrix(stopped) == matrix(whole)

    backbone, stack, bank = context.backbone, context.method.stack, Bank(whole.sub("bank"))
    assert {p.dtype for p in backbone.model.parameters() if not p.is_floating_point()} == {STORED[quantization]}
    snapshot = bank.newest()
    assert snapshot is not None and backbone_of(snapshot).quantization == quantization
    served, names = opened(bank, snapshot), tuple(entry.name for entry in snapshot.adapters)
    assert stack is not None
    assert {t.dtype for name in names for t in stack.states[name].tensors().values()} == {torch.float32}
    table = context.stream.table(context.stream.tasks[0], "test", backbone.codec)
    batch = next(iter(eval_batches(Collate([table], backbone.codec.pad_id), 4)))
    mixture = Mixture(names, torch.full((len(batch), len(names)), 0.5))
    near = 0.1 if "dtype" in chosen else 1e-5
    with torch.no_grad():
        alone = served.backbone.hidden_states(batch.source_ids, batch.source_mask)
        bare = load_backbone(config.backbone, backbone.codec, CPU, 0).eval()
        assert torch.equal(bare.hidden_states(batch.source_ids, batch.source_mask), alone), "the quantized backbone"
        with stack.activate(mixture):
            mine = backbone.hidden_states(batch.source_ids, batch.source_mask)
        with served.model.activate(served.loaded.named(mixture)):
            theirs = served.backbone.hidden_states(batch.source_ids, batch.source_mask)
    assert not torch.allclose(mine, alone, atol=near)
    assert torch.allclose(mine, theirs, atol=near), "published, fetched, loaded"


def test_what_is_served_and_exported(lab: Lab, wide: str, tmp_path: Path) -> None:
    """The endpoint's engine answers on the same backbone; adapters leave as PEFT's, and are not folded."""
    config = lab.config("llama", "lora", backbone={"name": wide, "quantization": "nf4"})
    run(config, storage := Storage.at(tmp_path / "run"))
    bank = Bank(storage.sub("bank"))
    snapshot = bank.newest()
    assert snapshot is not None
    with OfflineModel.open(bank, snapshot) as model:
        assert [answer.text for answer in model.predict(["fire is warm", "the sea"], task="colour")]
        assert any(p.dtype == torch.uint8 for p in model._engine.model.backbone.parameters())
    state, card = mixed(bank, snapshot, {"lora": 1.0}), card_metadata(snapshot, {"lora": 1.0})
    folder = export_peft(state, card, str(tmp_path / "peft"))
    assert (
        "load_in_4bit=True" in folder.read_text("README.md") and folder.read_json("raycl.json")["quantization"] == "nf4"
    )
    peft = AutoModelForCausalLM.from_pretrained(config.backbone.name)
    peft.load_adapter(str(tmp_path / "peft"))
    with pytest.raises(BankError, match=r"quantization=nf4, and an update cannot be folded .* without --merged"):
        export_merged(state, card, config.backbone, str(tmp_path / "merged"))


@pytest.mark.parametrize("quantization", STORED)
def test_a_text_alone_is_the_text_in_a_batch(wide: str, quantization: Any) -> None:
    """Training mode gives the logits of evaluation too, where bitsandbytes has another way to compute."""
    config = BackboneConfig(name=wide, dtype="float32", quantization=quantization)
    codec = load_codec(config, 24, 4)
    backbone = load_backbone(config, codec, CPU, 0)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 3], [12, 13, 14, 15]])
    with torch.no_grad():
        trained, evaluated = backbone.train().model(ids).logits, backbone.eval().model(ids).logits
        assert torch.equal(trained, evaluated)
        assert torch.allclose(backbone.model(ids[1:2]).logits[0], evaluated[1], atol=1e-5)
    layer, plain = (model.get_submodule("model.layers.0.mlp.up_proj") for model in (
        backbone.model, load_backbone(config.model_copy(update={"quantization": "none"}), codec, CPU, 0).model
    ))  # fmt: skip
    wrong = (plain_weight(layer) - plain_weight(plain)).abs().max() / plain_weight(plain).abs().max()
    assert 0 < wrong < {"nf4": 0.2, "int8": 0.01}[quantization]


@pytest.mark.parametrize(
    ("method", "engine", "words"),
    [
        ("finetune", "torch", r"keeps the backbone's weights frozen, and method 'finetune' trains them: use a method"),
        ({"name": "replay", "learner": "finetune"}, "torch", "method 'replay' trains them"),
        ("lora", "fsdp", "engine=fsdp shards the backbone's weights, which backbone.quantization=nf4 does not support"),
        (
            "lora",
            "zero3",
            "engine.zero_stage=3 shards the backbone's weights, which backbone.quantization=nf4 does not",
        ),
    ],
)
def test_what_needs_whole_weights_is_refused(lab: Lab, method: Any, engine: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(lab.config("llama", method, ENGINES[engine], backbone={"quantization": "nf4"}))


def test_rows_that_are_no_whole_blocks_are_refused_on_cpus(lab: Lab) -> None:
    config = BackboneConfig(name=str(lab.model_folder("llama")), quantization="nf4")
    with pytest.raises(BackboneError, match=r"nf4 on a CPU: 'model\.layers\.0\..*' has 32 inputs, .* multiple of 64"):
        load_backbone(config, load_codec(config, 24, 4), CPU, 0)


def test_without_the_library_nothing_starts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lab.config("llama", "lora", backbone={"quantization": "int8"})
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(BackboneError, match=r"quantization=int8 needs the package bitsandbytes: pip install 'raycl\["):
        check(config)
