"""Tracking decides its mode before it starts anything, and a resumed run continues the same curves."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from raycl import config
from raycl.errors import ConfigError
from raycl.training.records import tracking
from raycl.training.records.tracking import TrackingConfig, open_tracker, wandb_run_id

SERVER = "https://api.wandb.ai"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no netrc, no settings of whoever runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def settings(mode: str = "online", key: str | None = None, url: str = SERVER) -> SimpleNamespace:
    return SimpleNamespace(mode=mode, api_key=key, identity_token_file=None, base_url=url)


def test_the_default_logs_nothing(tmp_path: Path) -> None:
    assert open_tracker(TrackingConfig(), "run", {}, tmp_path) is None and list(tmp_path.iterdir()) == []


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match="backend"):
        config.validate(TrackingConfig, {"backend": "mlflow"})


@pytest.mark.parametrize(("backend", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboard")])
def test_a_missing_library_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    section = config.validate(TrackingConfig, {"backend": backend})
    with pytest.raises(ConfigError, match=rf"pip install 'raycl\[{package}\]'"):
        open_tracker(section, "run", {}, tmp_path)


def test_without_a_key_wandb_is_offline() -> None:
    assert tracking._wandb_mode(settings()) == "offline"
    assert tracking._wandb_mode(settings(key="k")) == "online"
    assert tracking._wandb_mode(settings(mode="disabled")) == "disabled"
    assert tracking._wandb_mode(settings(mode="offline", key="k")) == "offline"


def test_asking_for_a_connection_without_a_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="WANDB_MODE is 'online' but there is no key"):
        tracking._wandb_mode(settings())


def test_a_key_in_netrc_counts_for_its_server_only(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password k\n")
    assert tracking._wandb_mode(settings()) == "offline"
    assert tracking._wandb_mode(settings(url="https://wandb.example.org")) == "online"


def test_auto_uses_installed_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = TrackingConfig(backend="auto")
    monkeypatch.setattr(tracking, "_installed", lambda package: False)
    assert open_tracker(section, "run", {}, tmp_path) is None
    monkeypatch.setattr(tracking, "_installed", lambda package: package == "tensorboard")
    assert tracking._choose() == "tensorboard"
    monkeypatch.setattr(tracking, "_installed", lambda package: True)
    monkeypatch.setattr(
        tracking, "_import_wandb", lambda: SimpleNamespace(setup=lambda: SimpleNamespace(settings=settings(key="k")))
    )
    assert tracking._choose() == "wandb"


def test_a_run_on_remote_storage_needs_a_local_folder() -> None:
    with pytest.raises(ConfigError, match=r"set tracking\.directory"):
        open_tracker(TrackingConfig(backend="tensorboard"), "run", {}, "s3://bucket/run")


def test_the_same_name_is_the_same_wandb_run() -> None:
    assert wandb_run_id("raycl", "a") == wandb_run_id("raycl", "a") != wandb_run_id("raycl", "b")


def test_tensorboard_curves_go_on_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = TrackingConfig(backend="tensorboard")
    for attempt, steps in ((0.0, (1, 2, 3)), (10.0, (3, 4))):  # the second attempt logs step 3 again
        tracker = open_tracker(section, "run", {"seed": 0}, tmp_path)
        for step in steps:
            tracker.log(step, {"loss": attempt + step})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]


def test_tensorboard_shows_the_matrix(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_tracker(TrackingConfig(backend="tensorboard"), "run", {}, tmp_path)
    tracker.table(4, "matrix", ["after", "news|old", "film"], [["news|old", 90.125, None], ["film", 12.0, 80.0]])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("matrix/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 4
    assert lines == [
        *("| after | news\\|old | film |", "|---|---|---|", "| news\\|old | 90.1 |  |", "| film | 12.0 | 80.0 |")
    ]


def test_wandb_writes_an_offline_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = open_tracker(TrackingConfig(backend="wandb", group="g"), "run", {"method": {"name": "sapt"}}, tmp_path)
    caplog.set_level("INFO", logger="raycl")
    tracker.table(5, "matrix", ["after", "news"], [["news", 90.0]])
    tracker.log(5, {"loss": 1.0})
    tracker.log(3, {"loss": 2.0})  # after a resume steps may go back
    tracker.close()
    (run_file,) = (tmp_path / "wandb").rglob("*.wandb")
    assert wandb_run_id("raycl", "run") in run_file.name
    assert run_file.parent.name.startswith("offline-run")
    assert list((run_file.parent / "files").rglob("*.table.json"))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "no key" in said[0] and "wandb login" in said[0]
    assert said[1].endswith(f"wandb sync {run_file.parent}")
    deadline = time.monotonic() + 30  # wandb's own process writes the file, perhaps a moment after `close`
    while b"loss" not in run_file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"loss" in run_file.read_bytes()
