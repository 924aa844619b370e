"""Faults of the chaos test in processes, nodes, the store and files. It ends only what it has started."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import psutil
import ray
from listener import free_port
from moto.server import ThreadedMotoServer
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

from raycl.storage import Storage
from raycl.training.records.checkpoint import FOLDER, PARAMETERS
from raycl.training.records.journal import RunState, read_state

REPO = Path(__file__).resolve().parents[2]
TEXTS = ("fire is warm very", "the sea is cold", "it purrs a sleeps", "the barks runs much")
PAUSE_S, ANSWER_S, TRIES = 0.25, 20.0, 5
"""The pause between two questions, the time for an answer, and the tries before a question counts as lost."""
FLOOD_EVERY_S, FLOOD_CLIENTS = 5.0, 8


class Log:
    """Lines with the seconds since the beginning, printed at once and kept.

    Attributes:
        lines: so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._began = time.monotonic()

    def __call__(self, words: str) -> None:
        """One more line."""
        self.lines.append(f"{time.monotonic() - self._began:6.1f} s  {words}")
        print(self.lines[-1], flush=True)


class Store:
    """An S3-compatible server on loopback that can go away and come back with what it held."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()
        boto3.client("s3", endpoint_url=f"http://{self.host}:{self.port}").create_bucket(Bucket="bucket")

    def uri(self, name: str) -> str:
        """Return the URI of a folder in the bucket."""
        return f"s3://bucket/{name}?endpoint_override={self.host}:{self.port}&scheme=http"

    def away(self, seconds: float) -> None:
        """Refuse every connection for so long."""
        self._server.stop()
        time.sleep(seconds)
        self._server = ThreadedMotoServer(ip_address=self.host, port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Stop the server for good."""
        self._server.stop()


class Nodes:
    """A Ray cluster of three nodes on this machine: a head that trains nothing, and two that do."""

    def __init__(self, folder: str) -> None:
        Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # Cluster writes its address there
        self.cluster = Cluster()
        dashboard = {"include_dashboard": True, "dashboard_port": free_port()}
        self.cluster.add_node(num_cpus=0, object_store_memory=150 * 1024**2, temp_dir=folder, **dashboard)
        ray.init(address=self.cluster.address, namespace="chaos", log_to_driver=False)
        for _ in range(2):
            self.add()

    @property
    def address(self) -> str:
        """The address of the cluster, for drivers."""
        return str(self.cluster.address)

    def add(self) -> None:
        """Add one more node of two CPUs."""
        self.cluster.add_node(num_cpus=2, object_store_memory=150 * 1024**2)
        self.cluster.wait_for_nodes()

    def kill_of(self, process: int) -> None:
        """Kill the node on which a process runs, and let another one join."""
        parents = {parent.pid for parent in psutil.Process(process).parents()}
        for node in list(self.cluster.worker_nodes):
            if {item.process.pid for item in node.all_processes["raylet"]} & parents:
                self.cluster.remove_node(node, allow_graceful=False)
                self.add()
                return
        raise AssertionError(f"no node has process {process}")

    def stop(self) -> None:
        """End it."""
        ray.shutdown()
        self.cluster.shutdown()


@dataclass
class Asking:
    """A client that asks one question after another, each again while it gets no answer, as clients do.

    Attributes:
        statuses: of all attempts; 0: no connection, or none that lasted. answers: questions that got one.
        lost: questions that did not.
        snapshots: numbers of those that answered, in order.
    """

    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    answers: int = 0
    lost: int = 0
    snapshots: list[int] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask until `stop` is called."""
        number = 0
        while not self._over.wait(PAUSE_S):
            number += 1
            self._question(TEXTS[number % len(TEXTS)])

    def _question(self, text: str) -> None:
        for attempt in range(TRIES):
            status, body = self._once(text)
            self.statuses[status] += 1
            if status == 200:
                self.answers += 1
                snapshot = int(body["data"][0]["raycl"]["snapshot"])
                if self.snapshots[-1:] != [snapshot]:
                    self.snapshots.append(snapshot)
                return
            time.sleep(2.0**attempt)
        self.lost += 1

    def _once(self, text: str) -> tuple[int, Any]:
        body = json.dumps({"input": text}).encode()
        request = urllib.request.Request(f"{self.url}/v1/classify", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, None
        except (OSError, ValueError):
            return 0, None

    def stop(self) -> None:
        """Stop after the present question."""
        self._over.set()


@dataclass
class Flood:
    """Every few seconds, clients that send header fields without end.

    Attributes:
        statuses: that they got; 0: their connection was closed. slowest: answer to `/healthz` meanwhile, in seconds.
    """

    port: int
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send clients until `stop` is called."""
        while not self._over.wait(FLOOD_EVERY_S):
            clients = [threading.Thread(target=self._send, daemon=True) for _ in range(FLOOD_CLIENTS)]
            for client in clients:
                client.start()
            began = time.monotonic()
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=ANSWER_S):
                self.slowest = max(self.slowest, time.monotonic() - began)
            for client in clients:
                client.join()

    def _send(self) -> None:
        answer = b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S) as client:
            with suppress(OSError):
                client.sendall(b"GET /healthz HTTP/1.1\r\n")
                for _ in range(80):
                    client.sendall(b"a:b\r\n" * 10_000)
            answer = client.recv(1000)
        self.statuses[int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0] += 1

    def stop(self) -> None:
        """Stop after the present clients."""
        self._over.set()


