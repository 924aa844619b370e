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
from importlib import import_module
from pathlib import Path
from typing import Any

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
    workers: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of their end
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                for pid, _connection in workers.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                connection = listener.accept()[0]
                pid = _started(connection, waiting, listener)
                ended = os.pidfd_open(pid)
                workers[ended] = pid, connection
                waiting.register(ended, selectors.EVENT_READ, ended)
                waiting.register(connection, selectors.EVENT_READ, ended)
            elif key.fd == key.data and key.data in workers:
                pid, connection = workers.pop(key.data)
                _end(pid, connection, waiting)
                waiting.unregister(key.data)
                os.close(key.data)
            elif key.data in workers:  # Ray has killed the process that waits for the worker
                waiting.unregister(key.fileobj)
                os.kill(workers[key.data][0], signal.SIGKILL)


def _end(pid: int, connection: socket.socket, waiting: selectors.BaseSelector) -> None:
    """Pass the exit code on."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with connection:
        if connection in waiting.get_map():
            waiting.unregister(connection)
            connection.sendall(bytes([code & 255]))


def _started(connection: socket.socket, waiting: selectors.BaseSelector, listener: socket.socket) -> int:
    """The id of a new worker."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # Ray ends a worker's whole group
        for opened in (connection, listener):
            opened.close()
        waiting.close()
        _work(json.loads(data), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _work(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become the worker."""
    code = 1
    try:
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
