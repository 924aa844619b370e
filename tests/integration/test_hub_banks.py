"""Banks on the Hugging Face hub: a local stand-in of its HTTP API, asked through the real `huggingface_hub` client."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_server import Hub, asked_by_this_process
from test_bank_start import begun, tree_of
from tiny import Complete, Lab, matrix

from raycl.adapters import AdapterStack
from raycl.adapters.state import fold
from raycl.backbone.model_files import hub_client_error
from raycl.bank import Bank
from raycl.bank.branches import head_of
from raycl.bank.pruning import record_removal
from raycl.cli import main
from raycl.cli.commands import parsed
from raycl.errors import BankError
from raycl.operations.banks.hub import CardFields, bank_card, push
from raycl.operations.banks.maintenance import verify
from raycl.operations.banks.sample_listing import stored_samples
from raycl.serve.settings import at_bank, load_serve_config
from raycl.storage import Storage
from raycl.storage.records import seal, unseal
from raycl.training.records.hub import HubAddress, pull, shared, shared_record
from raycl.training.records.named_bank import snapshot_at
from raycl.types import Mixture

PARTS = ("objects", "adapters", "snapshots", "states")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("RAYCL_CACHE", str(tmp_path / "cache"))
    with asked_by_this_process(tmp_path) as hub:
        yield hub


def contents(bank: Bank) -> dict[str, bytes]:
    """Return the bank's files of adapters, snapshots and training states, as others get them."""
    files = [file for file in bank.storage.files() if file.partition("/")[0] in PARTS]
    return {file: shared_record(file, bank.storage.read(file)) for file in files}


def pulled(to: Path, address: str = "hf://me/bank") -> Bank:
    return pull(HubAddress.of(address), lambda _: Bank.at(to))[0]


