"""Several Rays on one machine: an endpoint and a run side by side, each with its own. Who waits says so."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import yaml
from listener import free_port
from ray import serve
from tiny import Lab, run

from raycl import config as configs
from raycl.cli import main
from raycl.errors import LaunchError
from raycl.launch import cluster
from raycl.launch.http.connections import HEAD_S
from raycl.launch.local import in_process_worker
from raycl.serve.deployment import application
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage

REPO = Path(__file__).resolve().parents[2]
HOLD = """
import ray, time
ray.init(log_to_driver=False)
ray.get(ray.util.placement_group([{"CPU": 2}]).ready())
print("held", flush=True)
time.sleep(300)
"""

STARTED = "RAYCL_STARTED"
"""Variable of what a process and all that it starts belong to."""


class Started(subprocess.Popen[str]):
    """A process.

    Attributes:
        out, said: files of its standard output and its standard error. started: value of `STARTED` in it.
    """

    out: Path
    said: Path
    started: str


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python ARGUMENTS` in a folder of its own; its output goes to files there. Ends what still runs."""
    started: list[Started] = []

    def begin(*arguments: str, **environment: str) -> Started:
        own = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | environment
        own[STARTED] = str(tmp_path / str(len(started)))
        said, out = ((tmp_path / f"{name}{len(started)}.txt").open("w") for name in ("said", "out"))
        command = [sys.executable, *arguments]
        process = Started(command, cwd=tmp_path, env=own, stdout=out, stderr=said, text=True, start_new_session=True)
        process.out = Path(out.name)
        process.said = Path(said.name)
        process.started = own[STARTED]
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def asked(port: int) -> int:
    """Return the status of a text's answer; 0: no process listens."""
    body = json.dumps({"input": "fire is warm"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/classify", body, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def heads(process: Started) -> dict[int, set[str]]:
    """Ports on which heads of Ray that a process has started listen -> the addresses that they are bound to."""
    collected: dict[int, set[str]] = {}
    for item in psutil.process_iter():
        try:
            if item.name() == "gcs_server" and item.environ().get(STARTED) == process.started:
                for connection in item.net_connections():
                    if connection.status == psutil.CONN_LISTEN:
                        collected.setdefault(connection.laddr.port, set()).add(connection.laddr.ip)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return collected


@pytest.mark.timeout(900)
def test_an_endpoint_and_a_run_side_by_side(lab: Lab, start: Start, tmp_path: Path) -> None:
    """Neither names a Ray, so neither joins the other's, waits for its CPUs or ends with it.

    Connections to the endpoint's proxy that send nothing, or header fields without end, are closed meanwhile.
    """
    with in_process_worker():
        run(lab.config("bert", "inclora"), Storage.at(tmp_path / "served"))
    tree = lab.tree("bert", "inclora", train={"epochs": 2}, output={"dir": str(tmp_path / "runs"), "name": "mine"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    port = free_port()
    arguments = [str(tmp_path / "served/bank"), f"port={port}", "ingress=proxy"]
    endpoint = start(str(REPO / "jobs/serve.py"), *arguments)
    end = time.monotonic() + 180
    while asked(port) != 200:
        assert endpoint.poll() is None and time.monotonic() < end, endpoint.said.read_text()
        time.sleep(0.5)
    silent, opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)], time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as large:
        large.sendall(b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 5_000)
        assert b" 431 " in large.recv(1000), "the proxy reads a head without limit"
    training = start(str(REPO / "jobs/train_stream.py"), "--config", "run.yaml")
    statuses, ports = [], {process.pid: dict[int, set[str]]() for process in (endpoint, training)}
    end = time.monotonic() + 300
    while training.poll() is None:
        assert time.monotonic() < end
        statuses.append(asked(port))
        for process in (endpoint, training):
            if process.poll() is None:
                ports[process.pid] |= heads(process)
        time.sleep(0.5)
    said = training.said.read_text()
    assert training.returncode == 0, said
    assert re.search(r"^Ray started here in \d+ s$", said, re.MULTILINE) and "waiting for" not in said, said
    assert "active Ray instances" not in said
    assert set(statuses) == {200} and asked(port) == 200
    for connection in silent:
        with connection:
            connection.settimeout(max(0.1, opened + HEAD_S + 10 - time.monotonic()))
            assert connection.recv(1) == b"", "the proxy keeps connections that send nothing"
    numbers = [number for result in ports.values() for number in result]
    assert len(numbers) == len(set(numbers)) == 2 and set(numbers) <= set(cluster.PORTS)
    bound = {
        address.removeprefix("::ffff:") for result in ports.values() for item in result.values() for address in item
    }
    assert bound == {"127.0.0.1"}
    assert Storage.at(tmp_path / "runs/mine").read_json("results.json")["finished"]
    os.killpg(endpoint.pid, signal.SIGINT)  # Ctrl-C, as a terminal sends it: to all of its foreground
    assert endpoint.wait(60) == 0 and asked(port) == 0
    said = endpoint.said.read_text()
    assert "(Ctrl-C ends it)" in said and said.splitlines()[-1] == "stopping: answers that have begun are finished"
    assert endpoint.out.read_text() == ""


def test_waiting_for_resources_is_logged(
    ray_cluster: dict[str, str], start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another command holds both CPUs of the cluster."""
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    caplog.set_level(logging.INFO, logger="raycl")
    holder = start("-c", HOLD, RAY_ADDRESS=ray_cluster["address"])
    end = time.monotonic() + 60
    while "held" not in holder.out.read_text():
        assert holder.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    with cluster.log_while_pending(cluster.is_pending, {"CPU": 1.0}, "launch.workers", every_s=0.3):
        time.sleep(1)
        assert not caplog.messages, "nothing was asked yet"
        mine = ray.util.placement_group([{"CPU": 1}])
        end = time.monotonic() + 30
        while len(caplog.messages) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        said = caplog.messages
        assert len(said) >= 2 and len(set(said)) == 1
        assert re.fullmatch(
            r"waiting for 1 CPUs: the cluster has 0 of 2 CPUs free; wait for or stop '.*' "
            rf"\(process {holder.pid} on [\d.]+\), or lower launch\.workers",
            said[0],
        ), said[0]
        holder.kill()
        holder.wait()
        ray.get(mine.ready(), timeout=60)
        assert not cluster.is_pending() and not cluster.fits({"CPU": 2.0}) and cluster.fits({"CPU": 1.0})
        time.sleep(0.5)  # a look that had begun before may still log
        logged = len(caplog.messages)
        time.sleep(1)
        assert len(caplog.messages) == logged
    ray.util.remove_placement_group(mine)


def address_of(process: Started) -> str:
    """Return the address at which an endpoint says that it answers, once it does."""
    end = time.monotonic() + 180
    while True:
        said = process.said.read_text()
        if match := re.search(r" on (http://\S+) \(Ctrl-C ends it\)", said):
            return match[1]
        assert process.poll() is None and time.monotonic() < end, said
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_endpoints_of_one_named_cluster(
    ray_cluster: dict[str, str],
    lab: Lab,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each has a name, a path or a port of its own; one that is taken is one sentence; none ends another."""
    with in_process_worker():
        run(lab.config("bert", "inclora"), Storage.at(tmp_path / "first"))
    for name in ("second", "third", "fourth"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    port, address = free_port(), ray_cluster["address"]

    def endpoint(name: str, *words: str) -> Started:
        bank = str(tmp_path / name / "bank")
        return start(str(REPO / "jobs/serve.py"), bank, "cpus=0.1", *words, RAY_ADDRESS=address)

    first = endpoint("first", f"port={port}")
    assert address_of(first) == f"http://127.0.0.1:{port}"
    (answer,) = serve.status().applications
    assert re.fullmatch(r"raycl-first-[0-9a-f]{8}", answer)
    for name, elsewhere, sentence in (
        ("second", free_port(), f"use host=127.0.0.1 port={port}, or ingress=direct"),
        ("third", port, f"route_prefix=/ is the path of application '{answer}'"),
    ):
        tree = {"bank": str(tmp_path / name / "bank"), "cpus": 0.1, "port": elsewhere}
        with pytest.raises(LaunchError, match=re.escape(sentence)):
            application.start(configs.validate(ServeConfig, tree), None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    for name, elsewhere, sentence in (
        ("first", free_port(), f"serves this bank already, as application '{answer}'"),
        ("fourth", port, f"127.0.0.1:{port} cannot be listened on"),
    ):
        words = ("cpus=0.1", "ingress=direct", f"port={elsewhere}")
        assert main.main(["serve", str(tmp_path / name / "bank"), *words]) == 1
        said = capsys.readouterr().err
        assert sentence in said.splitlines()[-1] and "Traceback" not in said
    words = (f"port={port}", "route_prefix=/second")
    second = endpoint("second", *words)
    url = address_of(second)
    assert url == f"http://127.0.0.1:{port}/second"
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 0
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 404, "the other one is gone"

    second.kill()
    second.wait()
    again = endpoint("second", *words)
    assert address_of(again) == url
    assert "was left by a command that has ended: it is replaced" in again.said.read_text()
    (two,) = serve.status().applications
    serve.delete(two)
    assert again.wait(60) == 1
    said = again.said.read_text()
    assert f"application '{two}' was deleted from the cluster by another command" in said and "Traceback" not in said
    serve.shutdown()
