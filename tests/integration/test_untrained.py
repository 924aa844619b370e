"""`eval.untrained`: every task is also evaluated by the backbone before any training, and nothing else changes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from axes import sampled
from tiny import TASKS, Complete, Lab, Stop, exported, matrix, run, trace, work

from raycl import config as configs
from raycl.config import Tree
from raycl.data.benchmarks.knowledge import TASKS as KNOWN
from raycl.data.benchmarks.orders import require
from raycl.errors import ConfigError
from raycl.launch import prepared_run
from raycl.operations.report.run_comparison import compare, to_csv
from raycl.operations.report.tables import comparison_table, matrix_table
from raycl.operations.sweep.trials.prefix import prefix_keys
from raycl.operations.sweep.trials.trial import separate_tree
from raycl.storage import Storage
from raycl.training.records.run_folder import CONFIG
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import RunConfig

ALL = {*TASKS, "mixed"}


def asked(lab: Lab, kind: str = "t5", method: Any = "lora", **sections: Any) -> RunConfig:
    """Return a run whose unseen task has a type."""
    unseen = [{**lab.unseen, "type": "weather"}]
    evaluation = {"untrained": True, **sections.pop("eval", {})}
    return lab.config(
        kind, method, stream={"unseen": unseen, **sections.pop("stream", {})}, eval=evaluation, **sections
    )


def results(storage: Storage) -> Tree:
    return dict(storage.read_json("results.json"))


def answers(storage: Storage) -> dict[str, bytes]:
    return {name: storage.read(f"predictions/untrained/{name}.jsonl") for name in ALL}


@pytest.fixture(scope="module")
def bare(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Storage]:
    """Kind -> a run of full fine-tuning with the row of the untrained backbone."""
    positions = {kind: Storage.at(tmp_path_factory.mktemp(kind)) for kind in ("t5", "llama")}
    for kind, storage in positions.items():
        run(asked(lab, kind, "finetune"), storage)
    return positions


CASES = sampled(
    [(kind, method) for kind in ("t5", "llama") for method in ("lora", "sapt", "slm", "joint")] + [("t5", "l2p")]
)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_the_row_is_of_the_bare_backbone_and_training_stays_as_it_was(
    lab: Lab, complete: Complete, bare: dict[str, Storage], tmp_path: Path, kind: str, method: str
) -> None:
    plain, result = complete(kind, method, "torch").storage, Storage.at(tmp_path)
    run(asked(lab, kind, method), result)
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)
    assert answers(result) == answers(bare[kind])
    tree, expected = results(result)["untrained"], results(bare[kind])["untrained"]
    assert tree == expected and tree["cells"].keys() == ALL
    assert tree["mean"] == sum(tree["cells"][task]["value"] for task in TASKS) / len(TASKS)
    never = tree["cells"]["mixed"]["value"]
    assert tree["unseen"] == {"mean": never, "types": {"weather": never}}
    assert results(plain)["untrained"] is None
    after = results(result)["unseen"]
    assert after["types"] == {"weather": after["mean"]}


def test_transfer_to_tasks_that_come_later_needs_the_row(lab: Lab, tmp_path: Path) -> None:
    """FWT of Lopez-Paz and Ranzato: the score one phase early minus that of the untrained model."""
    numbers = {}
    for name, untrained in (("with", True), ("without", False)):
        storage = Storage.at(tmp_path / name)
        run(asked(lab, eval={"tasks": "all", "untrained": untrained}), storage)
        numbers[name] = results(storage)
    tree = numbers["with"]
    start = tree["untrained"]["cells"]["animal"]["value"]
    assert tree["variants"]["fwt_mammoth"] == tree["matrix"][0][1]["value"] - start
    assert numbers["without"]["variants"]["fwt_mammoth"] is None


def test_a_run_killed_in_its_first_task_measures_the_row_again(
    lab: Lab, bare: dict[str, Storage], tmp_path: Path
) -> None:
    storage = Storage.at(tmp_path)
    with pytest.raises(Stop):
        run(asked(lab, "t5", "finetune"), storage, after=3)  # a checkpoint of trained weights is there
    run(asked(lab, "t5", "finetune"), storage)
    assert results(storage)["untrained"] == results(bare["t5"])["untrained"]


def test_extending_a_run_measures_its_new_task(lab: Lab, bare: dict[str, Storage], tmp_path: Path) -> None:
    tree = configs.as_tree(asked(lab, "t5", "finetune"))
    tree["stream"]["tasks"] = tree["stream"]["tasks"][:1]
    first, storage = configs.validate(RunConfig, tree), Storage.at(tmp_path)
    run(first, storage)
    assert results(storage)["untrained"]["cells"].keys() == {"colour", "mixed"}
    storage.write(CONFIG, configs.to_yaml(first).encode())
    work(prepared_run.extend(storage.address, [json.dumps(lab.tasks[1])]))
    assert results(storage)["untrained"] == results(bare["t5"])["untrained"]


def test_a_label_head_has_no_answers_before_training(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^eval\.untrained is set and encoder-only backbone "):
        check(asked(lab, "bert"))
    config = lab.config("llama", eval={"untrained": True}, stream={"objective": "clm"})
    run(config, Storage.at(tmp_path))
    cells = results(Storage.at(tmp_path))["untrained"]["cells"]
    assert all(cell["extra"]["perplexity"] > 1 for cell in cells.values())


def test_the_row_is_in_tables_and_comparisons(bare: dict[str, Storage]) -> None:
    tree = results(bare["t5"])
    for task, value in (("colour", 12.5), ("animal", 25.0), ("mixed", 37.5)):
        tree["untrained"]["cells"][task]["value"] = value
    tree["untrained"] |= {"mean": 18.75, "unseen": {"mean": 37.5, "types": {"weather": 37.5}}}
    lines = [line.split() for line in str(matrix_table(tree)).splitlines()]
    mean = f"{tree['unseen']['mean']:.1f}"
    assert ["untrained", "12.5", "25.0"] in lines
    assert ["untrained", "37.5", "37.5"] in lines and ["never", "trained", mean, mean] in lines
    assert ["by", "type", "weather"] in lines and ["never", "trained", mean] in lines
    seeds = [tree, {**tree, "config": {**tree["config"], "seed": 1}}]
    first, second = compare(seeds)
    assert (first.method, first.runs, second.method, second.runs) == ("untrained", 2, "finetune", 2)
    assert first.numbers["wall_s"] is None and "untrained" in str(comparison_table(compare(seeds)))
    (row, own) = csv.DictReader(io.StringIO(to_csv(seeds)))
    assert (row["ap"], row["unseen"], row["unseen_weather"], row["f_ra"]) == ("18.75", "37.5", "37.5", "")
    assert float(own["unseen_weather"]) == tree["unseen"]["mean"]


def test_trials_share_a_first_task_only_with_the_same_row(lab: Lab) -> None:
    """Its record has the unseen tasks' scores before training."""
    for untrained in (True, False):
        config = asked(lab, eval={"untrained": untrained})
        other = configs.validate(RunConfig, _without_unseen(config))
        assert (prefix_keys(config, list(TASKS)) == prefix_keys(other, list(TASKS))) is not untrained
    assert separate_tree(asked(lab))["eval"]["untrained"] is False


def _without_unseen(config: RunConfig) -> Tree:
    tree = configs.as_tree(config)
    tree["stream"]["unseen"] = None
    return tree


@pytest.mark.parametrize("order", ["superni-1", "superni-unseen"])
def test_superni_has_three_tasks_of_each_type(order: str) -> None:
    types = [KNOWN[name].type for name in require(order).tasks]
    assert sorted(types) == sorted(["dialogue", "extraction", "question answering", "summary", "sentiment"] * 3)
