"""Tasks that are never trained: evaluated once, at the end, by a model that gets no task id."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axes import sampled
from tiny import KINDS, TASKS, TEST_ROWS, Complete, Lab, Stop, exported, matrix, run, trace, work

from raycl import config as configs
from raycl.bank import Bank
from raycl.config import Tree
from raycl.errors import ConfigError
from raycl.launch import prepared_run
from raycl.operations.banks import unlearning
from raycl.operations.report.run_comparison import compare, to_csv
from raycl.operations.report.tables import comparison_table, matrix_table
from raycl.operations.sweep.trials.prefix import prefix_keys
from raycl.operations.sweep.trials.trial import separate_key, separate_tree
from raycl.storage import Storage
from raycl.training.phase.evaluation import StreamEvaluation
from raycl.training.records.run_folder import CONFIG
from raycl.training.setup.checks import check, read_singles
from raycl.training.setup.run_config import RunConfig
from raycl.types import Batch


def asked(lab: Lab, kind: str, method: Any = "lora", unseen: Any = None, **sections: Any) -> RunConfig:
    return lab.config(kind, method, stream={"unseen": unseen or [lab.unseen]}, **sections)


def results(storage: Storage) -> Tree:
    return dict(storage.read_json("results.json"))


Evaluated = Callable[[str, str], tuple[Storage, list[bool]]]


@pytest.fixture(scope="module")
def evaluated(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """(backbone kind, method) -> a run with an unseen task, and whether each phase's record had it; for reading
    only."""

    @functools.cache
    def made(kind: str, method: str) -> tuple[Storage, list[bool]]:
        storage, phases = Storage.at(tmp_path_factory.mktemp("evaluated")), list[bool]()
        run(asked(lab, kind, method), storage, on_phase=lambda record: phases.append("unseen" in record))
        return storage, phases

    return made


CASES = sampled(
    [*((kind, method) for kind in KINDS for method in ("lora", "sapt", "slm")), ("t5", "olora"), ("bert", "joint")]
)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_unseen_tasks_are_evaluated_at_the_end_and_change_nothing_else(
    complete: Complete, evaluated: Evaluated, kind: str, method: str
) -> None:
    """Trained weights, matrix, metrics and what is published are those of the run without them."""
    plain, (result, phases) = complete(kind, method, "torch").storage, evaluated(kind, method)
    assert phases == ([True] if method == "joint" else [False, True]), "after the last task only"
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)
    told, before = results(result), results(plain)
    assert told["stream"]["tasks"] == list(TASKS) and told["metrics"] == before["metrics"]
    assert told["phase_summaries"] == before["phase_summaries"] and before["unseen"] is None
    (cell,) = told["unseen"]["cells"].values()
    assert list(told["unseen"]["cells"]) == ["mixed"] and cell["count"] == TEST_ROWS
    assert told["unseen"]["mean"] == cell["value"] and {"off_task", "empty"} <= cell["extra"].keys()
    answers = [json.loads(line) for line in result.read("predictions/unseen/mixed.jsonl").decode().splitlines()]
    right = sum(line["answer"] in line["references"] for line in answers)
    assert len(answers) == TEST_ROWS and cell["value"] == pytest.approx(100 * right / TEST_ROWS)
    if kind == "bert":
        assert {line["answer"] for line in answers} <= {label for task in TASKS.values() for label, _ in task}


def test_the_method_gets_no_task_id_of_unseen_tasks(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAPT's batches carry their tasks' names, except for those."""
    from raycl.methods.sapt.sapt import Sapt

    route, recorded = Sapt.route, list[str]()

    def listen(self: Sapt, batch: Batch) -> Any:
        recorded.extend(batch.tasks)
        assert len(batch.tasks) == len(batch)
        return route(self, batch)

    monkeypatch.setattr(Sapt, "route", listen)
    run(asked(lab, "t5", "sapt"), Storage.at(tmp_path))
    assert set(recorded) == {*TASKS, ""}


def test_predictions_are_limited_to_the_unseen_tasks_labels(lab: Lab, tmp_path: Path) -> None:
    for kind in ("t5", "bert"):
        run(asked(lab, kind, eval={"labels": "task"}), Storage.at(tmp_path / kind))
        lines = Storage.at(tmp_path / kind).read("predictions/unseen/mixed.jsonl").decode().splitlines()
        assert {json.loads(line)["answer"] for line in lines} <= {"red", "cat"}


