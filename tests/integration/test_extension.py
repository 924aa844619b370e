"""A run that is extended by a task equals one that had all tasks from the start; impossible extensions are errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import Complete, Lab, Stop, matrix, run, trace, work

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.branches import Branch, line_of
from raycl.cli import main
from raycl.errors import BankError, ConfigError, DataError, ResumeError, RunError
from raycl.launch import prepared_run, requested_run
from raycl.launch.prepared_run import with_tasks
from raycl.serve.offline.model import OfflineModel
from raycl.storage import Storage
from raycl.training.records.checkpoint import read_checkpoint
from raycl.training.records.journal import read_state
from raycl.training.records.run_folder import CONFIG
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.setup import run_config
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import RunConfig


def halves(lab: Lab, method: Any) -> tuple[RunConfig, RunConfig, str]:
    """Return the run of all tasks, the one of the first, and the second task as on the command line."""
    whole = lab.config("bert", method)
    first = configs.validate(
        RunConfig, {**configs.as_tree(whole), "stream": {**configs.as_tree(whole)["stream"], "tasks": lab.tasks[:1]}}
    )
    return whole, first, yaml.safe_dump(lab.tasks[1], default_flow_style=True, width=1000).strip()


def settings_of(lab: Lab, method: str) -> Any:
    """Return a method's settings; `replay` has generated samples, which the first run has to keep for the second."""
    if method == "replay":
        writer = {"name": str(lab.model_folder("llama")), "dtype": "float32"}
        generator = {"steps": 5, "rate": 0.02, "max_tokens": 8, "backbone": writer}
        return {"name": "replay", "source": "generated", "share": 0.3, "generator": generator}
    return method


@pytest.mark.parametrize("method", ["lora", "slm", "sapt", "finetune", "replay"])
def test_an_added_task_is_learned_as_if_configured_from_the_start(
    lab: Lab, complete: Complete, method: str, tmp_path: Path
) -> None:
    config, first, later = halves(lab, settings_of(lab, method))
    if method == "replay":
        whole = run(config, Storage.at(tmp_path / "whole")).storage
    else:
        whole = complete("bert", method, "torch").storage
    folder = Storage.at(tmp_path / "first")
    run(first, folder)
    folder.write(CONFIG, configs.to_yaml(first).encode())
    before = prepared_run.finish(prepared_run.reopen(str(tmp_path / "first")))
    grown = prepared_run.extend(str(tmp_path / "first"), [later])
    assert (grown.done, len(grown.phases)) == (1, 2)
    work(grown)
    results = prepared_run.finish(prepared_run.reopen(str(tmp_path / "first")))
    assert results["finished"] and results["matrix"][0][0] == before["matrix"][0][0]
    assert trace(folder) == trace(whole) and matrix(folder) == matrix(whole)
    ends = [
        read_checkpoint(item, read_state(item).checkpoints[-1], TensorObjects(item, item.sub("bank")))
        for item in (folder, whole)
    ]
    assert all(torch.equal(ends[0].parameters[name], value) for name, value in ends[1].parameters.items())


def test_a_task_added_after_a_rollback_is_learned_from_where_the_branch_is(lab: Lab, tmp_path: Path) -> None:
    """A run of its own learns it, as a run without the undone task does; the first run would undo the rollback."""
    whole, _, _ = halves(lab, "sapt")
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "third"}]
    tree = {**configs.as_tree(whole), "output": {"dir": str(tmp_path), "name": "run"}}
    work(prepared_run.prepare(configs.validate(RunConfig, {**tree, "stream": {**tree["stream"], "tasks": tasks[:2]}})))
    folder = Storage.at(tmp_path / "run")
    bank = Bank(folder.sub("bank"))
    Branch(bank).go_back(bank.open(1), "wrong rows")
    added = yaml.safe_dump(tasks[2], default_flow_style=True, width=1000).strip()
    stays = prepared_run.extend(folder.uri, [added])
    with pytest.raises(RunError, match=r"branch 'main' of '.*bank' went back from snapshot 2 to 1, and this run"):
        work(stays)
    assert Branch(bank).head() == 1
    prepared = requested_run.prepared(None, ["output.name=again"], folder.uri, [added], None)
    work(prepared)
    again = Storage.at(tmp_path / "again")
    straight = configs.validate(RunConfig, {**tree, "stream": {**tree["stream"], "tasks": [tasks[0], tasks[2]]}})
    run(straight, Storage.at(tmp_path / "straight"))
    assert matrix(again) == matrix(Storage.at(tmp_path / "straight"))
    assert list(line_of(bank, "main")) == [3, 1] and bank.snapshots() == [1, 2, 3]
    assert len(read_state(folder).phases) == 2, "the first run stays as it is"
    more = requested_run.prepared(None, ["output.name=more"], folder.uri, [added.replace("third", "fourth")], None)
    assert [task.name for task in more.stream.tasks] == ["colour", "third", "fourth"]


