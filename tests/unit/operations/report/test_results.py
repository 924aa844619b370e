"""Finding and reading result files, and refusing what is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycl.errors import RunError, StorageError
from raycl.metrics.run_results import find_results, method_of, read_results, short_names, title_of
from raycl.storage.records import hashed

Make = Callable[..., dict[str, Any]]


def put(folder: Path, tree: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(hashed(tree) if isinstance(tree, dict) else tree))
    return folder


def test_a_run_is_read_by_folder_or_by_file(tmp_path: Path, make_result: Make) -> None:
    folder = put(tmp_path / "run", make_result())
    assert read_results(folder) == read_results(folder / "results.json") == make_result()


def test_results_that_were_changed_are_not_believed(tmp_path: Path, make_result: Make) -> None:
    file = put(tmp_path / "run", make_result()) / "results.json"
    whole = file.read_text()
    for result, problem in (
        (whole.replace("81.667", "91.667"), "was changed after it was written"),
        (json.dumps({name: value for name, value in json.loads(whole).items() if name != "sha256"}), "has no hash"),
        (json.dumps({**json.loads(whole), "more": 1}), "was changed after it was written"),
    ):
        file.write_text(result)
        with pytest.raises(RunError, match=rf"results\.json' {problem}.*`raycl train --resume .*/run` write it again"):
            read_results(file)
    file.write_text('{"config": ' + "[" * 100_000)
    with pytest.raises(StorageError, match="is not valid JSON"):
        read_results(file)


def test_runs_are_found_below_a_root_but_not_inside_runs(tmp_path: Path, make_result: Make) -> None:
    put(tmp_path / "b", make_result("lora"))
    put(tmp_path / "a" / "deep", make_result("sapt"))
    put(tmp_path / "b" / "singles" / "agnews", make_result("single"))
    (tmp_path / "notes.txt").write_text("not a folder")
    (tmp_path / "a" / "latest").symlink_to("deep")
    (tmp_path / "b2").symlink_to(tmp_path)
    assert [method_of(result) for result in find_results(tmp_path)] == ["sapt", "lora"]
    assert len(find_results(tmp_path / "b")) == len(find_results(tmp_path / "b" / "results.json")) == 1


def test_no_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no results\.json at or below"):
        find_results(tmp_path)
    with pytest.raises(RunError, match=r"no results\.json at or below"):
        find_results(tmp_path / "absent")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StorageError, match=r"cannot list '.*/notes\.txt': it is a file, give the folder that holds it"):
        find_results(tmp_path / "notes.txt")
    with pytest.raises(RunError, match=r"there is no results\.json in"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix": None}, "the keys matrix are missing"),
        ({"phases": ["agnews"]}, "one row per phase"),
        ({"stream": {}}, "its stream has no tasks"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, make_result: Make, change: dict[str, Any], message: str) -> None:
    tree = {key: value for key, value in (make_result() | change).items() if value is not None or key == "singles"}
    with pytest.raises(RunError, match=f"is not the result of a run: .*{message}"):
        read_results(put(tmp_path / "run", tree))


def test_json_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="it holds a list"):
        read_results(put(tmp_path / "list", []))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StorageError, match="not valid JSON"):
        read_results(tmp_path / "broken.json")


def test_titles_name_modifiers_and_seed(make_result: Make) -> None:
    result = make_result()
    result["config"]["modifiers"] = {"migu": {"threshold": 0.7}, "unused": None}
    assert title_of(result) == "sapt+migu on long-a, mini-t5, seed 0"


def test_short_names_stay_different() -> None:
    assert short_names(["slm (train.learning_rate=0.01)"], 20) == ["slm (train.learning…"]
    assert short_names(["task748_glucose_reverse", "agnews"], 8) == ["task748", "agnews"]
    assert short_names(["averylongname1", "averylongname2"], 8) == ["1:aver…", "2:aver…"]
    assert short_names(["qa_first_of_two_tasks", "qa_second_of_two_tasks"], 8) == ["1:qa", "2:qa"]


def test_reports_never_load_torch() -> None:
    parts = ", ".join(
        f"raycl.operations.report.{part}" for part in ("run_comparison", "plots", "router_plots", "tables")
    )
    code = f"import sys, {parts}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
