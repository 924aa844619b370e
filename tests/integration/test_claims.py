"""A folder is one run's: of two configs that start in it at once one continues, the other is refused in a sentence."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from tiny import Lab, work

from raycl import config as configs
from raycl.errors import ResumeError, StorageError
from raycl.launch import prepared_run
from raycl.launch.follow import follow
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.setup.run_config import RunConfig, fingerprint

REFUSED = r"'.*race' is a run with other settings, claimed on .*: train\.learning_rate is 0\.01 there, 0\.5 here; "


def two(lab: Lab, folder: Path) -> tuple[RunConfig, RunConfig]:
    """Return two configs of one name and one task that would not learn the same."""
    sections = {"output": {"dir": str(folder), "name": "race"}, "stream": {"tasks": lab.tasks[:1]}}
    first, second = (lab.config("bert", train={"learning_rate": rate}, **sections) for rate in (0.01, 0.5))
    return first, second


def test_the_second_of_two_that_start_in_one_folder_is_refused(lab: Lab, tmp_path: Path) -> None:
    """Both are prepared before either claims; whichever claims first owns folder, config and results."""
    mine, other = two(lab, tmp_path)
    for name, (first, second) in {"in-order": (0, 1), "crossed": (1, 0)}.items():
        folder = tmp_path / name
        both = [
            prepared_run.prepare(
                item.model_copy(update={"output": item.output.model_copy(update={"dir": str(folder)})})
            )
            for item in (mine, other)
        ]
        work(both[first])
        written = Storage.at(folder / "race").read("results.json")
        with pytest.raises(ResumeError, match="is a run with other settings, claimed on "):
            work(both[second])
        with pytest.raises(ResumeError, match="is a run with other settings"):
            prepared_run.finish(both[second])
        storage = Storage.at(folder / "race")
        assert storage.read("results.json") == written
        assert len(read_state(storage).attempts) == 1
        kept = configs.validate(RunConfig, yaml.safe_load(storage.read("config.yaml")))
        assert fingerprint(kept) == fingerprint(both[first].config) == storage.read_json("results.json")["fingerprint"]


def test_the_error_names_the_settings_that_differ(lab: Lab, tmp_path: Path) -> None:
    first, second = (prepared_run.prepare(item) for item in two(lab, tmp_path))
    work(first)
    with pytest.raises(ResumeError, match=REFUSED + r"choose another output\.name$"):
        work(second)


def test_the_config_is_read_from_the_claim(lab: Lab, tmp_path: Path) -> None:
    """A driver that was slow may write its config after the other's claim; a hand may change it."""
    mine, other = two(lab, tmp_path)
    work(prepared_run.prepare(mine))
    storage = Storage.at(tmp_path / "race")
    storage.write("config.yaml", configs.to_yaml(other).encode())
    assert prepared_run.reopen(storage.uri).config.train.learning_rate == 0.01
    with pytest.raises(ResumeError, match=r"learning_rate was 0\.01, now 0\.5"):
        prepared_run.reopen(storage.uri, other)


def test_two_that_add_different_tasks_at_once(lab: Lab, tmp_path: Path) -> None:
    whole = lab.config("bert", output={"dir": str(tmp_path), "name": "grown"})
    tree = configs.as_tree(whole)
    tree["stream"]["tasks"] = lab.tasks[:1]
    work(prepared_run.prepare(configs.validate(RunConfig, tree)))
    folder = str(tmp_path / "grown")
    later = {"name": "later", "path": lab.tasks[1]["path"]}
    texts = [yaml.safe_dump(task, default_flow_style=True, width=1000).strip() for task in (lab.tasks[1], later)]
    first, two = (prepared_run.extend(folder, [text]) for text in texts)
    work(first)
    with pytest.raises(ResumeError, match="is a run with other settings"):
        work(two)
    results = Storage.at(folder).read_json("results.json")
    assert results["stream"]["tasks"] == [task["name"] for task in lab.tasks] and results["finished"]
    assert [task.name for task in prepared_run.reopen(folder).stream.tasks] == results["stream"]["tasks"]


def test_a_run_that_never_started_is_replaced(lab: Lab, tmp_path: Path) -> None:
    mine, other = two(lab, tmp_path)
    prepared_run.prepare(mine)
    work(prepared_run.prepare(other))
    assert prepared_run.reopen(str(tmp_path / "race")).config.train.learning_rate == 0.5


def test_unnamed_runs_that_start_at_once_get_folders_of_their_own(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("bert", output={"dir": str(tmp_path)})
    with ThreadPoolExecutor(4) as pool:
        names = [prepared.name for prepared in pool.map(prepared_run.prepare, [config] * 4)]
    assert len(set(names)) == 4


def test_a_config_that_is_not_utf8_is_an_error(lab: Lab, tmp_path: Path) -> None:
    prepared = prepared_run.prepare(two(lab, tmp_path)[0])
    prepared.storage.write("config.yaml", b"seed: \xff\n")
    with pytest.raises(StorageError, match=r"race/config\.yaml' is not valid UTF-8"):
        prepared_run.reopen(prepared.storage.uri)
    work(prepared)
    assert prepared_run.reopen(prepared.storage.uri).config.seed == 42


def test_the_log_is_followed_through_a_storage_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    caplog.set_level(logging.INFO, logger="raycl")
    storage, failed = Storage.at(tmp_path), threading.Event()
    listing = Storage.list

    def fails_once(self: Storage, name: str = "") -> list[str]:
        if threading.current_thread().name == "follow" and not failed.is_set():
            failed.set()
            raise StorageError("away")
        return listing(self, name)

    monkeypatch.setattr(Storage, "list", fails_once)
    with follow(storage, every_s=0.02):
        assert failed.wait(10)
        storage.write("log/attempt-0001.txt", b"one line\n")
        end = time.monotonic() + 10
        while "one line" not in caplog.messages and time.monotonic() < end:
            time.sleep(0.01)
        assert "one line" in caplog.messages


def test_a_requeued_job_resumes_an_unnamed_run(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCL_RUN_NAME", "slurm-4711")
    config = lab.config("bert", output={"dir": str(tmp_path), "exists": "resume"})
    work(prepared_run.prepare(config))
    again = prepared_run.prepare(config)
    assert (again.name, again.done) == ("slurm-4711", len(lab.tasks))
    assert prepared_run.prepare(two(lab, tmp_path)[0]).name == "race", "output.name comes first"
