"""Tracking decides its mode before it starts anything, and a resumed run continues the same curves."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from raycl import config
from raycl.errors import ConfigError
from raycl.training.tracking import trackers, wandb_tracker
from raycl.training.tracking.trackers import TrackedRun, Tracker, TrackingConfig, open_trackers

SERVER = "https://api.wandb.ai"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove keys, netrc and settings of the user who runs the tests."""
    for name in (name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def settings(mode: str = "online", key: str | None = None, url: str = SERVER) -> SimpleNamespace:
    return SimpleNamespace(mode=mode, api_key=key, identity_token_file=None, base_url=url)


def test_the_default_logs_nothing(tmp_path: Path) -> None:
    assert open_trackers(TrackingConfig(), "run", {}, tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_one_tracker_several_or_none() -> None:
    def chosen(value: object) -> list[str]:
        return config.validate(TrackingConfig, {"tracker": value}).tracker

    assert chosen("wandb") == ["wandb"] and chosen(["mlflow", "trackio"]) == ["mlflow", "trackio"]
    assert chosen("none") == chosen(None) == chosen([]) == []
    with pytest.raises(ConfigError, match="is 'neptune': input should be 'auto', 'wandb', 'tens"):
        chosen("neptune")


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_a_missing_library_names_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = "wandb" if name == "wandb" else rf"'raycl\[{name}\]'"
    with pytest.raises(ConfigError, match=f"`pip install {line}`"):
        open_trackers(TrackingConfig(tracker=[name]), "run", {}, str(tmp_path))


def test_without_a_key_wandb_is_offline() -> None:
    assert wandb_tracker._wandb_mode(settings()) == "offline"
    assert wandb_tracker._wandb_mode(settings(key="k")) == "online"
    assert wandb_tracker._wandb_mode(settings(mode="disabled")) == "disabled"
    assert wandb_tracker._wandb_mode(settings(mode="offline", key="k")) == "offline"


def test_asking_for_a_connection_without_a_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="WANDB_MODE is 'online' but there is no key"):
        wandb_tracker._wandb_mode(settings())


def test_a_key_in_netrc_counts_for_its_server_only(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password k\n")
    assert wandb_tracker._wandb_mode(settings()) == "offline"
    assert wandb_tracker._wandb_mode(settings(url="https://wandb.example.org")) == "online"


def test_auto_uses_installed_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = TrackingConfig(tracker=["auto"])
    monkeypatch.setattr(trackers, "_installed", lambda package: False)
    assert open_trackers(section, "run", {}, tmp_path) == []
    monkeypatch.setattr(trackers, "_installed", lambda package: package == "tensorboard")
    assert trackers._choose() == "tensorboard"
    monkeypatch.setattr(trackers, "_installed", lambda package: True)
    monkeypatch.setattr(wandb_tracker, "connects", lambda: True)
    assert trackers._choose() == "wandb"


def test_a_run_on_remote_storage_needs_a_local_folder() -> None:
    with pytest.raises(ConfigError, match=r"set tracking\.directory"):
        open_trackers(TrackingConfig(tracker=["tensorboard"]), "run", {}, "s3://bucket/run")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to '.*/file/x': Not a directory; .*set tracking\.directory"):
        opened(tmp_path, "tensorboard", directory=str(tmp_path / "file/x"))


def test_the_same_folder_is_the_same_run_and_a_namesake_elsewhere_is_not() -> None:
    a, b = (TrackedRun("long-C", {}, None, None, None, folder) for folder in ("/ann/runs/long-C", "/bob/runs/long-C"))
    assert a.id_in("raycl") == replace(a).id_in("raycl") != b.id_in("raycl")
    assert a.id_in("raycl") != a.id_in("other") and a.own_name != b.own_name


def opened(folder: Path, *names: str, **settings: str) -> list[Tracker]:
    """Return a run's trackers."""
    config = TrackingConfig(tracker=list(names), **settings)
    return open_trackers(config, "run", {"method": {"name": "sapt"}}, str(folder))


def log_everything(trackers: list[Tracker], folder: Path) -> None:
    """Log what a run of one task logs."""
    picture = folder / "matrix.png"
    Image.new("RGB", (8, 4), "red").save(picture)
    for tracker in trackers:
        for step in (1, 2, 3):
            tracker.log("step", step, {"train/loss": 1.0 / step, "train/learning_rate": 0.1})
        tracker.log("task", 1, {"eval/news/exact_match": 90.0, "cl/F.Ra": 2.5})
        tracker.table(1, "matrix", ["after", "news|old", "film"], [["news|old", 90.125, None]])
        tracker.picture(1, "matrix_picture", picture)
        tracker.close()


class Failing:
    """A tracker whose server is away: each call first waits for it."""

    def __init__(self) -> None:
        self.now_s, self.calls = 0.0, list[str]()

    def _fail(self, call: str, error: Exception) -> None:
        self.calls.append(call)
        self.now_s += 10.0
        raise error

    def log(self, axis: str, at: int, metrics: dict[str, float]) -> None:
        self._fail(f"{axis} {at}", OSError("no\nanswer"))

    def table(self, *what: object) -> None:
        self._fail("table", OSError("no answer"))

    def picture(self, *what: object) -> None:
        self._fail("picture", ZeroDivisionError())

    def close(self, failed: bool = False) -> None:
        self._fail("close", OSError("no answer"))


def test_an_error_of_a_tracker_is_a_warning_and_costs_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    monkeypatch.setattr(trackers.time, "monotonic", lambda: failing.now_s)
    tracker = trackers.CheckedTracker("mlflow", failing, (OSError,))
    for step in range(200):
        tracker.log("step", step, {"train/loss": 1.0})
        failing.now_s += 1.0
    assert failing.calls == ["step 0", "step 90", "step 180"]
    tracker.log("task", 1, {"cl/AP": 90.0})
    tracker.table(1, "matrix", [], [])
    tracker.close()
    assert failing.calls[3:] == ["task 1", "close"]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("tracker mlflow failed: OSError: no answer; training continues")
    with pytest.raises(ZeroDivisionError):  # a mistake, not an error of its library
        failing.now_s += 1000.0
        tracker.picture(1, "matrix_picture", Path())


def test_trackers_are_closed_when_another_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    first = SimpleNamespace(close=lambda failed: closed.append(failed))

    def start(name: str, run: TrackedRun) -> object:
        if name == "wandb":
            return first
        raise KeyboardInterrupt

    monkeypatch.setattr(trackers, "_open", start)
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path, "wandb", "mlflow")
    assert closed == [True]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    log_everything(opened(tmp_path, "tensorboard"), tmp_path)
    steps, tasks = events(tmp_path, "step"), events(tmp_path, "task")
    assert [(event.step, round(event.value, 2)) for event in steps.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.33),
    ]
    assert [(event.step, event.value) for event in tasks.Scalars("cl/F.Ra")] == [(1, 2.5)]
    assert tasks.Scalars("eval/news/exact_match")[0].value == 90.0
    assert text(tasks, "matrix/text_summary").splitlines() == [
        *("| after | news\\|old | film |", "|---|---|---|", "| news\\|old | 90.1 |  |")
    ]
    assert "name: sapt" in text(steps, "config/text_summary")
    (picture,) = tasks.Images("matrix_picture")
    assert (picture.step, picture.width, picture.height) == (1, 8, 4)