@pytest.mark.parametrize("operation", ["import", "fuse"])
def test_a_task_added_after_an_operation_without_training_state_does_not_take_it_back(
    lab: Lab, operation: str, tmp_path: Path
) -> None:
    """Such a snapshot has the provenance of the run before it, which must not replace it as its own."""
    _, first, later = halves(lab, lab.slots())
    folder, bank = Storage.at(tmp_path / "run"), str(tmp_path / "run/bank")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    run(first, folder)
    adapter = Bank.at(bank).open(1).adapters[0].name
    words = {
        "import": [str(tmp_path / "peft"), "--name", "other", "--examples", f"{lab.tasks[0]['path']}/train.jsonl"],
        "fuse": ["--how", "average", "--without-scores", "--to", "fused"],
    }
    assert main.main(["bank", "export", bank, "--adapters", adapter, "--to", str(tmp_path / "peft")]) == 0
    assert main.main(["bank", operation, bank, *words[operation]]) == 0
    if operation == "fuse":
        assert main.main(["bank", "promote", bank, "fused"]) == 0
    branch = Branch(Bank.at(bank))
    assert branch.head() == 2 and branch.bank.open(2).is_derived
    with pytest.raises(BankError, match=r"snapshot 2 .* has no training state.*bank\.branch=NAME"):
        requested_run.prepared(None, [], folder.uri, [later], None)
    with pytest.raises(RunError, match=r"branch 'main' .* was moved to snapshot 2 .*bank\.branch=NAME"):
        work(prepared_run.extend(str(shutil.copytree(folder.root, tmp_path / "copy")), [later]))
    work(requested_run.prepared(None, ["bank.branch=next"], folder.uri, [later], None))
    assert branch.head() == 2 and list(line_of(branch.bank, "next")) == [3, 1]


def test_a_task_added_after_one_was_forgotten_is_learned_without_it(lab: Lab, tmp_path: Path) -> None:
    _, _, later = halves(lab, "lora")
    tree = {**configs.as_tree(lab.config("bert", lab.slots())), "output": {"dir": str(tmp_path), "name": "run"}}
    work(prepared_run.prepare(configs.validate(RunConfig, tree)))
    bank = Bank.at(tmp_path / "run/bank")
    assert main.main(["bank", "forget", str(tmp_path / "run/bank"), "colour"]) == 0
    third = later.replace(str(lab.tasks[1]["name"]), "third", 1)
    prepared = requested_run.prepared(None, ["output.name=next"], str(tmp_path / "run"), [third], None)
    assert [task.name for task in prepared.stream.tasks] == [str(lab.tasks[1]["name"]), "third"]
    work(prepared)
    assert list(line_of(bank, "main")) == [4, 3, 2, 1]


def test_a_task_whose_training_failed_can_be_added_again(lab: Lab, tmp_path: Path) -> None:
    """The task can be added as it is; with other data, training would start from what the first data taught."""
    _, first, later = halves(lab, "lora")
    folder = Storage.at(tmp_path / "run")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    run(first, folder)
    taught = prepared_run.extend(str(tmp_path / "run"), [later])
    with pytest.raises(Stop):
        run(taught.config, folder, after=1, takes_over=True)
    again = prepared_run.extend(str(tmp_path / "run"), [later])
    assert again.config == taught.config and again.replaces == read_state(folder).fingerprint
    with pytest.raises(ConfigError, match="more than once"):
        prepared_run.extend(str(tmp_path / "run"), [later.replace("{", "{labels: [cat, dog, cow], ", 1)])
    run(again.config, folder)
    with pytest.raises(ConfigError, match="more than once"):
        prepared_run.extend(str(tmp_path / "run"), [later])


