"""Exported folders describe themselves: their card's lines work as printed, without raycl, and answer as endpoints."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from service_client import bank_of, serving
from tiny import Done, Taught, on_main

from raycl.backbone import BackboneConfig, identity
from raycl.bank import Bank
from raycl.bank.manifest import ModelInfo
from raycl.generation.requests import LabelScores, Sampling

REPO = Path(__file__).resolve().parents[2]
TEXTS = ("fire is warm very", "the sea is cold", "it purrs a sleeps", "the barks runs much")
WEIGHTS = {"animal.1": 2.0, "colour.0": -1.0}

HARNESS = """
import contextlib, io, json, os, re, sys
from pathlib import Path
sys.modules["raycl"] = None  # importing it fails
folders, texts = json.loads(sys.argv[1])
said = []
for folder in folders:
    os.chdir(folder)
    (code,) = re.findall(r"```python\\n(.*?)```", Path("README.md").read_text(), re.S)
    (line,) = re.findall(r'^text = ".*"$', code, re.M)
    said.append({})
    for text in [json.loads(line.removeprefix("text = ")), *texts]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code.replace(line, f"text = {json.dumps(text)}"), {})
        said[-1][text] = out.getvalue()
print(json.dumps(said))
"""
"""Each card's own example first, as printed; then the same with other texts."""


def export(bank: Bank, folder: Path, adapters: str, *options: str) -> None:
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    assert main(["--bank", bank.storage.uri, "export", "--adapters", adapters, "--to", str(folder), *options]) == 0


def printed(*folders: Path) -> list[dict[str, str]]:
    """For each folder: text -> what its card's lines print about it, in a process that has no raycl."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", HARNESS, json.dumps([list(map(str, folders)), TEXTS])]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    assert [len(one) for one in found] == [len(TEXTS) + 1] * len(folders)
    return found


def limit_of(done: Done) -> Sampling:
    return Sampling(done.config.stream.max_target_tokens)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "task_type"), [("llama", "CAUSAL_LM"), ("t5", "SEQ_2_SEQ_LM")])
def test_texts_are_answered_as_the_endpoint_does(taught: Taught, tmp_path: Path, kind: str, task_type: str) -> None:
    """As an adapter of PEFT's and as a merged model; what the base model's folder recommends acts on neither."""
    done = taught(kind, "slm")
    bank = bank_of(done, tmp_path)
    adapters = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
    folders = (tmp_path / "peft", tmp_path / "merged")
    for folder, options in zip(folders, ([], ["--merged"]), strict=True):
        export(bank, folder, adapters, *options)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == (task_type, done.config.backbone.name)
    penalty = Path(done.config.backbone.name) / "generation_config.json"
    before = penalty.read_text()
    penalty.write_text(json.dumps({**json.loads(before), "repetition_penalty": 3.0}))
    try:
        found = printed(*folders)
    finally:
        penalty.write_text(before)
    with serving(bank) as client:
        for said in found:
            for text, answer in said.items():
                assert answer.strip() == client.ask(text, weights=WEIGHTS, sampling=limit_of(done)).text.strip() != ""
            assert len(set(said.values())) > 1 or kind == "t5"


@pytest.mark.timeout(300)
def test_labels_are_those_of_the_endpoint(taught: Taught, tmp_path: Path) -> None:
    """With a head, merged too; without one the card ends with the pooled states."""
    plain = bank_of(taught("bert", "lora"), tmp_path / "lora")
    several = bank_of(taught("bert", "sapt"), tmp_path / "sapt")
    names = ("lora", "merged", "animal", "headless")
    export(plain, tmp_path / "out" / "lora", "lora")
    export(plain, tmp_path / "out" / "merged", "lora", "--merged")
    export(several, tmp_path / "out" / "animal", "animal")
    export(several, tmp_path / "out" / "headless", "colour=0.5,animal=0.5", "--without-head")
    said = dict(zip(names, printed(*(tmp_path / "out" / name for name in names)), strict=True))
    for bank, adapter, found in ((plain, "lora", ("lora", "merged")), (several, "animal", ("animal",))):
        with serving(bank) as client:
            for name in found:
                for text, answer in said[name].items():
                    last = client.ask(text, weights={adapter: 1.0}, sampling=None).last
                    assert isinstance(last, LabelScores)
                    lines = [f"{label} {score:.4f}" for label, score in last.scores.items()]
                    assert answer.splitlines() == lines
    assert set(said["headless"].values()) == {"torch.Size([1, 32])\n"}
    assert len(set(said["lora"].values())) > 1
    about = json.loads((tmp_path / "out" / "lora" / "raycl.json").read_text())
    assert about["pooling"] == "mean" and about["adapters"] == {"lora": 1.0}
    config = json.loads((tmp_path / "out" / "lora" / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"


def test_a_packaged_base_is_named_by_its_hub_id(tmp_path: Path, taught: Taught) -> None:
    """'minilm' is a name of raycl only: the card names the model of the hub."""
    bank = bank_of(taught("bert", "lora"), tmp_path)
    snapshot = bank.open(max(bank.snapshots()))
    entries = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    summary = ModelInfo(name="minilm", sha256=identity(BackboneConfig(name="minilm")), kind="encoder")
    provenance = {"config": {"backbone": {"name": "minilm", "pooling": "cls"}}}
    on_main(bank, bank.snapshot(entries, summary, snapshot.router, list(snapshot.tasks), provenance=provenance))
    export(bank, tmp_path / "out", "lora")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "sentence-transformers/all-MiniLM-L6-v2"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\nbase_model: sentence-transformers/all-MiniLM-L6-v2\n" in card
    assert "pooled = states[:, 0]\n" in card, "pooled as the snapshot was trained: by the first token"


def test_a_card_names_every_task_with_its_template_and_labels(taught: Taught, tmp_path: Path) -> None:
    done = taught("llama", "slm")
    bank = bank_of(done, tmp_path)
    snapshot = bank.open(max(bank.snapshots()))
    unlike = [
        summary.model_copy(update={"prompt": (f'Say "{summary.name}":\n', "\nOutput: ")}) for summary in snapshot.tasks
    ]
    entries = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    provenance = dict(snapshot.provenance)
    fields = (entries, snapshot.backbone, snapshot.router, unlike, snapshot.encoder)
    on_main(bank, bank.snapshot(*fields, provenance=provenance))
    export(bank, tmp_path / "out", "animal.0=0.75,colour.0=0.5")
    card = (tmp_path / "out" / "README.md").read_text()
    about = json.loads((tmp_path / "out" / "raycl.json").read_text())
    assert [task["name"] for task in about["tasks"]] == ["animal", "colour"], "the largest weight first"
    assert about["tasks"][0]["prompt"] == ['Say "animal":\n', "\nOutput: "]
    assert about["tasks"][0]["labels"] == ["cat", "dog"]
    assert '`Say "animal":\\n`' in card and re.search(r"\| colour \|.*\| blue, red \|", card)
    with serving(bank) as client:
        for text, answer in printed(tmp_path / "out")[0].items():
            reply = client.ask(text, weights={"animal.0": 0.75, "colour.0": 0.5}, sampling=limit_of(done))
            assert answer.strip() == reply.text.strip() and reply.metadata.template == "animal"