def test_tensorboard_curves_go_on_after_a_resume(tmp_path: Path) -> None:
    """Steps that are logged again replace earlier ones, and do not hide what is logged over tasks."""
    for attempt, steps in ((0.0, (1, 2, 3)), (10.0, (3, 4))):
        (tracker,) = opened(tmp_path, "tensorboard")
        for step in steps:
            tracker.log("step", step, {"train/loss": attempt + step})
        tracker.log("task", steps[-1], {"cl/AP": attempt})
        tracker.close()
    points = [(event.step, event.value) for event in events(tmp_path, "step").Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]
    assert [(event.step, event.value) for event in events(tmp_path, "task").Scalars("cl/AP")] == [(3, 0.0), (4, 10.0)]


def test_runs_that_share_a_folder_of_tensorboard_do_not_hide_each_other(tmp_path: Path) -> None:
    for folder in ("ann", "bob"):
        (tracker,) = opened(tmp_path / folder, "tensorboard", directory=str(tmp_path / "tensorboard"))
        tracker.log("step", 1, {"train/loss": 1.0})
        tracker.close()
    found = sorted(file.parent.relative_to(tmp_path / "tensorboard") for file in tmp_path.rglob("*tfevents*"))
    assert len(found) == 2 and all(str(name).startswith("run-") and name.name == "step" for name in found)
    assert [len(events(tmp_path, str(name)).Scalars("train/loss")) for name in found] == [1, 1]


