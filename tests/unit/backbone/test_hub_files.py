"""Tests of what is fetched of a hub model, from a real server: files that loading reads, all of one commit."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from hub_server import Hub, asked_by_this_process
from tiny import Lab

from raycl.backbone import BackboneConfig, at_commit, identity, load_backbone, load_codec
from raycl.errors import BackboneError

CPU = torch.device("cpu")
OTHERS = ("README.md", "evil.py", "consolidated.safetensors", "model.onnx", "training_args.bin", "rust_model.ot")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Yield a hub that this process asks, with an empty cache."""
    with asked_by_this_process(tmp_path) as hub:
        yield hub


def commit(hub: Hub, name: str, folder: Path, source: Path, *extra: str) -> Path:
    """Return the newest commit of a repository: a copy of `source` with files that loading does not need."""
    shutil.copytree(source, folder)
    for file in extra:
        (folder / file).write_text(file)
    hub.commits.setdefault(name, []).append(folder)
    return folder


def test_only_what_is_read_is_fetched_and_weights_last(hub: Hub, lab: Lab, tmp_path: Path) -> None:
    sentencepiece = ("tokenizer.model", "spiece.model", "chat_template.jinja", "merges.txt", "vocab.json")
    files = (*OTHERS, "pytorch_model.bin", *sentencepiece)
    folder = commit(hub, "me/tiny", tmp_path / ("a" * 40), lab.model_folder("bert"), *files)
    config = BackboneConfig(name="me/tiny", dtype="float32")
    codec = load_codec(config, 24, 4)
    described = set(hub.sent)
    assert described == {*sentencepiece, "config.json", "tokenizer.json", "tokenizer_config.json"}
    weights = load_backbone(config, codec, CPU, 0).state_dict()
    assert set(hub.sent) - described == {"model.safetensors"}
    assert identity(config) == identity(BackboneConfig(name=str(folder))), "the files' own, wherever they are"
    own = load_backbone(BackboneConfig(name=str(folder), dtype="float32"), codec, CPU, 0).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in own.items())
    assert len(hub.sent) == len(set(hub.sent)), "each file once"


def test_everything_is_of_one_commit_while_the_branch_moves_on(hub: Hub, lab: Lab, tmp_path: Path) -> None:
    old = commit(hub, "me/moves", tmp_path / ("b" * 40), lab.model_folder("bert"))
    config = BackboneConfig(name="me/moves", dtype="float32")
    codec = load_codec(config, 24, 4)
    new = commit(hub, "me/moves", tmp_path / ("c" * 40), lab.model_folder("llama"))
    assert load_backbone(config, codec, CPU, 0).capabilities.answers == "label"
    assert identity(config) == identity(BackboneConfig(name=str(old))) != identity(BackboneConfig(name=str(new)))
    assert at_commit(config).revision == old.name, "what workers that start later load"
    assert at_commit(BackboneConfig(name="me/moves", revision=new.name)).revision == new.name


def test_pickles_and_code_are_fetched_where_they_are_allowed(hub: Hub, lab: Lab, tmp_path: Path) -> None:
    folder = commit(hub, "me/pickled", tmp_path / ("d" * 40), lab.model_folder("bert"), *OTHERS)
    (folder / "model.safetensors").unlink()
    own = BackboneConfig(name=str(lab.model_folder("bert")))
    trained = load_backbone(own, load_codec(own, 24, 4), CPU, 5)
    torch.save({name: value + 1 for name, value in trained.model.state_dict().items()}, folder / "pytorch_model.bin")
    config = BackboneConfig(name="me/pickled", dtype="float32")
    codec = load_codec(config, 24, 4)
    with pytest.raises(BackboneError, match=r"backbone 'me/pickled' cannot be loaded: .*safetensors"):
        load_backbone(config, codec, CPU, 0)
    assert "pytorch_model.bin" not in hub.sent and "evil.py" not in hub.sent
    allowed = config.model_copy(update={"allow_pickle": True, "trust_remote_code": True})
    assert load_backbone(allowed, load_codec(allowed, 24, 4), CPU, 0)
    assert {"pytorch_model.bin", "evil.py"} <= set(hub.sent) and "training_args.bin" not in hub.sent
    assert identity(allowed) != identity(BackboneConfig(name=str(lab.model_folder("bert"))))


def test_a_model_that_the_hub_lacks(hub: Hub) -> None:
    with pytest.raises(BackboneError, match=r"backbone 'me/nothing' cannot be loaded: .*; expected 'minilm', a hub id"):
        load_codec(BackboneConfig(name="me/nothing"), 24, 4)


def test_a_hub_that_does_not_answer_is_one_sentence_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library would ask again and again."""
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(BackboneError, match=r"it is not on this machine, and 127\.0\.0\.1 does not answer"):
            load_codec(BackboneConfig(name="me/elsewhere"), 24, 4)
    assert not hub.sent
