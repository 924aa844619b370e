"""Runs and serving on a device that is not the CPU, pretended in a process of its own: the results are the CPU's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from axes import FULL
from device_runs import CASES, SIMILAR
from fork_server import Call, ForkServer

from benchmarks.gpu.suite import PARTS

LIMIT_S = 240.0
"""Several times what all cases take on a busy machine."""
NAMES = [name for name in CASES if FULL or name not in SIMILAR]


@pytest.fixture(scope="module")
def outcomes(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> what was found on the CPU and on the pretended device."""
    folder = tmp_path_factory.mktemp("devices")
    fork_server.run([Call("device_runs:main", (folder, NAMES), folder / "log")], LIMIT_S)
    results: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return results


def test_operations_without_cuda_support_are_refused(outcomes: dict[str, Any]) -> None:
    """Otherwise the tests below could not fail."""
    refused = outcomes["refused"]
    assert refused and all(refused.values()), refused


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_another_device_gives_the_same(outcomes: dict[str, Any], name: str) -> None:
    assert "error" not in outcomes[name], outcomes[name].get("error")
    cpu, device = outcomes[name]["cpu"], outcomes[name]["pretend"]
    assert (cpu["device"], device["device"]) == ("cpu", "pretend:0")
    assert device["drawn"] == [], "what begins at random must begin alike on all devices"
    assert [step for row in device["trace"] for step in row] == pytest.approx(
        [step for row in cpu["trace"] for step in row], rel=CASES[name].tolerance
    )
    same = [key for key in cpu if key not in ("device", "drawn", "trace")]
    assert {key: device[key] for key in same} == {key: cpu[key] for key in same}


def test_the_suite_for_gpus_mixes_no_devices_and_gives_the_results_of_the_cpu(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "figures.tsv"
    fork_server.run([Call("device_suite:main", (file, FULL), tmp_path / "log")], LIMIT_S)
    lines = [line.split("\t") for line in file.read_text().splitlines()]
    assert {name.partition(",")[0] for name, *_ in lines} == {part.name for part in PARTS} - {"streams"}
    assert [line for line in lines if line[1] == "False"] == []
    assert sum(ok == "True" for _, ok, _ in lines) >= 10, "results are held against the CPU's"
