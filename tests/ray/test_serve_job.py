"""`jobs/serve.py` as it is typed: it says where it listens, and Ctrl-C ends it without another word."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from filelock import FileLock
from tiny import Lab

from raycl.run.assembly import build
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext
from raycl.training.stream_loop import StreamLoop

REPO = Path(__file__).resolve().parents[2]


def bank_of_one(lab: Lab, folder: Path) -> str:
    world = DistributedContext.alone(torch.device("cpu"))
    context, open_engine = build(lab.config("bert", "lora"), world)
    StreamLoop(context, open_engine, Storage.at(folder), world).run(stop_after=1)
    return str(folder / "bank")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(240)
def test_ctrl_c_ends_the_endpoint_quietly(lab: Lab, tmp_path: Path, one_at_a_time: FileLock) -> None:
    bank, port = bank_of_one(lab, tmp_path), free_port()
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, str(REPO / "jobs" / "serve.py"), "--bank", bank, f"port={port}", "cpus=0.2"]
    out, err = (tmp_path / "out").open("w+"), (tmp_path / "err").open("w+")
    with one_at_a_time:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        try:
            until = time.monotonic() + 150
            while "(Ctrl-C ends it)" not in (tmp_path / "err").read_text():
                assert process.poll() is None and time.monotonic() < until, (tmp_path / "err").read_text()
                time.sleep(0.2)
            assert httpx.post(f"http://127.0.0.1:{port}/v1/classify", json={"input": "the sea"}).status_code == 200
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of its foreground
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz")
    assert (tmp_path / "out").read_text() == ""
    said = (tmp_path / "err").read_text().splitlines()
    assert said[-1] == "stopping: answers that have begun are finished", said