def events(folder: Path, axis: str) -> EventAccumulator:
    """Return TensorBoard's own reading of its files."""
    found = EventAccumulator(str(folder / "tensorboard" / axis))
    found.Reload()
    return found


def text(found: EventAccumulator, tag: str) -> str:
    """Return a text of TensorBoard's."""
    (event,) = found.Tensors(tag)
    return event.tensor_proto.string_val[0].decode()


def test_mlflow_reads_back_what_was_logged_and_continues_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "papers")
    run_folder = tmp_path / "run"
    log_everything(opened(run_folder, "mlflow", group="g"), tmp_path)
    settings = {"method": {"name": "sapt"}, "stream": {"metric_by_task": {"mails (new)": "f1"}}}
    (again,) = open_trackers(TrackingConfig(tracker=["mlflow"]), "run", settings, str(run_folder))
    again.log("step", 4, {"train/loss": 0.25})
    again.log("task", 1, {"eval/mails (new)/f1": 50.0, "eval/größe/../f1": 60.0})
    again.table(1, "matrix", ["after", "news|old", "film"], [["news|old", 90.125, None]])
    again.close(failed=True)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("papers").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FAILED" and run.data.tags["raycl.group"] == "g"
    assert run.data.params == {"method.name": "sapt", "stream.metric_by_task.mails _28_new_29_": "f1"}
    assert (run.data.metrics["eval/mails _28_new_29_/f1"], run.data.metrics["eval/größe/f1"]) == (50.0, 60.0)
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, round(point.value, 2)) for point in losses] == [(1, 1.0), (2, 0.5), (3, 0.33), (4, 0.25)]
    assert client.get_metric_history(run.info.run_id, "cl/F.Ra")[0].step == 1
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "matrix-001.json")).read_text())
    assert table == {"columns": ["after", "news|old", "film"], "data": [["news|old", 90.125, None]]}
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config.yaml", "matrix.png", "matrix-001.json"}
    client.delete_experiment(run.info.experiment_id)
    with pytest.raises(
        ConfigError, match=r"in experiment 'papers' at .*is deleted: .*set tracking\.project to another one"
    ):
        opened(run_folder, "mlflow")


def test_a_store_of_mlflow_that_does_not_open_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(ConfigError, match=r"'mlflow' cannot start at 'nowhere://x'.*MLFLOW_TRACKING_URI"):
        opened(tmp_path, "mlflow")


def test_trackio_reads_back_what_was_logged_and_continues_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    log_everything(opened(tmp_path, "trackio", group="g", directory=str(store)), tmp_path)
    import trackio

    (again,) = opened(tmp_path, "trackio", directory=str(store))
    assert trackio.context_vars.current_run.get() is None  # `trackio.log` of the user does not write to the run
    again.log("step", 4, {"train/loss": 0.25})
    again.close()
    for elsewhere in ({}, {"directory": str(tmp_path / "other")}):
        with pytest.raises(ConfigError, match=rf"since it writes to '{store}' in this process already"):
            opened(tmp_path, "trackio", **elsewhere)
    assert "TRACKIO_DIR" not in os.environ
    assert capsys.readouterr().out == ""
    with closing(sqlite3.connect(store / "raycl.db")) as database:
        rows = [
            (name, step, json.loads(text))
            for name, step, text in database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        ]
        ((settings,),) = database.execute("SELECT config FROM configs")
    assert {name for name, _, _ in rows} == {TrackedRun("run", {}, None, None, None, str(tmp_path)).own_name}
    losses = [(step, round(row["train/loss"], 2)) for _, step, row in rows if "train/loss" in row]
    assert losses == [(1, 1.0), (2, 0.5), (3, 0.33), (4, 0.25)]
    assert [step for _, step, row in rows if row.get("cl/F.Ra") == 2.5] == [1]
    assert json.loads(settings)["method"] == {"name": "sapt"}
    (table,) = (row["matrix"] for _, _, row in rows if "matrix" in row)
    assert "news|old" in json.dumps(table)
    assert len(list((store / "media").rglob("*.png"))) == 1