def test_unseen_tasks_of_a_pretraining_run(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("llama", stream={"unseen": [lab.unseen], "objective": "clm"})
    check(config)
    run(config, Storage.at(tmp_path))
    assert results(Storage.at(tmp_path))["unseen"]["cells"]["mixed"]["extra"]["perplexity"] > 1


@pytest.mark.parametrize(("kind", "method"), [("t5", "sapt"), ("bert", "lora")])
def test_a_run_killed_before_unseen_tasks_evaluates_them_on_resume(
    lab: Lab, evaluated: Evaluated, tmp_path: Path, kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, (whole, _), killed = asked(lab, kind, method), evaluated(kind, method), Storage.at(tmp_path)

    def kill(*_: object) -> None:
        raise Stop("between the last task and these")

    with monkeypatch.context() as patch:
        patch.setattr(StreamEvaluation, "unseen", kill)
        with pytest.raises(Stop):
            run(config, killed)
    assert results(killed)["unseen"] is None and not results(killed)["finished"]
    run(config, killed, after=0)  # not a step more
    assert results(killed)["unseen"] == results(whole)["unseen"] and results(killed)["finished"]
    assert trace(killed) == trace(whole) and matrix(killed) == matrix(whole)

    killed.write(CONFIG, configs.to_yaml(config).encode())
    monkeypatch.setattr(StreamEvaluation, "unseen", kill)
    run(config, killed)
    assert prepared_run.finish(prepared_run.reopen(killed.address))["unseen"] == results(whole)["unseen"]


def test_extending_a_run_evaluates_unseen_tasks_again(lab: Lab, evaluated: Evaluated, tmp_path: Path) -> None:
    tree = configs.as_tree(asked(lab, "t5"))
    tree["stream"]["tasks"] = tree["stream"]["tasks"][:1]
    first, folder = configs.validate(RunConfig, tree), Storage.at(tmp_path / "first")
    run(first, folder)
    folder.write(CONFIG, configs.to_yaml(first).encode())
    assert results(folder)["unseen"]["cells"].keys() == {"mixed"}
    grown = prepared_run.extend(folder.address, [json.dumps(lab.tasks[1])])
    assert prepared_run.finish(grown)["unseen"] is None, "that was of the model before"
    work(grown)
    assert results(folder)["unseen"] == results(evaluated("t5", "lora")[0])["unseen"]


def test_unseen_tasks_are_in_the_tables(complete: Complete, evaluated: Evaluated) -> None:
    trees = [results(evaluated("t5", "lora")[0]), results(complete("t5", "inclora", "torch").storage)]
    mean = f"{trees[0]['unseen']['mean']:.1f}"
    (line,) = (line for line in str(matrix_table(trees[0])).splitlines() if "never trained" in line)
    assert line.split() == ["never", "trained", mean, mean] and "never trained" not in str(matrix_table(trees[1]))
    both = str(comparison_table(compare(trees))).splitlines()
    assert "unseen" in both[0] and mean in both[2].split() and "unseen" not in str(comparison_table(compare(trees[1:])))
    assert ",unseen,unseen_std," in to_csv(trees) and "unseen" not in to_csv(trees[1:]).splitlines()[0]


def test_snapshots_are_scored_without_unseen_tasks(lab: Lab, tmp_path: Path) -> None:
    """Their files may be gone where a snapshot is judged later."""
    spec = {"name": "mixed", "path": shutil.copytree(str(lab.unseen["path"]), str(tmp_path / "gone"))}
    storage = Storage.at(tmp_path / "run")
    run(asked(lab, "t5", unseen=[spec]), storage)
    shutil.rmtree(spec["path"])
    bank = Bank(storage.sub("bank"))
    newest = bank.newest()
    assert newest is not None and set(unlearning.evaluate(bank, newest)) == set(TASKS)


@pytest.mark.parametrize(
    "method",
    [
        "separate",
        ("separate", "sapt"),
        {"name": "slm", "retrieval": {"task_id": True}},
        ("joint", {"name": "slm", "retrieval": {"task_id": True}}),
    ],
)
def test_methods_that_need_the_task_id_refuse_unseen_tasks(lab: Lab, method: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^stream.unseen is set and (method 'slm'|stream.schedule=separate) needs each text's task id, ",
    ):
        asked(lab, "t5", method)
    lab.config("t5", method)


def foreign(lab: Lab, root: Path) -> dict[str, Any]:
    """Return a task with one label that is learned and one that is not."""
    lines = [json.dumps({"text": "the sky", "label": label}) for label in ("red", "warm")]
    (root / "test.jsonl").write_text("\n".join(lines))
    return {"name": "temper", "path": str(root)}


def test_an_encoder_answers_with_learned_labels_alone(lab: Lab, tmp_path: Path) -> None:
    spec = foreign(lab, tmp_path)
    words = r"unseen task 'temper' has labels that no task of the stream has \(warm\), and .* leave it out of stream"
    for labels in ("all", "task"):
        with pytest.raises(ConfigError, match=words):
            check(asked(lab, "bert", unseen=[spec], eval={"labels": labels}))
        check(asked(lab, "llama", unseen=[spec], eval={"labels": labels}))
    assert [task.name for task in check(asked(lab, "bert")).unseen] == ["mixed"]


def test_missing_dev_rows_are_an_error_before_training(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"unseen task 'mixed' has no dev rows and eval.split is dev: leave it out"):
        check(asked(lab, "t5", eval={"split": "dev"}))


def test_single_task_and_shared_results_do_not_depend_on_unseen_tasks(lab: Lab, tmp_path: Path) -> None:
    item, other = asked(lab, "bert"), lab.config("bert")
    assert prefix_keys(item, list(TASKS)) == prefix_keys(other, list(TASKS))
    assert separate_key(separate_tree(item)) == separate_key(separate_tree(other))
    run(lab.config("bert", "separate"), Storage.at(tmp_path))
    singles = read_singles(asked(lab, "bert", eval={"singles": str(tmp_path)}))
    assert singles is not None and set(singles) == set(TASKS)
