"""An adapter that was trained elsewhere answers texts like its examples, through the router of a bank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_server import asked_by_this_process
from test_bank_start import begun
from tiny import Complete, Lab

from raycl.api.models import load
from raycl.bank import Bank
from raycl.bank.branches import head_of
from raycl.bank.states import get_router
from raycl.cli import main
from raycl.operations.banks.hub import CardFields, push
from raycl.operations.banks.maintenance import verify


def learned(lab: Lab, folder: Path, kind: str, method: Any, task: dict[str, Any], epochs: int = 8) -> str:
    """Return the bank of a run that learned one task, by default well enough."""
    tree = lab.tree(kind, method, train={"epochs": epochs, "learning_rate": 0.03})
    tree["stream"] = {**tree["stream"], "tasks": [task]}
    return begun(tree, folder).sub("bank").uri


def texts_of(task: dict[str, Any]) -> list[str]:
    lines = Path(task["path"], "test.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_it_answers_its_texts_and_others_keep_theirs(
    lab: Lab, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colour, animal = lab.tasks
    theirs = learned(lab, tmp_path / "theirs", kind, "lora", colour)
    ours = learned(lab, tmp_path / "ours", kind, lab.slots(), animal)
    before = head_of(Bank.at(ours))
    with load(ours) as model:
        known = [prediction.text for prediction in model.predict(texts_of(animal))]
    assert main.main(["bank", "export", theirs, "--to", str(tmp_path / "peft")]) == 0
    examples = f"{colour['path']}/train.jsonl"
    capsys.readouterr()
    words = ["bank", "import", ours, str(tmp_path / "peft"), "--name", "colour", "--examples", examples]
    assert main.main(words) == 0
    assert "snapshot 2, whose router selects 'colour' for 14 of 14 examples" in capsys.readouterr().out
    bank = Bank.at(ours)
    assert verify(bank).problems == [] and head_of(bank).parent == before.number
    assert all(entry in head_of(bank).adapters for entry in before.adapters)
    with load(theirs) as model:
        wanted = [prediction.text for prediction in model.predict(texts_of(colour))]
    with load(ours) as model:
        assert model.tasks == ("animal", "colour")
        assert all(next(iter(weights)) == "colour" for weights in model.route(texts_of(colour)))
        assert all(next(iter(weights)) == "animal" for weights in model.route(texts_of(animal)))
        predictions = list(model.predict(texts_of(colour)))
        assert all(prediction.tasks["colour"] > 0.999 for prediction in predictions)
        assert [prediction.text for prediction in predictions] == wanted
        assert [prediction.text for prediction in model.predict(texts_of(animal))] == known
    assert len(set(wanted)) == 2, "it has learned its task"
    assert main.main(words) == 1
    assert "has a task 'colour' already: expected another --name" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["sapt", "olora", "gainlora"])
def test_routers_that_learn_to_select_are_refused_by_name(
    complete: Complete, lab: Lab, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = complete("llama", method, "torch").storage
    kind = head_of(Bank(storage.sub("bank"))).router.kind
    words = ["--name", "more", "--examples", f"{lab.tasks[0]['path']}/train.jsonl"]
    assert main.main(["bank", "import", storage.sub("bank").uri, str(tmp_path), *words]) == 1
    error = capsys.readouterr().err
    assert f"router '{kind}' cannot select 'more' by examples" in error and "(keys, discriminant)" in error


def test_an_adapter_of_the_hub_is_imported_by_its_folder_there(
    complete: Complete, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bank = Bank(complete("llama", "inclora", "torch").storage.sub("bank"))
    with asked_by_this_process(tmp_path) as hub:
        done = push(bank, head_of(bank), "main", "me/bank", CardFields())
        words = ["--name", "guest", "--backbone", str(lab.model_folder("llama"))]
        own = str(tmp_path / "own")
        assert main.main(["bank", "import", own, "hf://me/bank/animal", *words, "--tasks", "animal"]) == 0
        assert not [name for name in hub.sent if name.startswith("colour")]
    manifest = next(iter(Bank.at(own).storage.files("adapters/guest")))
    assert f"hf://me/bank/animal@{done.commit}" in Bank.at(own).storage.read_text(manifest)


def test_the_prompt_is_given_or_taken_from_the_folder(
    complete: Complete, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of PEFT alone says nothing about prompts, and one that raycl exported does."""
    source = complete("llama", "slm", "torch").storage.sub("bank").uri
    shutil.copytree(source, tmp_path / "bank")
    bank, folder = Bank.at(tmp_path / "bank"), tmp_path / "peft"
    exported = head_of(bank)
    assert main.main(["bank", "export", source, "--adapters", "animal.0", "--to", str(folder)]) == 0
    words = ["bank", "import", bank.storage.uri, str(folder), "--examples", f"{lab.tasks[1]['path']}/train.jsonl"]
    capsys.readouterr()
    assert main.main([*words, "--name", "none", "--prompt", "Classify:"]) == 1
    assert "the prompt 'Classify:' has no {text}: expected it where the text stands" in capsys.readouterr().err
    assert main.main([*words, "--name", "given", "--prompt", "Classify: {text} Answer:"]) == 0
    assert head_of(bank).tasks[-1].prompt == ("Classify: ", " Answer:")
    assert main.main([*words, "--name", "taken"]) == 0
    animal = next(task for task in exported.tasks if task.name == "animal")
    assert head_of(bank).tasks[-1].model_copy(update={"name": "animal"}).prompt == animal.prompt != ("", "")
    (folder / "raycl.json").write_text('{"tasks": [{"name": 7}]}')
    assert main.main([*words, "--name", "other"]) == 1
    assert "raycl.json' does not describe tasks as raycl does" in capsys.readouterr().err
    assert head_of(bank).provenance["imported"][0]["task"] == "given"
    assert main.main(["bank", "import", str(tmp_path / "empty"), str(folder), "--name", "guest"]) == 1
    assert "import needs --backbone MODEL" in capsys.readouterr().err


def test_examples_are_read_in_their_prompt_where_the_router_was_fitted_on_prompts(
    complete: Complete, lab: Lab, tmp_path: Path
) -> None:
    """The snapshot keeps the router's other settings."""
    ours = learned(lab, tmp_path / "ours", "llama", lab.slots(router_text="prompt"), lab.tasks[0], epochs=1)
    source = complete("llama", "slm", "torch").storage.sub("bank").uri
    folder, before = str(tmp_path / "peft"), head_of(Bank.at(ours))
    assert main.main(["bank", "export", source, "--adapters", "animal.0", "--to", folder]) == 0
    words = ["bank", "import", ours, folder, "--examples", f"{lab.tasks[1]['path']}/train.jsonl"]
    means = []
    for name, prompt in (("plain", "{text}"), ("asked", "cat dog : {text} Output :")):
        assert main.main([*words, "--name", name, "--prompt", prompt]) == 0
        after = head_of(Bank.at(ours))
        assert {**after.router.settings, "tasks": ["colour"]} == before.router.settings
        means.append(get_router(Bank.at(ours), after).tensors[f"mean/{name}"])
    assert not means[0].equal(means[1])