def test_wandb_reads_back_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several trackers work at once; a setting wins over wandb's environment, which wins over what raycl would take."""
    names = {"PROJECT": "papers", "ENTITY": "lab", "RUN_GROUP": "theirs", "NAME": "mine", "TAGS": "a,b", "NOTES": "n"}
    for name, value in names.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    wandb.teardown()  # it reads the environment once in a process
    caplog.set_level("INFO", logger="raycl")
    log_everything(opened(tmp_path, "wandb", "tensorboard", group="written"), tmp_path)
    assert events(tmp_path, "step").Scalars("train/loss")
    (run_file,) = (tmp_path / "elsewhere").rglob("*.wandb")
    said = [record.getMessage() for record in caplog.records if record.name == "raycl"]
    assert len(said) == 2 and "no key" in said[0] and "wandb login" in said[0]
    assert said[1].endswith(f"wandb sync {run_file.parent}")
    records = read_wandb(run_file)
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.project, run.entity, run.run_group, run.display_name) == ("papers", "lab", "written", "mine")
    assert list(run.tags) == ["a", "b"] and run.notes == "n"
    assert run.run_id == TrackedRun("run", {}, None, None, None, str(tmp_path)).id_in("papers")
    assert {item.key: item.value_json for item in run.config.update}["method"] == '{"name":"sapt"}'
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.metric.glob_name}
    assert axes == {"train/*": "step", "eval/*": "task", "cl/*": "task"}
    logged = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["train/loss"]) for row in logged[:3]] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert (logged[3]["task"], logged[3]["cl/F.Ra"], logged[3]["eval/news/exact_match"]) == (1, 2.5, 90.0)
    files = {file.suffix for file in (run_file.parent / "files/media").rglob("*") if file.is_file()}
    assert files == {".json", ".png"}


def test_wandb_has_a_run_of_its_own_below_the_run_in_the_project_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "papers")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    (tmp_path / "notebook").mkdir()
    with wandb.init(project="notebooks", dir=str(tmp_path / "notebook")) as notebook:  # an open run of the user's own
        (tracker,) = opened(tmp_path, "wandb", project="mine")
        tracker.log("step", 5, {"train/loss": 1.0})
        tracker.log("step", 3, {"train/loss": 2.0})  # after a resume steps may go back
        tracker.close()
        notebook.log({"x": 1})
    (run_file,) = (tmp_path / "wandb").rglob("*.wandb")
    records = read_wandb(run_file)
    assert [record.run.project for record in records if record.HasField("run")] == ["mine"]
    assert sum(record.HasField("history") for record in records) == 2
    assert TrackedRun("run", {}, None, None, None, str(tmp_path)).id_in("mine") in run_file.name


def read_wandb(file: Path) -> list[wandb_internal_pb2.Record]:
    """Return the records of an offline run; wandb's own process ends the file, perhaps a moment after `close`."""
    deadline = time.monotonic() + 30
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in leveldb_log(file.read_bytes())]
        if any(record.HasField("exit") for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.05)


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file as wandb writes it: LevelDB's log format behind seven bytes of its own."""
    at, record, block, header = 7, b"", 2**15, 7
    while at + header <= len(data):
        if block - at % block < header:  # the rest of a block is empty
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""