@pytest.fixture
def here(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which a record's relative names mean the models and tasks."""
    folder = tmp_path / "here"
    folder.mkdir()
    for kind in ("bert", "llama", "t5"):
        (folder / kind).symlink_to(lab.model_folder(kind))
    for task in lab.tasks:
        (folder / task["name"]).symlink_to(task["path"])
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def learned(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two tasks and its bank; a test that publishes into the bank takes a copy."""
    folder = tmp_path_factory.mktemp("learned")
    begun(tree_of(lab, "slm", lab.tasks, folder / "bank"), folder / "runs/first")
    return folder


def bank_at(hub: Hub, repository: str) -> Bank:
    """Return the bank in the newest commit of a repository."""
    return Bank.at(hub.commits[repository][-1] / "raycl")


def bank_of(complete: Complete, kind: str, method: str) -> Bank:
    return Bank(complete(kind, method, "torch").storage.sub("bank"))


def bars_reach_their_end(caplog: pytest.LogCaptureFixture) -> None:
    """A push and a pull report what they send and fetch."""
    bars = [bar for record in caplog.records if (bar := getattr(record, "bar", None))]
    for what in ("reading what is pushed", "sending files, batches", "fetching files", "checking what was pulled"):
        mine = [bar for bar in bars if bar.what == what]
        assert mine[0].done < mine[0].total and mine[-1].done == mine[-1].total, what
    ended = {bar.what for bar in bars if bar.done == bar.total}
    assert {bar.what for bar in bars} == ended, "no bar stays"


@pytest.mark.parametrize(
    ("kind", "method"), [("bert", "slm"), ("llama", "olora"), ("t5", "slm-prompt-mlp"), ("llama", "lora-copies")]
)
def test_what_is_pulled_is_what_was_pushed_bit_for_bit(
    hub: Hub, complete: Complete, kind: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT's layout alone has what PEFT can hold; prompts travel as the bank has them, and the card says so."""
    bank = bank_of(complete, kind, method)
    snapshot = head_of(bank)
    with caplog.at_level(logging.DEBUG, logger="raycl.progress"):
        done = push(bank, snapshot, "main", "me/bank", CardFields())
        there = pulled(tmp_path / "pulled")
    bars_reach_their_end(caplog)
    theirs = contents(there)
    assert theirs.items() <= contents(bank).items() and snapshot.file in theirs
    assert head_of(there).sha256 == shared(snapshot).sha256 and shared(head_of(there)) == head_of(there)
    assert verify(there).problems == [] and verify(there).leftovers == []
    sent = {str(file.relative_to(hub.commits["me/bank"][-1])) for file in hub.commits["me/bank"][-1].rglob("*")}
    card = (hub.commits["me/bank"][-1] / "README.md").read_text()
    if method == "slm-prompt-mlp":
        assert not done.folders and set(done.own) == {"animal", "colour"}
        assert "| animal |  | raycl's own format: " in card and "soft prompt" in card
        return
    held = {name: folder for folder, weights in done.folders.items() for name in weights}
    assert held.keys() == {entry.name for entry in snapshot.adapters} and not done.own
    for entry in snapshot.adapters:
        alone = len(done.folders[held[entry.name]]) == 1
        assert (f"raycl/{entry.tensors.file}" in sent) != alone, "each is there once"
        assert f"{held[entry.name]}/adapter_model.safetensors" in sent


def test_no_folder_of_this_machine_is_sent(hub: Hub, complete: Complete, lab: Lab) -> None:
    """Records name data, runs and models by their last part, also those of a bank in which they are complete."""
    for kind, method in (("bert", "slm"), ("llama", "lora-copies"), ("t5", "sapt")):
        bank = bank_of(complete, kind, method)
        assert str(lab.root).encode() in bank.storage.read(head_of(bank).file)
        push(bank, head_of(bank), "main", f"me/{method}", CardFields())
        for file in hub.commits[f"me/{method}"][-1].rglob("*"):
            held = file.read_bytes() if file.is_file() else b""
            for folder in (lab.root, bank.storage.root, Path.home()):
                assert str(folder).encode() not in held, f"{file} has {folder}"
        there = bank_at(hub, f"me/{method}").newest()
        assert there is not None
        stream = there.provenance["config"]["stream"]
        assert [task["path"] for task in stream["tasks"]] == ["./colour", "./animal"]
        assert there.backbone.name == f"./{kind}" and there.tasks == head_of(bank).tasks


def test_databases_lose_their_folder_and_texts_stay_as_they_are(complete: Complete) -> None:
    """An instruction may begin as a path does."""
    snapshot = head_of(bank_of(complete, "bert", "slm"))
    texts = {"definition": "/no_think Yes/no?", "labels": ["/a/b"], "words": {"/a/b": "/a"}}
    split = "split 'SELECT a/b FROM tickets'"
    given = {"tasks": [texts, {"path": "sql:sqlite:////home/me/users.db"}], "where": f"sql:sqlite:////a/b.db {split}"}
    theirs = shared(snapshot.model_copy(update={"provenance": given}))
    database = {"path": "sql:sqlite:///users.db"}
    assert theirs.provenance == {"tasks": [texts, database], "where": f"sql:sqlite:///b.db {split}"}
    assert shared(theirs) == theirs


def test_a_bank_takes_back_what_it_pushed(hub: Hub, complete: Complete, tmp_path: Path) -> None:
    """Its own records, with their folders, stay; adapters of experts, which PEFT stores in other tensors, come too."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = complete("mixtral", "lora-experts", "torch")
    own = Bank(done.copy(tmp_path).sub("bank"))
    before = {file: own.storage.read(file) for file in own.storage.files()}
    push(own, head_of(own), "main", "me/bank", CardFields())
    back, snapshot, _ = pull(HubAddress.of("hf://me/bank"), lambda _: own)
    assert snapshot == head_of(own) and {file: back.storage.read(file) for file in before} == before
    assert verify(pulled(tmp_path / "pulled")).problems == []
    entry = snapshot.adapter("lora")
    base = AutoModelForCausalLM.from_pretrained(done.config.backbone.name, dtype=torch.float32)
    ids = torch.arange(3, 11)[None]
    theirs = PeftModel.from_pretrained(base, "me/bank", subfolder="lora").eval()(ids).logits
    ours = AutoModelForCausalLM.from_pretrained(done.config.backbone.name, dtype=torch.float32)
    fold(ours, own.fetch(entry, snapshot.layouts[entry.layout]))
    torch.testing.assert_close(theirs, ours(ids).logits, atol=1e-5, rtol=1e-5)


def test_plain_peft_loads_the_mixture_of_a_task_of_several_slots(hub: Hub, complete: Complete, lab: Lab) -> None:
    """One folder holds the slots with the mean weights of the task's texts; pulled, they are slots again."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    bank = bank_of(complete, "llama", "slm")
    snapshot = head_of(bank)
    done = push(bank, snapshot, "main", "me/bank", CardFields())
    assert set(done.folders) == {"animal", "colour"} and not done.own
    ids = torch.arange(3, 11)[None]
    answers = []
    for task, weights in done.folders.items():
        assert {snapshot.adapter(name).tasks for name in weights} == {(task,)} and len(weights) > 1
        assert sum(weights.values()) == pytest.approx(1) and min(weights.values()) >= 0
        base = AutoModelForCausalLM.from_pretrained(lab.model_folder("llama"), dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, "me/bank", subfolder=task).eval()(ids).logits
        ours = AutoModelForCausalLM.from_pretrained(lab.model_folder("llama"), dtype=torch.float32)
        states = {name: bank.fetch(entry := snapshot.adapter(name), snapshot.layouts[entry.layout]) for name in weights}
        stack = AdapterStack(ours, sorted({path for state in states.values() for path in state.linears}))
        for name, state in states.items():
            stack.load(name, state)
        with stack.activate(Mixture.same(weights, 1)):
            torch.testing.assert_close(theirs, ours(ids).logits, atol=1e-4, rtol=1e-4)
        answers.append(theirs)
    assert (answers[0] - answers[1]).abs().max() > 1e-3
    card = (hub.commits["me/bank"][-1] / "README.md").read_text()
    assert "| `animal/` | animal | the mean mixture of the task's texts: animal." in card


def test_plain_peft_loads_each_task_from_the_hub_and_gives_the_same_logits(
    hub: Hub, complete: Complete, lab: Lab
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    bank = bank_of(complete, "llama", "inclora")
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    ids = torch.arange(3, 11)[None]
    snapshot = head_of(bank)
    for name in ("animal", "colour"):
        entry = snapshot.adapter(next(entry.name for entry in snapshot.adapters if entry.tasks == (name,)))
        state = bank.fetch(entry, snapshot.layouts[entry.layout])
        base = AutoModelForCausalLM.from_pretrained(lab.model_folder("llama"), dtype=torch.float32)
        bare = base(ids).logits
        theirs = PeftModel.from_pretrained(base, "me/bank", subfolder=name).eval()(ids).logits
        ours = AutoModelForCausalLM.from_pretrained(lab.model_folder("llama"), dtype=torch.float32)
        fold(ours, state)
        torch.testing.assert_close(theirs, ours(ids).logits, atol=1e-5, rtol=1e-5)
        assert (theirs - bare).abs().max() > 1e-3


def test_an_interrupted_push_shows_nothing_and_sends_the_rest_when_it_is_repeated(
    hub: Hub, complete: Complete, tmp_path: Path
) -> None:
    bank = bank_of(complete, "bert", "slm")
    refused = ["one file comes through"]
    hub.refused = lambda name: len(hub.received) >= 1 and bool(refused)
    with pytest.raises(BankError, match=r"cannot push to hf://me/bank: .*403.*; expected ORG/NAME that you may write"):
        push(bank, head_of(bank), "main", "me/bank", CardFields())
    assert len(hub.commits["me/bank"]) == 1 and not list(hub.commits["me/bank"][0].iterdir()), "no half of a bank"
    with pytest.raises(BankError, match=r"hub\.json"):
        pulled(tmp_path / "too early")
    refused.clear()
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    assert len(hub.received) == len(set(hub.received)), "no file was sent twice"
    assert verify(pulled(tmp_path / "pulled")).problems == []


def test_a_hub_out_of_reach_is_one_sentence(
    hub: Hub, complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of the client that asks the hub are no OSErrors."""
    bank = bank_of(complete, "bert", "slm")
    push(bank, head_of(bank), "main", "me/bank", CardFields())

    def breaks(*_: object, **__: object) -> None:
        raise hub_client_error()("connection reset by peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks)
    with pytest.raises(
        BankError, match=r"cannot pull hf://me/bank: the connection to the hub failed \(connection reset"
    ):
        pulled(tmp_path / "pulled")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        BankError, match=r"cannot push to hf://me/bank: .*refused; expected ORG/NAME that you may write"
    ):
        push(bank, head_of(bank), "main", "me/bank", CardFields())


def test_an_interrupted_pull_shows_nothing_and_fetches_the_rest_when_it_is_repeated(
    hub: Hub, complete: Complete, tmp_path: Path
) -> None:
    bank = bank_of(complete, "bert", "slm")
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    last = f"raycl/{next(reversed(head_of(bank).adapters)).tensors.file}"
    hub.refused = lambda name: name == last
    with pytest.raises(BankError, match=r"cannot pull hf://me/bank@.*403.*; what has come stays: try again"):
        pulled(tmp_path / "pulled")
    assert Bank.at(tmp_path / "pulled").snapshots() == [] and last not in hub.sent
    hub.refused = lambda _: False
    assert contents(pulled(tmp_path / "pulled")).items() <= contents(bank).items()
    assert len(hub.sent) == len(set(hub.sent)) and last in hub.sent, "each file once"


@pytest.mark.parametrize(
    "pattern", ["*/adapter_model.safetensors", "raycl/objects/*/*", "raycl/snapshots/*", "raycl/hub.json"]
)
def test_a_damaged_file_is_refused(hub: Hub, complete: Complete, pattern: str, tmp_path: Path) -> None:
    bank = bank_of(complete, *(("bert", "slm") if "objects" in pattern else ("llama", "olora")))
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    file = next(hub.commits["me/bank"][-1].glob(pattern))
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(BankError, match=r"hf://me/bank@[0-9a-f]{40} .*push it again"):
        pulled(tmp_path / "pulled")
    assert Bank.at(tmp_path / "pulled").snapshots() == []


def test_code_and_pickles_of_a_repository_stay_there(hub: Hub, complete: Complete, tmp_path: Path) -> None:
    bank = bank_of(complete, "bert", "slm")
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    for name in (
        "setup.py",
        "raycl/evil.py",
        "raycl/objects/evil.pkl",
        "adapter_model.bin",
        "raycl/objects/x.safetensors",
    ):
        (hub.commits["me/bank"][-1] / name).write_text("raise SystemExit")
    there = pulled(tmp_path / "pulled")
    assert not [name for name in hub.sent if name.endswith((".py", ".pkl", ".bin", "x.safetensors"))]
    assert not [name for name in there.storage.files() if not name.endswith((".json", ".safetensors"))]


def test_a_record_cannot_name_files_outside_its_repository(hub: Hub, complete: Complete, tmp_path: Path) -> None:
    bank = bank_of(complete, "llama", "olora")
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    file = hub.commits["me/bank"][-1] / "raycl/hub.json"
    record = unseal(file.read_bytes(), "", 1)
    file.write_bytes(seal({**record, "peft": dict.fromkeys(record["peft"], "../../secret")}))
    with pytest.raises(BankError, match=r"hub\.json.* is no valid record"):
        pulled(tmp_path / "pulled")


def test_a_run_starts_from_the_hub_and_learns_one_more_task(
    hub: Hub, lab: Lab, learned: Path, tmp_path: Path, here: Path
) -> None:
    """It learns what it learns from the bank that was pushed, and publishes into a folder beside the runs."""
    bank = Bank.at(shutil.copytree(learned / "bank", tmp_path / "bank"))
    done = push(bank, head_of(bank), "main", "me/bank", CardFields())
    third = {"stream": {"tasks": [{**lab.tasks[0], "name": "third"}]}}
    local = begun({"bank": {"start": f"{bank.storage.uri}@main"}, **third}, tmp_path / "runs/local")
    later = begun({"bank": {"start": f"hf://me/bank@{done.commit}"}, **third}, tmp_path / "runs/later")
    assert matrix(later) == matrix(local)
    there = Bank.at(tmp_path / "runs/hub/me/bank")
    assert head_of(there).adapters == head_of(bank).adapters and head_of(there).parent == 2
    assert verify(there).problems == []
    named = begun({"bank": {"start": "hf://me/bank", "dir": str(tmp_path / "own")}, **third}, tmp_path / "runs/named")
    assert matrix(named) == matrix(local) and head_of(Bank.at(tmp_path / "own")).parent == 2


def test_stored_samples_are_left_out_unless_they_are_asked_for(
    hub: Hub, lab: Lab, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tree_of(lab, "sapt", lab.tasks, tmp_path / "bank")
    tree["method"] = {"name": "sapt", "arm": {"fraction": 0.5, "max_samples": 3}}
    begun(tree, tmp_path / "runs/first")
    bank = f"{tmp_path}/bank"
    assert main.main(["push", bank, "me/without"]) == 0
    there = pulled(tmp_path / "without", "hf://me/without")
    assert stored_samples(there, head_of(there)) == {} and verify(there).problems == []
    third = {"stream": {"tasks": [{**lab.tasks[0], "name": "third"}]}}
    later = begun({"bank": {"start": f"{tmp_path}/without@main"}, **third}, tmp_path / "runs/later")
    assert matrix(later)[2][2] is not None, "a run starts from what is left"
    capsys.readouterr()
    assert main.main(["push", bank, "me/with", "--with-samples"]) == 1
    question = "6 rows of stored samples, inputs of users, are sent: animal 3, colour 3"
    assert f"{question}; add --yes to send them" in capsys.readouterr().err and "me/with" not in hub.commits
    assert main.main(["push", bank, "me/with", "--with-samples", "--yes"]) == 0
    assert question in capsys.readouterr().out
    whole = pulled(tmp_path / "with", "hf://me/with")
    assert stored_samples(whole, head_of(whole)) == {"colour": 3, "animal": 3}


def test_the_card_has_what_the_hub_reads(hub: Hub, lab: Lab, learned: Path, tmp_path: Path) -> None:
    """Results are the accuracy matrix; what a user has said once is kept, and files of others stay."""
    from huggingface_hub import ModelCard

    bank = str(shutil.copytree(learned / "bank", tmp_path / "bank"))
    words = ["--license", "apache-2.0", "--language", "en", "--language", "de", "--dataset", "me/rows"]
    assert main.main(["push", f"{bank}@1", "me/bank", *words]) == 0
    theirs = ("picture.png", "docs/README.md", "data/labels.json", "mine/adapter_model.safetensors")
    for name in theirs:
        (hub.commits["me/bank"][-1] / name).parent.mkdir(exist_ok=True)
        (hub.commits["me/bank"][-1] / name).write_text("theirs")
    assert main.main(["push", bank, "me/bank"]) == 0
    newest = hub.commits["me/bank"][-1]
    assert [file.name for file in newest.glob("raycl/snapshots/*")] == ["000002.json"], (
        "the older one is in the history"
    )
    card = ModelCard.load(newest / "README.md")
    assert (card.data.license, card.data.language, card.data.datasets) == ("apache-2.0", ["en", "de"], ["me/rows"])
    cells = {(result.dataset_name, result.metric_name): result.metric_value for result in card.data.eval_results}
    names = [task["name"] for task in lab.tasks]
    values = {
        (task, f"exact_match after {phase}"): value
        for phase, row in zip(names, matrix(Storage.at(learned / "runs/first")), strict=True)
        for task, value in zip(names, row, strict=True)
        if value is not None
    }
    assert cells == values
    first = pulled(tmp_path / "pulled", f"hf://me/bank@{hub.commits['me/bank'][1].name}")
    assert head_of(first).number == 1
    again = pulled(tmp_path / "pulled")
    assert head_of(again).number == 2 and verify(again).problems == []
    assert main.main(["push", f"{bank}@1", "me/bank"]) == 0
    last = hub.commits["me/bank"][-1]
    assert {file.parent.name for file in last.glob("*/*.safetensors")} == {names[0], "mine"}
    assert all((last / name).read_text() == "theirs" for name in theirs)


def test_commands_take_a_bank_of_the_hub(
    hub: Hub,
    complete: Complete,
    lab: Lab,
    tmp_path: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bank = bank_of(complete, "bert", "slm")
    assert main.main(["push", bank.storage.uri, "me/bank"]) == 0
    rows = f"{lab.tasks[0]['path']}/test.jsonl"
    capsys.readouterr()
    assert main.main(["predict", bank.storage.uri, rows]) == 0
    local = capsys.readouterr().out
    assert main.main(["predict", "hf://me/bank", rows]) == 0
    assert capsys.readouterr().out == local
    sent = len(hub.sent)
    assert main.main(["evaluate", f"hf://me/bank@{hub.commits['me/bank'][-1].name}", rows]) == 0
    assert len(hub.sent) == sent, "it is in the cache"
    assert snapshot_at("hf://me/bank")[1].sha256 == shared(head_of(bank)).sha256
    assert main.main(["pull", "hf://me/bank"]) == 0
    assert main.main(["bank", "verify", "bank"]) == 0
    for folder, file in (("data", "train.csv"), ("run", "config.yaml")):
        (here / folder).mkdir()
        (here / folder / file).write_text("")
        capsys.readouterr()
        assert main.main(["pull", "hf://me/bank", folder]) == 1
        assert "and is no bank: expected a bank, or a folder that is new or empty" in capsys.readouterr().err
        assert [path.name for path in (here / folder).iterdir()] == [file]
    assert main.main(["push", bank.storage.uri, "bank"]) == 1
    assert "'hf://bank' names nothing on the hub: expected hf://ORG/NAME" in capsys.readouterr().err
    for more in ("@dev", "/folder"):
        assert main.main(["push", bank.storage.uri, f"me/bank{more}"]) == 1
        assert f"'me/bank{more}' names a folder or a revision" in capsys.readouterr().err
    assert main.main(["pull", "hf://me/bank/folder", "another"]) == 1
    assert "hf://me/bank/folder names the folder 'folder', and a bank is a whole repo" in capsys.readouterr().err
    served = parsed("serve", ["hf://me/bank", "port=0"])
    assert (served.bank, served.overrides) == ("hf://me/bank", ["port=0"])
    assert at_bank(load_serve_config(None, [f"bank={served.bank}"])).bank.startswith(str(tmp_path / "cache"))
    capsys.readouterr()
    assert main.main(["predict", "hf://bank", rows]) == 1
    assert "'hf://bank' names nothing on the hub: expected hf://ORG/NAME" in capsys.readouterr().err
    other = bank_of(complete, "llama", "olora")
    push(other, head_of(other), "main", "me/bank", CardFields())
    with pytest.raises(BankError, match=r"has another 'snapshots/000002\.json': pull hf://me/bank into another folder"):
        pulled(here / "bank")


def test_a_commit_of_the_hub_stays_as_it_is(
    hub: Hub, complete: Complete, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that change a bank take none of the hub, and a branch of the cache's bank decides nothing."""
    bank = bank_of(complete, "bert", "slm")
    commit = push(bank, head_of(bank), "main", "me/bank", CardFields()).commit
    pinned = f"hf://me/bank@{commit}"
    for words in (["forget", pinned, "colour"], ["tag", pinned, "first"], ["prune", pinned]):
        assert main.main(["bank", *words]) == 1
        expected = (
            f"`raycl bank {words[0]}` changes a bank, and '{pinned}' is a commit of the hub, which stays as it is"
        )
        assert expected in capsys.readouterr().err
    there, snapshot = snapshot_at(pinned)
    assert main.main(["bank", "forget", there.storage.uri, "colour", "--without-scores"]) == 0
    assert head_of(there).number != snapshot.number, "the bank in the cache was changed by its folder"
    assert snapshot_at(pinned)[1] == snapshot
    assert main.main(["bank", "log", pinned]) == 0
    served = at_bank(load_serve_config(None, [f"bank={pinned}"]))
    assert (served.snapshot, served.follow.enabled) == (snapshot.number, False)


def test_a_pull_may_come_second_while_it_writes(
    hub: Hub, complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that open an address for the first time write the same records."""
    bank = bank_of(complete, "bert", "slm")
    push(bank, head_of(bank), "main", "me/bank", CardFields())
    with monkeypatch.context() as patch:

        def read(storage: Storage, name: str, most: int | None = None) -> bytes:
            patch.undo()
            pulled(tmp_path / "pulled")
            return storage.read(name, most)

        def meanwhile(*given: Any) -> None:
            record_removal(*given)
            patch.setattr(Storage, "read", read)

        patch.setattr("raycl.training.records.hub.record_removal", meanwhile)
        assert head_of(pulled(tmp_path / "pulled")).sha256 == shared(head_of(bank)).sha256


def test_a_later_pull_moves_the_branch_on_unless_something_else_is_on_it(
    hub: Hub, lab: Lab, tmp_path: Path, here: Path
) -> None:
    """Snapshots between two pushes are in neither; what was learned after a pull is not taken off its branch."""
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "third"}]
    begun(tree_of(lab, "inclora", tasks, tmp_path / "bank"), tmp_path / "runs/first")
    bank = Bank.at(tmp_path / "bank")
    push(bank, bank.open(1), "main", "me/bank", CardFields())
    there, own = pulled(tmp_path / "there"), pulled(tmp_path / "own")
    more = {"stream": {"tasks": [{**lab.tasks[0], "name": "mine"}]}}
    begun({"bank": {"start": f"{tmp_path}/own@main"}, **more}, tmp_path / "runs/own")
    push(bank, bank.open(3), "main", "me/bank", CardFields())
    assert pulled(tmp_path / "there").snapshots() == [1, 3]
    assert head_of(there).number == 3 and verify(there).problems == []
    with pytest.raises(BankError, match=r"has another snapshot 2 than the one before snapshot 3: pull hf://me/bank"):
        pulled(tmp_path / "own")
    assert head_of(own).tasks[-1].name == "mine" and own.snapshots() == [1, 2]


def test_two_pushes_at_once_do_not_mix(hub: Hub, complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, other = bank_of(complete, "bert", "slm"), bank_of(complete, "llama", "olora")
    push(bank, head_of(bank), "main", "me/bank", CardFields())

    def meanwhile(*given: Any) -> str:
        monkeypatch.undo()
        push(other, head_of(other), "main", "me/bank", CardFields())
        return bank_card(*given)

    monkeypatch.setattr("raycl.operations.banks.hub.bank_card", meanwhile)
    with pytest.raises(BankError, match=r"cannot push to hf://me/bank: .*412.*; what was sent stays there: try again"):
        push(bank, bank.open(1), "main", "me/bank", CardFields())
    assert snapshot_at("hf://me/bank")[1].sha256 == shared(head_of(other)).sha256