def test_impossible_extensions_are_refused_and_change_nothing(lab: Lab, tmp_path: Path) -> None:
    _, first, later = halves(lab, "lora")
    folder = Storage.at(tmp_path / "run")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    written = folder.read(CONFIG)
    for added, overrides, kind, message in (
        (["{name: "], (), ConfigError, "is neither a task's name nor YAML"),
        ([str(lab.tasks[0]["name"])], (), ConfigError, "stream"),
        (["{name: new, path: ./nowhere}"], (), ConfigError, "nowhere"),
        ([later], ("seed=5",), ResumeError, "seed was 42, now 5; start a new run instead"),
        ([later], ("train.batch_size=5",), ResumeError, "train.batch_size was .*, now 5; .* raycl train bank.start="),
        ([later], ("train.epochs_by_task.colour=3",), ResumeError, "epochs_by_task.colour"),
        ([later], ("train.learning_rate_by_task.colour=3",), ResumeError, "learning_rate_by_task.colour"),
        ([later], ("stream.train_rows_by_task.colour=3",), ResumeError, "rows_by_task.colour"),
    ):
        with pytest.raises(kind, match=message):
            prepared_run.extend(str(tmp_path / "run"), added, overrides)
        assert folder.read(CONFIG) == written
    own = str(lab.tasks[1]["name"])
    its_own = (*(f"train.{key}_by_task.{own}=2" for key in ("epochs", "learning_rate")),)
    taught = prepared_run.extend(
        str(tmp_path / "run"), [later], (*its_own, f"stream.train_rows_by_task.{own}=5")
    ).config
    assert (taught.train.epochs_of(own), taught.stream.train_rows_of(own)) == (2, 5)
    assert [taught.train.of_task(name).learning_rate for name in ("colour", own)] == [0.01, 2.0]
    with pytest.raises(ResumeError, match="holds no run"):
        prepared_run.extend(str(tmp_path / "nothing"), [later])


def test_training_settings_beside_an_added_task_are_its_own(lab: Lab, tmp_path: Path) -> None:
    """The config is the one with settings by task, so that the run and all that read it later need no other case."""
    _, first, later = halves(lab, "lora")
    own = str(lab.tasks[1]["name"])
    folder = Storage.at(tmp_path / "run")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    run(first, folder)
    short = ("train.epochs=4", "train.learning_rate=0.5", "stream.train_rows=5")
    taught = prepared_run.extend(str(tmp_path / "run"), [later], short).config
    written = {"train": {"epochs": 4, "learning_rate": 0.5}, "stream": {"train_rows": 5}}
    by_task = [f"{section}.{key}_by_task.{own}={value}" for section, of in written.items() for key, value in of.items()]
    assert prepared_run.extend(str(tmp_path / "run"), [later], tuple(by_task)).config == taught
    assert taught.train.epochs_of("colour") == first.train.epochs_of("colour") != taught.train.epochs_of(own) == 4
    assert [taught.train.of_task(name).learning_rate for name in ("colour", own)] == [0.01, 0.5]
    assert [taught.stream.train_rows_of(name) for name in ("colour", own)] == [None, 5]
    with pytest.raises(Stop):
        run(taught, folder, after=1, takes_over=True)
    again = prepared_run.extend(str(tmp_path / "run"), [later], ("train.epochs=6", *short[1:])).config
    assert again.train.epochs_of(own) == 6, "an attempt that failed does not decide the next one's"


def test_an_added_task_may_have_rows_that_are_left_out(lab: Lab, tmp_path: Path) -> None:
    """Tasks that were read without any are the same under both settings."""
    _, first, _ = halves(lab, "lora")
    folder = Storage.at(tmp_path / "run")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    run(first, folder)
    rows = "text,label\n" + "a cat,cat\na dog,dog\n" * 20
    (tmp_path / "new").mkdir()
    (tmp_path / "new/train.csv").write_text(f"{rows}only one cell\n")
    (tmp_path / "new/test.csv").write_text(rows)
    new = f"{{name: new, path: {tmp_path / 'new'}}}"
    with pytest.raises(DataError, match="row 41: 1 cells"):
        prepared_run.extend(str(tmp_path / "run"), [new])
    skipping = prepared_run.extend(str(tmp_path / "run"), [new], ("stream.on_bad_row=skip",))
    assert [len(skipping.stream.rows(task, "train")) for task in skipping.stream.tasks[1:]] == [40]


