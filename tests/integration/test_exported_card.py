"""Exported folders describe themselves: their card's lines work as printed, without raycl, and answer as endpoints."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import Call, ForkServer
from service_client import bank_of, serving
from tiny import Done, Taught, on_main

from raycl.backbone import BackboneConfig, identity
from raycl.bank import Bank, NewSnapshot
from raycl.bank.manifest import ModelInfo, RouterInfo
from raycl.generation.requests import LabelScores, Sampling

REPO = Path(__file__).resolve().parents[2]
TEXTS = ("fire is warm very", "the barks runs much")
WEIGHTS = {"animal.1": 2.0, "colour.0": -1.0}


def export(bank: Bank, folder: Path, adapters: str, *options: str) -> None:
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    assert main(["export", bank.storage.uri, "--adapters", adapters, "--to", str(folder), *options]) == 0


def printed(server: ForkServer, root: Path, folders: list[Path]) -> list[dict[str, str]]:
    """Return for each folder: text -> what its card's lines print about it, in a process that cannot import raycl."""
    call = Call("card_code:main", (list(map(str, folders)), list(TEXTS), root / "printed.json"), root / "log")
    server.run([call], 240)
    tree: list[dict[str, str]] = json.loads((root / "printed.json").read_text())
    assert [len(item) for item in tree] == [len(TEXTS) + 1] * len(folders)
    return tree


def limit_of(done: Done) -> Sampling:
    return Sampling(done.config.stream.max_target_tokens)


TYPES = {"llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'very', 'user': 'a', 'assistant': 'Output :'}[m['role']] + ' ' }}"
    "{% if m['role'] == 'assistant' %}{{ 'much ' }}{% endif %}{{ m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Output : ' }}{% endif %}"
)
"""It writes a word of its own before an answer."""
UNLIKE = {"animal.0": 0.75, "colour.0": 0.5}


@dataclass(frozen=True)
class Cards:
    """Exported folders, what their cards' lines print, and the banks that they came from."""

    root: Path
    banks: dict[str, Bank]
    said: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def cards(taught: Taught, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Cards:
    """Return all of them, read by one process; what the base models' folders recommend acts on none."""
    root = tmp_path_factory.mktemp("cards")
    adapters = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
    banks = {kind: bank_of(taught(kind, "slm"), root / kind) for kind in TYPES}
    banks |= {method: bank_of(taught("bert", method), root / method) for method in ("lora", "sapt")}
    exports = {f"{kind} peft": (banks[kind], adapters) for kind in TYPES}
    exports |= {f"{kind} merged": (banks[kind], adapters, "--merged") for kind in TYPES}
    exports |= {"lora": (banks["lora"], "lora"), "merged": (banks["lora"], "lora", "--merged")}
    exports |= {"animal": (banks["sapt"], "animal")}
    exports |= {"headless": (banks["sapt"], "colour=0.5,animal=0.5", "--without-head")}
    bank = bank_of(taught("llama", "slm"), root / "unlike")
    banks["unlike"] = with_prompts(bank, lambda name: {"prompt": (f'Say "{name}":\n', "\nOutput: ")})
    exports["unlike"] = (banks["unlike"], ",".join(f"{name}={weight}" for name, weight in UNLIKE.items()))
    chat = {"prompt": ("", ""), "chat_template": TEMPLATE, "system": "runs warm"}
    banks["chat"] = with_prompts(bank_of(taught("llama", "slm"), root / "chat"), lambda name: chat)
    asked = {"prompt": ("runs warm ", " much"), "chat_template": TEMPLATE, "definition": "runs warm"}
    banks["asked"] = with_prompts(bank_of(taught("llama", "slm"), root / "asked"), lambda name: asked)
    exports |= {name: (banks[name], adapters) for name in ("chat", "asked")}
    base = speaking(Path(taught("llama", "slm").config.backbone.name), root / "speaking")
    banks["taskless"] = without_tasks(bank_of(taught("llama", "slm"), root / "taskless"), base)
    exports |= {"taskless": (banks["taskless"], adapters), "taskless merged": (banks["taskless"], adapters, "--merged")}
    exports["vllm"] = (banks["chat"], adapters, "--engine", "vllm")
    for name, (bank, *options) in exports.items():
        export(bank, root / "out" / name, *options)
    files = [Path(taught(kind, "slm").config.backbone.name) / "generation_config.json" for kind in TYPES]
    before = [file.read_text() for file in files]
    for file, text in zip(files, before, strict=True):
        own = json.loads(text)
        file.write_text(json.dumps({**own, "repetition_penalty": 3.0, "eos_token_id": [own["eos_token_id"], 5]}))
    try:
        result = printed(fork_server, root, [folder_of(root / "out" / name) for name in exports])
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)
    return Cards(root / "out", banks, dict(zip(exports, result, strict=True)))


