"""Inputs without begin-of-sequence: what was learned so is evaluated, served, exported and continued so."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from fork_server import Call, ForkServer
from service_client import examples, serving
from tiny import Done, Lab, run

from raycl import config as configs
from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.data.loader import Collate, eval_batches
from raycl.errors import BankError, ConfigError, ResumeError
from raycl.generation.requests import Sampling
from raycl.launch import prepared_run
from raycl.operations.banks.merge import merge
from raycl.storage import Storage
from raycl.training.setup import run_config

REPO = Path(__file__).resolve().parents[2]
NONE = {"bos": "none"}


@pytest.fixture(scope="module")
def done(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """SAPT on a decoder, long enough that answers differ."""
    train = {"epochs": 6}
    config = lab.config("llama", "sapt", backbone=lab.tree("llama")["backbone"] | NONE, train=train)
    storage = Storage.at(tmp_path_factory.mktemp("bos") / "run")
    storage.write("config.yaml", configs.to_yaml(config).encode())
    return Done(config, storage, run(config, storage).context)


def newest(done: Done) -> tuple[Bank, Snapshot]:
    bank = Bank(done.storage.sub("bank"))
    return bank, bank.open(max(bank.snapshots()))


def test_training_evaluation_and_serving_read_the_same_ids(done: Done, tmp_path: Path) -> None:
    """No first token in any table; a snapshot alone and an endpoint answer as the run did."""
    codec = done.context.backbone.codec
    for split in ("train", "test"):
        table = done.context.stream.table(done.context.stream.tasks[0], split, codec)
        batches = list(eval_batches(Collate([table], codec.pad_id), 4))
        assert batches and not any((batch.source_ids == codec.tokenizer.bos_token_id).any() for batch in batches)
    bank = Bank(done.copy(tmp_path).sub("bank"))
    asked = examples(done, bank)
    last = done.storage.list("predictions")[-1]
    kept = {}
    for task in done.context.stream.tasks:
        lines = done.storage.read(f"predictions/{last}/{task.name}.jsonl").decode().splitlines()
        kept |= {(task.name, record["text"]): record["answer"] for record in map(json.loads, lines)}
    with serving(bank) as client:
        assert client.engine.model.backbone.codec.bos == "none"
        for item in asked:
            answer = client.ask(item.text, sampling=Sampling(done.config.stream.max_target_tokens)).text
            assert answer.strip() == kept[item.task, item.text]
    assert len(set(kept.values())) > 1


def test_the_setting_stays_with_the_run(done: Done, lab: Lab, tmp_path: Path) -> None:
    """The setting stays on resume, in runs from its snapshot, and beside snapshots that were learned otherwise."""
    copied = done.copy(tmp_path)
    with pytest.raises(ResumeError, match=r"backbone\.bos"):
        prepared_run.reopen(copied.uri, overrides=("backbone.bos=tokenizer",))
    bank = Bank(copied.sub("bank"))
    start = {"bank": {"start": f"{bank.storage.uri}@main"}, "stream": {"tasks": [{**lab.tasks[0], "name": "third"}]}}
    assert run_config.from_tree(start).backbone.bos == "none"
    with pytest.raises(ConfigError, match=r"backbone\.bos was 'none', now 'tokenizer'"):
        run_config.from_tree({**start, "backbone": {"bos": "tokenizer"}})


def test_snapshots_that_read_otherwise_are_not_mixed(done: Done, tmp_path: Path) -> None:
    bank = Bank(done.copy(tmp_path).sub("bank"))
    mine = bank.open(max(bank.snapshots()))
    tree = mine.provenance["config"]
    recorded = {**mine.provenance, "config": {**tree, "backbone": {**tree["backbone"], "bos": "tokenizer"}}}
    entries = [(entry, mine.layouts[entry.layout]) for entry in mine.adapters]
    other = bank.snapshot(
        NewSnapshot(entries, mine.backbone, mine.router, mine.tasks, mine.encoder, provenance=recorded)
    )
    with (
        serving(bank) as client,
        pytest.raises(BankError, match=r"learned with backbone\.bos=tokenizer and this model"),
    ):
        client.loaded(other.number)
    with pytest.raises(BankError, match=r"cannot be merged: backbone\.bos is 'none' and 'tokenizer'"):
        merge(bank, mine, other, bank)


def test_an_exported_card_reads_texts_without_the_first_token(
    done: Done, fork_server: ForkServer, tmp_path: Path
) -> None:
    bank = Bank(done.copy(tmp_path).sub("bank"))
    command = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    assert command(["export", bank.storage.uri, "--adapters", "colour", "--to", str(tmp_path / "out")]) == 0
    texts = ["fire is warm very", "the sea is cold"]
    call = Call("card_code:main", ([str(tmp_path / "out")], texts, tmp_path / "said.json"), tmp_path / "log")
    fork_server.run([call], 240)
    (said,) = json.loads((tmp_path / "said.json").read_text())
    with serving(bank) as client:
        for text in texts:
            sampling = Sampling(done.config.stream.max_target_tokens)
            assert said[text].strip() == client.ask(text, weights={"colour": 1.0}, sampling=sampling).text.strip() != ""