def test_a_small_added_task_may_have_automatic_epochs_where_the_run_names_a_number(lab: Lab, tmp_path: Path) -> None:
    _, first, later = halves(lab, "lora")
    folder = Storage.at(tmp_path / "run")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    taught = prepared_run.extend(str(tmp_path / "run"), [later], ("train.epochs=auto",)).config.train
    own = str(lab.tasks[1]["name"])
    assert taught.epochs == first.train.epochs != "auto"
    assert taught.epochs_of(own, rows=32) == 7 and taught.epochs_of("colour", rows=32) == first.train.epochs
    with pytest.raises(ConfigError, match="epochs_by_task"):
        prepared_run.extend(str(tmp_path / "run"), [later], (f"train.epochs_by_task.{own}=0",))


def test_an_added_task_may_have_longer_texts_and_older_ones_keep_their_limits(lab: Lab, tmp_path: Path) -> None:
    """Each task has its limits in training, evaluation and serving, as in a run that knew both from the start."""
    own = str(lab.tasks[1]["name"])
    limits = {"max_source_tokens": 8, "max_target_tokens": 2}
    its_own = {"max_source_tokens_by_task": {own: 12}, "max_target_tokens_by_task": {own: 3}}
    whole = lab.config("llama", "lora", stream={**limits, **its_own})
    first = lab.config("llama", "lora", stream={**limits, "tasks": lab.tasks[:1]})
    folder = Storage.at(tmp_path / "run")
    folder.write(CONFIG, configs.to_yaml(first).encode())
    run(first, folder)
    later = yaml.safe_dump(lab.tasks[1], default_flow_style=True, width=1000).strip()
    grown = prepared_run.extend(
        str(tmp_path / "run"), [later], ("stream.max_source_tokens=12", "stream.max_target_tokens=3")
    )
    stream = grown.config.stream
    assert [stream.limits_of(name) for name in ("colour", own)] == [(8, 2), (12, 3)] == [(8, 2), stream.token_limits]
    work(grown)
    run(whole, Storage.at(tmp_path / "whole"))
    assert trace(folder) == trace(Storage.at(tmp_path / "whole"))
    assert matrix(folder) == matrix(Storage.at(tmp_path / "whole"))
    bank = Bank(folder.sub("bank"))
    with OfflineModel.open(bank, bank.open(2)) as model:
        for task, (source, target) in (("colour", (8, 2)), (own, (12, 3))):
            (answer,) = model.predict(["it purrs a sleeps " * 5], task=task)
            whole_prompt = len(
                model._engine.model.backbone.codec.encode_source(["it purrs a sleeps " * 5 + "\nOutput: "])[0]
            )
            assert whole_prompt - answer.cut_tokens == source and len(answer.text.split()) <= target
            (longer,) = model.predict(["it purrs"], task=task, max_tokens=6)
            assert len(longer.text.split()) <= 6


def test_lengths_that_follow_the_data_are_recorded_and_an_added_task_has_its_own(lab: Lab, tmp_path: Path) -> None:
    auto = {"max_source_tokens": "auto", "max_target_tokens": "auto"}
    later = {**lab.tasks[1], "path": str(tmp_path / "later")}
    shutil.copytree(lab.tasks[1]["path"], later["path"])
    file = next((tmp_path / "later").glob("train.*"))
    first = lab.config(
        "t5", "lora", stream={**auto, "tasks": lab.tasks[:1]}, output={"dir": str(tmp_path), "name": "a"}
    )
    prepared = prepared_run.prepare(first)
    recorded = prepared.config.stream
    assert recorded.limits_of("colour") == (128, 32) and recorded.max_source_tokens_by_task == {"colour": 128}
    work(prepared)
    assert prepared_run.finish(prepared)["cut"] == {}
    again = prepared_run.reopen(str(tmp_path / "a"), first)
    assert again.config == prepared.config == prepared_run.reopen(str(tmp_path / "a")).config
    bank = Bank(Storage.at(tmp_path / "a" / "bank"))
    assert bank.open(1).token_limits("colour") == (128, 32)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "text": f"{row['text']} sleeps" * 60}) + "\n" for row in rows))
    text = yaml.safe_dump(later, default_flow_style=True, width=1000).strip()
    grown = prepared_run.extend(str(tmp_path / "a"), [text]).config.stream
    own = str(later["name"])
    assert grown.limits_of("colour") == (128, 32) and grown.limits_of(own)[0] > 128
    started = run_config.from_tree({"bank": {"start": f"{tmp_path / 'a' / 'bank'}@1"}, "stream": {"tasks": [later]}})
    assert started.stream.max_source_tokens_by_task == {"colour": 128}, "measured when the run is prepared"


