"""Tests of what may be loaded of a sentence encoder's folder: pickles where the command allows them, and no adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Lab

from raycl.backbone.model_files import only_pickled
from raycl.backbone.model_hashes import fingerprint_of, parts_of
from raycl.bank import Bank, NewSnapshot
from raycl.bank.manifest import AdapterManifest, ModelInfo
from raycl.bank.states import put_router
from raycl.config.trust import Permissions
from raycl.errors import BackboneError, BankError, ConfigError, RetrievalError
from raycl.routing.routers import make_router
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.serve.snapshots.parts import router_of
from raycl.types import RouterState

TEXTS = ["the sky is blue", "it purrs"]


@pytest.fixture
def pickled(lab: Lab, tmp_path: Path) -> Path:
    """Return an encoder whose weights are a pickle."""
    folder = shutil.copytree(lab.model_folder("bert"), tmp_path / "encoder")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def encoder(folder: Path, **settings: object) -> SentenceEncoder:
    return SentenceEncoder(EncoderConfig(name=str(folder), max_tokens=16, **settings))  # type: ignore[arg-type]


def test_pickled_weights_of_an_encoder_need_permission(pickled: Path, lab: Lab) -> None:
    with pytest.raises(RetrievalError, match=r"pickled weights, .*'.*/pytorch_model.bin' .* encoder.allow_pickle=true"):
        encoder(pickled).embed(TEXTS)
    own = encoder(lab.model_folder("bert")).embed(TEXTS)
    assert torch.equal(encoder(pickled, allow_pickle=True).embed(TEXTS), own)


def test_so_do_those_of_a_layer_behind_it(lab: Lab, tmp_path: Path) -> None:
    folder = shutil.copytree(lab.model_folder("bert"), tmp_path / "encoder")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/other.safetensors").touch()
    (folder / "2_Dense/pytorch_model.bin").touch()
    assert only_pickled(folder) == folder / "2_Dense/pytorch_model.bin"
    with pytest.raises(RetrievalError, match=r"2_Dense/pytorch_model.bin' has no model.safetensors beside it"):
        encoder(folder).embed(TEXTS)
    (folder / "2_Dense/model.safetensors").touch()
    assert only_pickled(folder) is None


@pytest.fixture
def layered(lab: Lab, tmp_path: Path) -> Path:
    """Return an encoder with a linear of 8 outputs behind the mean of 32 dimensions."""
    folder = shutil.copytree(lab.model_folder("bert"), tmp_path / "layered")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    dense = {"in_features": 32, "out_features": 8, "bias": False, "activation_function": "torch.nn.Identity"}
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    for layer, settings in (("1_Pooling", pooling), ("2_Dense", dense)):
        (folder / layer).mkdir()
        (folder / layer / "config.json").write_text(json.dumps(settings))
    save_file({"linear.weight": torch.ones(8, 32)}, folder / "2_Dense" / "model.safetensors")
    return folder


def test_the_width_is_that_of_the_layer_that_is_read(layered: Path, tmp_path: Path) -> None:
    """The encoder's own files may be in a folder too, and a folder without any is no encoder."""
    last = encoder(layered, layer="last")
    assert last.width == last.embed(TEXTS).shape[1] == 8
    (layered / "0_Transformer").mkdir()
    for file in filter(Path.is_file, list(layered.iterdir())):
        if file.name != "modules.json":
            file.rename(layered / "0_Transformer" / file.name)
    tree = json.loads((layered / "modules.json").read_text())
    (layered / "modules.json").write_text(json.dumps([{**tree[0], "path": "0_Transformer"}, *tree[1:]]))
    auto = encoder(layered)
    assert auto.width == auto.embed(TEXTS).shape[1] == 32
    with pytest.raises(RetrievalError, match="cannot be loaded"):
        _ = encoder(tmp_path).width


def test_an_encoder_whose_weights_do_not_fill_it_is_refused(lab: Lab, tmp_path: Path) -> None:
    folder = shutil.copytree(lab.model_folder("bert"), tmp_path / "encoder")
    file = folder / "model.safetensors"
    save_file({f"module.{name}": weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(BackboneError, match=r"^the weights of encoder '.*' lack \d+ tensors of the model .* 'module\."):
        encoder(folder).embed(TEXTS)


def test_all_weights_are_part_of_the_identity_and_nothing_else(layered: Path, pickled: Path) -> None:
    whole = fingerprint_of(str(layered))
    save_file({"linear.weight": torch.zeros(8, 32)}, layered / "2_Dense" / "model.safetensors")
    assert fingerprint_of(str(layered)) != whole
    own = fingerprint_of(str(pickled)), parts_of(str(pickled))
    (pickled / "training_args.bin").touch()
    assert (fingerprint_of(str(pickled)), parts_of(str(pickled))) == own


def test_code_of_an_encoder_is_refused(lab: Lab, tmp_path: Path) -> None:
    folder, ran = shutil.copytree(lab.model_folder("bert"), tmp_path / "encoder"), tmp_path / "ran"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]))
    with pytest.raises(RetrievalError, match=r"encoder '.*' cannot be loaded: .* not part of Sentence Transformers"):
        encoder(folder).embed(TEXTS)
    assert not ran.exists()


def test_a_folder_with_an_adapter_is_no_model(lab: Lab, tmp_path: Path) -> None:
    folder = shutil.copytree(lab.model_folder("bert"), tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BackboneError, match=r"holds a PEFT adapter \(adapter_config.json\) beside the model: expected"):
        fingerprint_of(str(folder))


def test_a_bank_cannot_permit_the_pickles_of_its_encoder(pickled: Path, tmp_path: Path) -> None:
    bank, model = Bank.at(tmp_path / "bank"), ModelInfo(name="tiny", sha256="a" * 64, kind="encoder")
    settings = {"name": str(pickled), "allow_pickle": True}
    state = RouterState("keys", {}, {"x": torch.zeros(1)}, settings, fingerprint_of(str(pickled), pickles=True))
    router, info = put_router(bank, state)
    none: list[AdapterManifest] = []
    snapshot = bank.snapshot(NewSnapshot(none, model, router, encoder=info))
    said = r"the router of snapshot 1 was made with encoder\.allow_pickle=true, .* allow it with allow_pickle=true"
    with pytest.raises(BankError, match=said):
        router_of(bank, snapshot)
    with pytest.raises(KeyError):  # it is no real router; the permission was enough
        router_of(bank, snapshot, Permissions(allow_pickle=True))
    with pytest.raises(ConfigError, match="unknown config key 'other'"):
        make_router(RouterState("keys", {}, {}, {"name": "minilm", "other": 1}, ""), {})
