"""Names of runs, sweeps and tasks: any script, and nothing that could lead elsewhere or cannot be a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs

from raycl.config.names import LONGEST, problem_of
from raycl.data.benchmarks.layout import check_name
from raycl.errors import ConfigError, DataError
from raycl.operations.sweep.comparison import ComparisonConfig
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.storage import Storage
from raycl.training.setup import run_config
from raycl.training.setup.run_config import load_config

GOOD = ("my run ü", "größe", "任务 1", "задача", "وظيفة", "a.b-c_d+e (1)", "ü" * (LONGEST // 2), "50%?#")
BAD = (
    "",
    " ",
    "a ",
    ".",
    "..",
    ".a",
    "a..b",
    "a/b",
    "a\\b",
    "a\nb",
    "a\0b",
    "a\u2028b",
    "a\udc80b",
    "a" * (LONGEST + 1),
)


@pytest.mark.parametrize("name", GOOD)
def test_a_plain_name_of_any_script_is_a_folder(name: str, tmp_path: Path) -> None:
    assert not problem_of(name)
    check_name(name)
    assert load_config(None, [f"output.name='{name}'"]).output.name == name
    (tmp_path / name).mkdir()


@pytest.mark.parametrize("name", BAD)
def test_other_names_are_refused_before_anything_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(name)
    with pytest.raises(DataError, match="cannot be used, it"):
        check_name(name)
    for model, rest in ((SweepConfig, {"space": {"seed": {"grid": [1]}}}), (ComparisonConfig, {"runs": {"a": {}}})):
        with pytest.raises(ValueError, match="cannot name a folder, it"):
            model.model_validate({"name": name, **rest})
    with pytest.raises(ConfigError, match="cannot name a folder, it"):
        run_config.from_tree({"output": {"name": name}})
    if name and "\0" not in name:
        monkeypatch.setenv("RAYCL_RUN_NAME", name)
        with pytest.raises(ConfigError, match="RAYCL_RUN_NAME gives the run the name"):
            run_config.name_of(load_config(None, []))


def test_signs_between_names_are_in_none() -> None:
    for name in ("a@1", "a=b", "a,b"):
        with pytest.raises(DataError, match=f"has '{name[1]}' in it"):
            check_name(name)


def test_a_stream_gives_its_run_no_folder_elsewhere() -> None:
    config = load_config(None, ["stream.name=../../x", "stream.tasks=[topic]"])
    with pytest.raises(ConfigError, match=r"stream\.name gives the run the name"):
        next(run_config.free_names(config))


@pytest.mark.parametrize("name", GOOD)
def test_an_address_is_opened_again_whatever_the_names_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow takes URIs of ASCII alone, without white space."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "x")
    for root in ("s3://bucket/runs?scheme=http&endpoint_override=127.0.0.1:9", "/runs"):
        folder = Storage.at(root).sub(name)
        assert folder.path().endswith(f"runs/{name}") and Storage.at(folder.address).path("a") == folder.path("a")
    typed = Storage.at("s3://bucket/my run ü?scheme=http&endpoint_override=127.0.0.1:9")
    assert typed.path() == "bucket/my run ü" and isinstance(typed.filesystem, fs.S3FileSystem)