class Driver:
    """`jobs/train_stream.py`, started again and again on one run.

    Attributes:
        command: what is started, without its words.
    """

    command: Sequence[str] = (sys.executable, str(REPO / "jobs" / "train_stream.py"))

    def __init__(self, address: str, folder: Path, log: Log) -> None:
        self._address, self._folder, self._log = address, folder, log
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self, *arguments: str) -> None:
        """Start the driver with these words behind the job's name."""
        self._starts += 1
        said = (self._folder / f"driver{self._starts}.log").open("wb")
        environment = {**os.environ, "RAY_ADDRESS": self._address}
        self.process = subprocess.Popen(
            [*self.command, *arguments], cwd=self._folder, env=environment, stdout=said, stderr=said
        )

    def send(self, number: signal.Signals) -> int:
        """Signal the process and return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        assert self.process is not None
        return self.process.wait(timeout=seconds)

    @property
    def running(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def said(self) -> str:
        """Return the end of what all starts printed."""
        logs = sorted(self._folder.glob("driver*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs)

    def logs(self) -> str:
        """Return all that the last start printed."""
        return (self._folder / f"driver{self._starts}.log").read_text(errors="replace").strip()

    def stop(self) -> None:
        """Kill the driver if it still runs."""
        if self.running:
            with suppress(ProcessLookupError):
                assert self.process is not None
                self.process.kill()
                self.process.wait(timeout=30)


@contextmanager
def endpoint(bank: str, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`jobs/serve.py` with two replicas on a Ray of its own; it is up when it is yielded."""
    with (folder / "endpoint.log").open("wb") as said:
        words = [bank, f"port={port}", "replicas=2", "cpus=0.2", "ingress=proxy", "follow.poll_s=1"]
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        command = [sys.executable, str(REPO / "jobs" / "serve.py"), *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
        try:
            _wait(lambda: _is_up(port), 180, f"the endpoint is not up: {folder / 'endpoint.log'}")
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_up(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def kill_child(process: subprocess.Popen[bytes], name: str) -> str:
    """Kill one descendant whose command line begins so; that command line."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = " ".join(child.cmdline())
            if words.startswith(name):
                child.kill()
                return words
    raise AssertionError(f"no process is called {name}...")


def damage_newest_checkpoint(storage: Storage) -> str:
    """Flip a byte of its parameters and return its name."""
    name = read_state(storage).checkpoints[-1]
    file = f"{FOLDER}/{name}/{PARAMETERS}"
    data = bytearray(storage.read(file))
    data[len(data) // 2] ^= 1
    storage.write(file, bytes(data))
    return name


def wait_for(storage: Storage, ready: Callable[[RunState], bool], driver: Driver, seconds: float = 240) -> RunState:
    """Return the first state of the run that is `ready`."""
    run_states: list[RunState] = []

    def look() -> bool:
        assert driver.running, f"the driver ended: {driver.said()}"
        with suppress(OSError):
            run_states[:] = [read_state(storage)]
        return bool(run_states) and ready(run_states[0])

    _wait(look, seconds, "the run did not get there")
    return run_states[0]


def _wait(ready: Callable[[], bool], seconds: float, words: str) -> None:
    ends = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < ends, f"{words} within {seconds:g} s"
        time.sleep(0.5)


@contextmanager
def short_folder() -> Iterator[str]:
    """Paths of UNIX sockets end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
