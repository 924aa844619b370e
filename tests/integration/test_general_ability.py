"""`eval.general`: what lm-eval measures before a stream, after its tasks and after it, and nothing else changes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import TASKS, Complete, Lab, Stop, exported, matrix, run, trace

from raycl.backbone import load_codec
from raycl.cli.commands import run as command
from raycl.config import Tree, trust
from raycl.errors import ConfigError, DataError
from raycl.metrics.settings import GeneralConfig
from raycl.operations.report.page.sections import sections_of
from raycl.operations.report.run_comparison import to_csv
from raycl.operations.report.tables import matrix_table
from raycl.scoring.general_ability import SUITES, check_general, names_of
from raycl.serve.gate.judge import judge
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import RunConfig

QUERIES = ("Output : Output : Output :", "fire is warm", "the sea is")
evaluate = partial(command, "evaluate")
FOLDERS = (
    *("arc", "bbh", "gsm8k", "hellaswag", "humaneval", "ifeval", "mmlu", "piqa", "super_glue", "tydiqa"),
    "winogrande",
)
"""Folders of lm-eval with the tasks of `SUITES`, and one with a task that runs code."""

FLAGS = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]


@pytest.fixture(scope="module", autouse=True)
def few_files() -> Iterator[None]:
    """Let lm-eval read its tasks in folders of the suites alone: all of its 14,000 files take seconds."""
    from lm_eval.tasks import manager
    from lm_eval.tasks._index import TaskIndex

    own, listed = Path(manager.__file__).parent, TaskIndex._iter_yaml_files

    def few(root: Path) -> Iterator[Path]:
        for folder in (root / name for name in FOLDERS) if root == own else (root,):
            yield from listed(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(few))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a task of choices and one of written answers."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"query": query, "choices": ["red", "blue and green"], "gold": 0} for query in QUERIES]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{query}}",
        "tag": ["both"],
    }
    choices = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}"}
    written = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3, "do_sample": False},
        "metric_list": [{**FLAGS[0], "metric": "exact_match"}],
    }
    for name, own in (("choose", {**choices, "metric_list": FLAGS}), ("write", written)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **own}))
    return str(folder)


def asked(lab: Lab, files: str, kind: str = "llama", method: Any = "lora", **sections: Any) -> RunConfig:
    general = {"tasks": ["both"], "include_path": files, **sections.pop("general", {})}
    return lab.config(kind, method, eval={"general": general, **sections.pop("eval", {})}, **sections)


def results(storage: Storage) -> Tree:
    return dict(storage.read_json("results.json"))


def general(storage: Storage) -> Any:
    return results(storage)["general"]


def assert_compared(tree: Any) -> None:
    """There are scores of all tasks before and after the stream, and what lies between."""
    assert tree["before"]["cells"].keys() == tree["after"]["cells"].keys() == {"choose (acc)", "write (exact_match)"}
    assert tree["delta"] == tree["after"]["mean"] - tree["before"]["mean"]


def test_it_is_measured_before_and_after_and_training_stays_as_it_was(
    lab: Lab, complete: Complete, files: str, tmp_path: Path
) -> None:
    plain, result = complete("llama", "lora", "torch").storage, Storage.at(tmp_path)
    run(asked(lab, files, "llama", "lora"), result)
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)
    tree = general(result)
    assert_compared(tree)
    assert tree["phases"] == [None, tree["after"]]
    assert general(plain) is None


def test_texts_of_no_learned_task_go_to_the_bare_model(
    lab: Lab, files: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLM's router finds the one of three that is unlike its tasks; the gate and `raycl evaluate` measure the same."""
    storage = Storage.at(tmp_path)
    sections = {
        "stream": {"dev_fraction": 0.3},
        "eval": {"unknown": "bare", "false_alarms": 0.3},
        "train": {"epochs": 6, "learning_rate": 0.03},
    }
    run(asked(lab, files, "llama", lab.slots(), general={"at": "tasks"}, **sections), storage)
    tree = general(storage)
    shares = [phase["cells"]["choose (acc)"]["extra"]["unknown"] for phase in tree["phases"]]
    assert shares == [pytest.approx(1 / 3)] * 2
    page, row = str(matrix_table(results(storage))), next(csv.DictReader(io.StringIO(to_csv([results(storage)]))))
    assert "general ability" in page and "unknown, %" in page
    assert float(row["general_delta"]) == tree["delta"] and float(row["general_unknown"]) == pytest.approx(100 / 3)
    assert [float(row[f"general_{end}"]) for end in ("before", "after")] == [
        tree[end]["mean"] for end in ("before", "after")
    ]
    capsys.readouterr()
    assert evaluate([f"{storage.address}/bank", "--general", "both", "--include-path", files, "--json"]) == 0
    served = json.loads(capsys.readouterr().out)
    assert served == {"before": tree["before"]["cells"], "after": tree["after"]["cells"]}
    gate = {
        "split": "test",
        "max_drop": 100.0,
        "max_general_drop": 0.0,
        "general": {"tasks": ["both"], "include_path": files},
    }
    config = ServeConfig(bank=storage.sub("bank").uri, device="cpu", follow={"enabled": False}, gate=gate)
    judged = judge(config, 1)
    assert judged.general == tuple(phase["mean"] for phase in reversed(tree["phases"]))
    worse = replace(judged, general=(50.0, 30.0))
    assert judged.passed == (judged.general_drop <= 0) and not worse.passed
    assert worse.reason == "general ability falls by 20.0 points, allowed are 0"
    assert replace(worse, max_general_drop=20.0).reason.endswith("(general ability 50.0, then 30.0)")
    section = next(part for part in sections_of([results(storage)]) if part.title == "General ability")
    assert section.figure is not None and section.numbers


