"""Named orders, their aliases, what is known about their tasks, and where these lie on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycl.data.benchmarks import builtin
from raycl.data.benchmarks.knowledge import OLORA_GROUPS, TASKS, canonical, folder_names
from raycl.data.benchmarks.layout import check_name, locate
from raycl.data.benchmarks.orders import ALIASES, ORDERS, find, require
from raycl.errors import ConfigError, DataError, MissingTasksError
from raycl.storage import Storage


def test_every_order_is_of_known_different_tasks() -> None:
    for name, tasks in ORDERS.items():
        assert set(tasks) <= set(TASKS), name
        assert len(set(tasks)) == len(tasks), name


def test_orders_of_one_benchmark_are_permutations_of_each_other() -> None:
    sizes = {"std": 4, "bert": 5, "llama": 3, "long": 15, "superni-1": 15, "idbr": 3, "trace": 8}
    for prefix, size in sizes.items():
        orders = [set(tasks) for name, tasks in ORDERS.items() if name.startswith(prefix)]
        assert all(order == orders[0] and len(order) == size for order in orders), prefix
    assert set(ORDERS["superni-1"]) == set(ORDERS["superni-2"])
    assert not set(ORDERS["superni-1"]) & set(ORDERS["superni-unseen"])


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *[("sapt-1", "superni-1"), ("SAPT-3", "long-A"), ("sapt-4", "long-C"), ("gainlora-3", "long-C")],
        *[("gainlora-4", "long-A"), ("migu-5", "long-B"), ("olora-6", "long-C"), ("slm-7", "bert-7")],
        *[("slm-9", "llama-9"), ("migu-7", "das"), ("olora-2", "std-2"), ("long-a", "long-A")],
        ("trace-1", "trace"),
    ],
)
def test_the_papers_numbers_are_aliases(alias: str, name: str) -> None:
    assert require(alias).name == name


def test_no_alias_is_dangling_or_hides_an_order() -> None:
    assert all(find(alias) is not None for alias in ALIASES)
    assert not set(ALIASES) & {name.lower() for name in ORDERS}


def test_an_unknown_stream_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown stream 'long-D': did you mean 'long-"):
        require("long-D")
    with pytest.raises(ConfigError, match=r"expected one of .* are the nearest"):
        require("???")


def test_last_tasks_confirm_sapts_numbering() -> None:
    assert ORDERS["long-A"][-1] == "yahoo" and ORDERS["long-C"][-1] == "wic" and ORDERS["long-B"][-1] == "yahoo"


def test_names_on_disk_find_their_task() -> None:
    for name in ("ag", "AGNews", "ag_news"):
        assert canonical(name) == "agnews"
    assert canonical("SST-2") == "sst2" and canonical("BoolQA") == "boolq"
    assert canonical("task1572") == "task1572_samsum_summary"
    assert canonical("mine") == "mine"
    assert not set(builtin.TASKS) & set(TASKS)


def test_metrics_follow_the_papers() -> None:
    assert TASKS["mnli"].metric == TASKS["task875_emotion_classification"].metric == "exact_match"
    assert TASKS["task1572_samsum_summary"].metric == "rouge_l"
    assert all(TASKS[name].group in OLORA_GROUPS for name in ORDERS["long-A"])


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("[]")


@pytest.mark.parametrize(
    "layout",
    [
        "agnews",
        "ag",
        "long_sequence/agnews",
        "CL_Benchmark/Long_Sequence/agnews",
        "CL_Benchmark/TC/agnews",
        "TC/AG-News",
    ],
)
def test_tasks_are_found_in_every_layout(tmp_path: Path, layout: str) -> None:
    touch(tmp_path / layout, "train.json", "test.json", "dev.json")
    result = locate(Storage.at(tmp_path), {"agnews": folder_names("agnews")}, ["train", "test"], allow_missing=False)
    assert result["agnews"].folder.uri == str(tmp_path / layout)
    assert set(result["agnews"].files) == {"train", "dev", "test"}


def test_a_group_folder_of_the_same_name_is_not_the_task(tmp_path: Path) -> None:
    touch(tmp_path / "QQP" / "QQP", "train.json", "test.json")
    result = locate(Storage.at(tmp_path), {"qqp": folder_names("qqp")}, ["train", "test"], allow_missing=False)
    assert result["qqp"].folder.uri == str(tmp_path / "QQP" / "QQP")


def test_all_missing_tasks_are_named_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path / "agnews", "train.json", "test.json")
    touch(tmp_path / "yelp", "train.json")
    root, tasks = Storage.at(tmp_path), ["agnews", "yelp", "wic"]
    wanted = {name: folder_names(name) for name in tasks}
    with pytest.raises(
        MissingTasksError, match=r"2 of 3 tasks .*yelp \(no test file\), wic \(no folder\).*allow_missing"
    ):
        locate(root, wanted, ["train", "test"], allow_missing=False)
    assert list(locate(root, wanted, ["train", "test"], allow_missing=True)) == ["agnews"]
    assert "continuing without 2 tasks" in caplog.text
    with pytest.raises(MissingTasksError):
        locate(root, {"wic": folder_names("wic")}, ["train", "test"], allow_missing=True)


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\\b", "..", "x..y"])
def test_names_with_a_path_in_them_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="expected a plain name"):
        check_name(name)


def test_json_is_preferred_where_a_split_comes_in_two_formats(tmp_path: Path) -> None:
    touch(tmp_path / "t", "train.json", "train.csv", "test.csv")
    (tmp_path / "t" / "train.json").write_text(json.dumps([]))
    files = locate(Storage.at(tmp_path), {"t": folder_names("t")}, ["train", "test"], allow_missing=False)["t"].files
    assert (files["train"].name, files["test"].name) == ("train.json", "test.csv")