def folder_of(export: Path) -> Path:
    """Return the folder of an export's adapter, which for vLLM is one of several."""
    return next((file.parent for file in export.glob("*/adapter_config.json")), export)


def with_prompts(bank: Bank, prompt_of: Callable[[str], dict[str, Any]]) -> Bank:
    """Return the same, each task with a template of its own."""
    snapshot = bank.open(max(bank.snapshots()))
    unlike = [summary.model_copy(update=prompt_of(summary.name)) for summary in snapshot.tasks]
    entries = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    provenance = dict(snapshot.provenance)
    fields = (entries, snapshot.backbone, snapshot.router, unlike, snapshot.encoder)
    on_main(bank, bank.snapshot(NewSnapshot(*fields, provenance=provenance)))
    return bank


def speaking(base: Path, folder: Path) -> Path:
    """Return a copy of a model whose tokenizer has a chat template."""
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def without_tasks(bank: Bank, base: Path) -> Bank:
    """Return the same over another copy of its model, with adapters that belong to no task, as imported ones do."""
    snapshot = bank.open(max(bank.snapshots()))
    entries = [(entry.model_copy(update={"tasks": ()}), snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    summary = ModelInfo(name=str(base), sha256=identity(BackboneConfig(name=str(base))), kind=snapshot.backbone.kind)
    stream = {"max_source_tokens": 40, "max_target_tokens": 8}
    provenance = {"config": {"backbone": {"name": str(base)}, "stream": stream}}
    on_main(bank, bank.snapshot(NewSnapshot(entries, summary, RouterInfo(kind="sum"), [], provenance=provenance)))
    return bank


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", list(TYPES))
def test_texts_are_answered_as_the_endpoint_does(taught: Taught, cards: Cards, kind: str) -> None:
    """The export is an adapter of PEFT's or a merged model; what the base model's folder recommends acts on neither."""
    done = taught(kind, "slm")
    config = json.loads((cards.root / f"{kind} peft" / "adapter_config.json").read_text())
    assert (config["task_type"], config["base_model_name_or_path"]) == (TYPES[kind], done.config.backbone.name)
    with serving(cards.banks[kind]) as client:
        for said in (cards.said[f"{kind} peft"], cards.said[f"{kind} merged"]):
            for text, answer in said.items():
                assert answer.strip() == client.ask(text, weights=WEIGHTS, sampling=limit_of(done)).text.strip() != ""


def test_labels_are_those_of_the_endpoint(cards: Cards) -> None:
    """A card with a head, merged too, has the endpoint's labels; without a head it ends with the pooled states."""
    for bank, adapter, result in (("lora", "lora", ("lora", "merged")), ("sapt", "animal", ("animal",))):
        with serving(cards.banks[bank]) as client:
            for name in result:
                for text, answer in cards.said[name].items():
                    last = client.ask(text, weights={adapter: 1.0}, sampling=None).last
                    assert isinstance(last, LabelScores)
                    lines = [f"{label} {score:.4f}" for label, score in last.scores.items()]
                    assert answer.splitlines() == lines
    assert set(cards.said["headless"].values()) == {"torch.Size([1, 32])\n"}
    assert len(set(cards.said["lora"].values())) > 1
    about = json.loads((cards.root / "lora" / "raycl.json").read_text())
    assert about["pooling"] == "mean" and about["adapters"] == {"lora": 1.0}
    config = json.loads((cards.root / "lora" / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"


def test_a_packaged_base_is_named_by_its_hub_id(tmp_path: Path, taught: Taught) -> None:
    """'minilm' is a name of raycl only: the card names the model of the hub."""
    bank = bank_of(taught("bert", "lora"), tmp_path)
    snapshot = bank.open(max(bank.snapshots()))
    entries = [(entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters]
    summary = ModelInfo(name="minilm", sha256=identity(BackboneConfig(name="minilm")), kind="encoder")
    provenance = {"config": {"backbone": {"name": "minilm", "pooling": "cls"}}}
    on_main(
        bank, bank.snapshot(NewSnapshot(entries, summary, snapshot.router, list(snapshot.tasks), provenance=provenance))
    )
    export(bank, tmp_path / "out", "lora")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "sentence-transformers/all-MiniLM-L6-v2"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\nbase_model: sentence-transformers/all-MiniLM-L6-v2\n" in card
    assert "pooled = states[:, 0]\n" in card, "pooled as the snapshot was trained: by the first token"


def test_a_card_names_every_task_with_its_template_and_labels(taught: Taught, cards: Cards) -> None:
    card = (cards.root / "unlike" / "README.md").read_text()
    about = json.loads((cards.root / "unlike" / "raycl.json").read_text())
    assert [task["name"] for task in about["tasks"]] == ["animal", "colour"], "the largest weight first"
    assert about["tasks"][0]["prompt"] == ['Say "animal":\n', "\nOutput: "]
    assert about["tasks"][0]["labels"] == ["cat", "dog"]
    assert '`Say "animal":\\n`' in card and re.search(r"\| colour \|.*\| blue, red \|", card)
    with serving(cards.banks["unlike"]) as client:
        for text, answer in cards.said["unlike"].items():
            reply = client.ask(text, weights=UNLIKE, sampling=limit_of(taught("llama", "slm")))
            assert answer.strip() == reply.text.strip() and reply.metadata.template == "animal"


@pytest.mark.parametrize("name", ["chat", "asked", "vllm"])
def test_a_card_of_conversations_reads_a_text_as_the_endpoint_does(taught: Taught, cards: Cards, name: str) -> None:
    """A card writes all that the chat template writes before an answer, and the task's instruction in its turn."""
    folder = folder_of(cards.root / name)
    before = "chat template `runs warm `" if name == "asked" else "chat template"
    assert f"| colour | {before} |" in (folder / "README.md").read_text()
    about = json.loads((folder / "raycl.json").read_text())
    assert {task["chat_template"] for task in about["tasks"]} == {TEMPLATE}
    with serving(cards.banks["asked" if name == "asked" else "chat"]) as client:
        for text, answer in cards.said[name].items():
            reply = client.ask(text, weights=WEIGHTS, sampling=limit_of(taught("llama", "slm")))
            assert answer.strip() == reply.text.strip() and reply.metadata.template == "animal"
    assert name != "vllm" or (cards.root / name / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize("name", ["taskless", "taskless merged"])
def test_a_card_without_tasks_reads_a_text_as_a_turn_of_a_chat_model(taught: Taught, cards: Cards, name: str) -> None:
    """The model's own chat template renders it, as the endpoint does for a message of the user."""
    limit = Sampling(8)
    with serving(cards.banks["taskless"]) as client:
        for text, answer in cards.said[name].items():
            reply = client.ask(text, weights=WEIGHTS, sampling=limit, is_chat=True)
            assert answer.strip() == reply.text.strip() != "" and reply.metadata.template == ""
            plain = client.ask(text, weights=WEIGHTS, sampling=limit)
            assert plain.metadata.prompt_tokens < reply.metadata.prompt_tokens