@pytest.mark.parametrize(("kind", "method"), [("llama", "finetune"), ("t5", "sapt"), ("llama", "slm")])
def test_it_is_measured_over_the_epochs_of_a_task_and_training_stays_as_it_was(
    lab: Lab, complete: Complete, files: str, tmp_path: Path, kind: str, method: str
) -> None:
    """A task's last epoch has the model that is measured after the task, where one adapter answers all texts."""
    plain, storage, tasks = complete(kind, method, "torch").storage, Storage.at(tmp_path), list(TASKS)
    run(asked(lab, files, kind, method, general={"at": "epochs"}, eval={"at_epochs": 1}), storage)
    assert trace(storage) == trace(plain) and matrix(storage) == matrix(plain)
    assert exported(storage) == exported(plain)
    tree = results(storage)
    assert_compared(tree["general"])
    assert tree["general"]["phases"][-1] == tree["general"]["after"]
    names = [name for task in tasks for name in (task, f"{task}: general")]
    assert list(tree["epochs"]) == names and len({len(curve) for curve in tree["epochs"].values()}) == 1
    after = [phase["mean"] for phase in tree["general"]["phases"]]
    last = [tree["epochs"][f"{task}: general"].popitem()[1] for task in tasks]
    assert last == after or method in ("sapt", "slm")
    assert f"{tasks[0]}: general" in str(matrix_table(results(storage)))


def test_a_run_killed_in_its_first_task_measures_it_again(lab: Lab, files: str, tmp_path: Path) -> None:
    whole, storage = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "killed")
    run(asked(lab, files, method="finetune"), whole)
    with pytest.raises(Stop):
        run(asked(lab, files, method="finetune"), storage, after=3)
    run(asked(lab, files, method="finetune"), storage)
    assert general(storage) == general(whole)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"general": {"tasks": ["choos"]}},
        r"^general\.tasks names 'choos', which lm-eval or '.*' does not have: did you",
    ),
    (
        {"general": {"include_path": "/nowhere"}},
        r"^general\.include_path '/nowhere' is no folder of this machine",
    ),
    ({"general": {"tasks": ["humaneval"]}}, r"^task 'humaneval' in general\.tasks runs code that the model generates"),
    (
        {"general": {"chat_template": True}},
        r"^general\.chat_template is true, and backbone '.*' has no chat temp",
    ),
    ({"general": {"at": "epochs"}}, r"general\.at is epochs and at_epochs is null: name the number of epochs"),
    ({"kind": "bert"}, r"^general\.tasks names both, and encoder-only backbone '.*' gives texts no likelihood"),
    ({"method": "progprompt"}, r"eval\.general\.tasks is set and method 'progprompt' needs each text's task id"),
    ({"stream": {"schedule": "separate"}}, r"eval\.general\.tasks is set and stream\.schedule=separate needs each"),
    (
        {"method": "slm", "eval": {"unknown": "refuse"}},
        r"eval\.unknown=refuse gives texts outside the stream no answer",
    ),
]


def test_tasks_of_suites_exist(files: str) -> None:
    assert names_of(GeneralConfig(tasks=tuple(SUITES), include_path=files)) == list(
        dict.fromkeys(sum(SUITES.values(), ()))
    )


@pytest.mark.parametrize(("sections", "message"), WRONG)
def test_what_cannot_be_measured_is_refused_before_work_starts(
    lab: Lab, files: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        check(asked(lab, files, **sections))


@pytest.mark.parametrize(
    ("change", "why"),
    [({"nonsense": 3}, "TypeError: .*'nonsense'"), ({"doc_to_text": "{{missing}}"}, "UndefinedError: 'missing' is")],
)
def test_a_task_file_that_is_wrong_is_an_error_of_one_sentence(
    lab: Lab, files: str, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    task = yaml.safe_load((Path(files) / "write.yaml").read_text())
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**task, "task": "wrong", **change}))
    codec = load_codec(lab.config("llama").backbone, 8, 8)
    with pytest.raises(DataError, match=rf"^the rows of 'wrong' in general\.tasks cannot be read \({why}"):
        check_general(GeneralConfig(tasks=("wrong",), include_path=str(tmp_path)), codec, "tiny")


def test_a_missing_library_is_named_with_the_line_to_type(
    lab: Lab, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^general\.tasks needs the library lm-eval: pip install 'raycl\[eval\]'$"):
        check(asked(lab, files))


def test_files_that_can_run_code_are_named_on_the_command_line(lab: Lab, files: str) -> None:
    tree = {"eval": {"general": {"include_path": files, "allow_code": True}}}
    with pytest.raises(
        ConfigError, match=r"reads task files, which can run code: .*add eval\.general\.include_path=FOLDER"
    ):
        trust.require(trust.requested(tree), ["eval.general.allow_code=true"], "the config")
    trust.require(trust.requested(tree), trust.as_overrides(tree), "the config")
