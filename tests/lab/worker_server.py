"""Starts Ray's workers of the tests as copies of a process that has imported the libraries.

A worker imports torch, transformers and DeepSpeed for four seconds, and the tests start about a hundred. `WorkerServer`
imports them once; `startup/sitecustomize.py`, which is first on PYTHONPATH, sends it what Ray starts. Ray itself is
imported in the copy: it reads its settings from the environment when it is imported.
Workers with more in their runtime environment than variables, and those of tests/chaos, start as they do for users.
What it does not know: what the workers do.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

PRELOADED = (
    "deepspeed",
    "fastapi",
    "grpc",
    "jsonschema",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.sdk.metrics",
    "pandas",
    "peft",
    "pyarrow.fs",
    "pyarrow.parquet",
    "raycl.run.start",
    "raycl.training.stream_loop",
    "requests",
    "safetensors.torch",
    "sklearn.metrics",
    "torch",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "uvicorn",
)
"""What workers, trials and replicas import, except Ray."""

SETTING = "RAYCL_WORKER_SERVER"


class WorkerServer:
    """The process, and the environment by which Ray's workers find it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="w", dir="/tmp")  # short: paths of sockets end at 107 bytes
        address = f"{self._folder.name}/s"
        self._process = subprocess.Popen(
            [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the process that starts workers has ended"
        startup = str(Path(__file__).parent / "startup")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH")))))
        patch.setenv(SETTING, address)

    def close(self) -> None:
        """End it and, with it, the workers that are left."""
        self._process.communicate()
        self._folder.cleanup()


def _serve(address: str) -> None:
    """Until standard input is closed, as it is when the tests have ended."""
    for name in PRELOADED:
        import_module(name)
    assert "ray" not in sys.modules, "Ray would keep the settings of this process"
    gc.collect()
    gc.freeze()  # collecting garbage would write to pages that the copies share
    waiting = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    workers: set[_Worker] = set()
    while True:
        for key, _ in waiting.select():
            worker = key.data
            if key.fileobj is sys.stdin:
                for worker in workers:
                    os.kill(worker.pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                worker = _started(listener.accept()[0], waiting, listener)
                workers.add(worker)
                waiting.register(worker.ended, selectors.EVENT_READ, worker)
                waiting.register(worker.connection, selectors.EVENT_READ, worker)
            elif worker not in workers:  # it ended in this round
                continue
            elif key.fileobj is worker.connection:  # Ray has killed the process that waits for the worker
                waiting.unregister(worker.connection)
                os.kill(worker.pid, signal.SIGKILL)
            else:
                workers.remove(worker)
                _end(worker, waiting)


@dataclass(frozen=True, eq=False)
class _Worker:
    """A copy.

    Attributes:
        ended: descriptor that can be read when it has ended. connection: to the process that waits for it.
    """

    pid: int
    ended: int
    connection: socket.socket


def _end(worker: _Worker, waiting: selectors.BaseSelector) -> None:
    """Pass the exit code on."""
    code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    waiting.unregister(worker.ended)
    os.close(worker.ended)
    with worker.connection:
        if worker.connection in waiting.get_map():
            waiting.unregister(worker.connection)
            with suppress(OSError):  # Ray may have killed the process that waits in this moment
                worker.connection.sendall(bytes([code & 255]))


def _started(connection: socket.socket, waiting: selectors.BaseSelector, listener: socket.socket) -> _Worker:
    """A new worker."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        data = stream.read(int.from_bytes(head, "big"))  # cut if Ray has killed the process that sends it
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # Ray ends a worker's whole group
        for opened in (connection, listener):
            opened.close()
        waiting.close()
        _work(data, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return _Worker(pid, os.pidfd_open(pid), connection)


def _work(data: bytes, descriptors: list[int]) -> None:
    """Become the worker."""
    code = 1
    try:
        request = json.loads(data)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = request["arguments"]
        paths = [str(Path(sys.argv[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        sys.path[:] = dict.fromkeys([*paths, *sys.path[1:]])
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