@pytest.mark.parametrize(
    "key",
    [
        *("train.epochs_by_task", "train.learning_rate_by_task", "stream.train_rows_by_task"),
        *("stream.max_source_tokens_by_task", "stream.max_target_tokens_by_task"),
    ],
)
def test_a_setting_of_one_task_names_a_task_of_the_stream(lab: Lab, key: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"^{key} names \['sky'\], which the stream lacks: expected some of "):
        check(lab.config("t5", "lora", **{section: {name: {"sky": 12, "colour": 13}}}))


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("slm", "r_by_task"),
        ("slm", "keys.slots_by_task"),
        ("sapt", "r_by_task"),
        ("olora", "lambda_1_by_task"),
    ],
)
def test_a_methods_setting_of_one_task_names_a_task_of_the_stream(lab: Lab, method: str, key: str) -> None:
    *sections, name = key.split(".")
    settings: dict[str, Any] = {name: {"sky": 2, "colour": 3}}
    for section in reversed(sections):
        settings = {section: settings}
    with pytest.raises(ConfigError, match=rf"^method\.{key} names \['sky'\], which the stream lacks: expected some"):
        check(lab.config("bert", {"name": method, **settings}))


def test_a_new_task_may_have_a_size_of_its_own(lab: Lab, tmp_path: Path) -> None:
    _, first, later = halves(lab, "sapt")
    Storage.at(tmp_path / "run").write(CONFIG, configs.to_yaml(first).encode())
    own = str(lab.tasks[1]["name"])
    with pytest.raises(ResumeError, match=r"method\.r_by_task\.colour"):
        prepared_run.extend(str(tmp_path / "run"), [later], ("method.r_by_task.colour=3",))
    grown = prepared_run.extend(str(tmp_path / "run"), [later], (f"method.r_by_task.{own}=3",)).config
    assert grown.method.settings_by_task()["r_by_task"] == {own: 3}


def test_mistakes_in_data_are_said_before_it_is_trained_on(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split in ("train", "test"):
        rows = [f"{split} {number},{'A' if number % 2 else 'b'}\n" for number in range(60)]
        (tmp_path / f"{split}.csv").write_text("".join(["text,label\n", *rows, *["the same,A\nodd,a\n"] * 4]))
    output = {"dir": str(tmp_path / "runs"), "name": "first"}
    config = lab.config("bert", stream={"tasks": [{"name": "dirty", "path": str(tmp_path)}]}, output=output)
    expected = {"rows whose label is written otherwise in most rows", "test rows with a text that is in train"}
    prepared_run.prepare(config)
    assert expected <= {line.split(": ")[1] for line in caplog.messages if line.startswith("dirty: ")}
    caplog.clear()
    Storage.at(tmp_path / "other").write(CONFIG, configs.to_yaml(halves(lab, "lora")[1]).encode())
    prepared_run.extend(str(tmp_path / "other"), [f"{{name: dirty, path: {tmp_path}}}"])
    assert expected <= {line.split(": ")[1] for line in caplog.messages if line.startswith("dirty: ")}
    assert not any(line.startswith(f"{lab.tasks[0]['name']}: ") for line in caplog.messages), "looked at before"


def test_runs_that_used_all_tasks_cannot_be_extended(lab: Lab) -> None:
    with pytest.raises(ResumeError, match=r"stream\.schedule=joint trains all tasks in one phase"):
        with_tasks(lab.config("bert", "joint"), ["other"])
    with pytest.raises(ResumeError, match="read its whole stream"):
        with_tasks(lab.config("bert", lab.slots(train_scope="all")), ["other"])


def test_a_named_order_is_spelled_out(lab: Lab) -> None:
    builtin = replace_stream(lab.config("bert"), {"name": "builtin", "max_source_tokens": 32})
    grown = with_tasks(builtin, [yaml.safe_dump(lab.tasks[0], default_flow_style=True, width=1000).strip()])
    names = [task if isinstance(task, str) else task.name for task in grown.stream.tasks or ()]
    assert len(names) > 2 and names[-1] == lab.tasks[0]["name"] and len(set(names)) == len(names)


def replace_stream(config: RunConfig, stream: dict[str, Any]) -> RunConfig:
    """Return the config on another stream."""
    return configs.validate(RunConfig, {**configs.as_tree(config), "stream": stream})
