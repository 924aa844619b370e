"""Starts jobs and Ray's processes of tests/ray, and pytest-xdist's, as copies of processes with imported libraries.

A worker or a job imports torch, transformers and DeepSpeed for four seconds, and these tests start more than a hundred.
`CopyServer` is a copy of pytest's process from before it imports raycl; `startup/sitecustomize.py`, which is first on
PYTHONPATH, sends it what is started. It has two processes: `libraries`, and a copy of that, `package`, with raycl too.
What runs in a folder with a raycl of its own, as submitted jobs do, is a copy of the first, and so are the processes of
pytest-xdist. Ray is imported in the copy itself: it reads its settings from the environment then, and what it draws at
random would be the same in all copies.
Workers with more in their runtime environment than variables and a working directory, and all processes of tests/chaos,
start as they do for users.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import logging
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

LIBRARIES = (
    "aiohttp_cors",
    "colorful",
    "deepspeed",
    "faiss",
    "fastapi",
    "fsspec.implementations.local",
    "google.protobuf.json_format",
    "google.rpc.code_pb2",
    "grpc",
    "grpc_reflection.v1alpha.reflection",
    "httptools",
    "ijson",
    "jsonschema",
    "matplotlib.pyplot",
    "omegaconf",
    "opencensus.stats.stats",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc",
    "opentelemetry.sdk.metrics",
    "opentelemetry.sdk.trace.export",
    "optuna",
    "pandas",
    "pdb",
    "peft",
    "prometheus_client",
    "pyarrow.fs",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "pydantic.dataclasses",
    "requests",
    "rich.console",
    "safetensors.torch",
    "sklearn.metrics",
    "torch",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
"""Libraries that jobs, workers, trials, replicas and Ray's own processes import, except Ray."""

PACKAGE = (
    "raycl.operations.report.plots",
    "raycl.operations.report.tables",
    "raycl.training.assembly",
    "raycl.training.setup.checks",
    "raycl.training.setup.snapshot_start",
    "raycl.serve.engine.serving_engine",
    "raycl.serve.http.server",
    "raycl.operations.sweep.outcome",
    "raycl.training.stream_loop",
)
"""Modules of raycl that they import, except those that import Ray."""

REPO = Path(__file__).resolve().parents[2]
STARTUP = str(Path(__file__).parent / "startup")
SETTING = "RAYCL_COPY_SERVER"
READY, FAILED = b"r", b"f"


class Copies:
    """The environment by which processes find the two of which they become copies."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @classmethod
    def joined(cls) -> Copies | None:
        """Return what this process is a copy of, and take it from the environment of those that it starts; None: it is
        no copy."""
        folder = os.environ.pop(SETTING, None)
        if folder is None:
            return None
        others = [path for path in os.environ.pop("PYTHONPATH").split(os.pathsep) if path != STARTUP]
        if others:
            os.environ["PYTHONPATH"] = os.pathsep.join(others)
        return cls(folder)

    def set_in(self, patch: pytest.MonkeyPatch) -> None:
        """Processes that are started from now on are copies."""
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (STARTUP, os.environ.get("PYTHONPATH")))))
        patch.setenv(SETTING, self.folder)


class CopyServer(Copies):
    """The two processes; made before raycl and Ray are imported."""

    def __init__(self) -> None:
        gc.disable()  # what is imported is no garbage: a second of looking for some
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "mlflow", None)  # DeepSpeed's tuner would import it: a second, and no test tunes
            for name in LIBRARIES:
                if find_spec(name.partition(".")[0]):  # what Ray brings along differs between its versions
                    import_module(name)
        assert not {"ray", "raycl"} & {*sys.modules}, "Ray would keep the settings of now, and raycl its folder"
        super().__init__(tempfile.mkdtemp(prefix="c", dir="/tmp"))  # paths of sockets end at 107 bytes
        self._control, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._control.close()
                _main(Path(self.folder), theirs)
            finally:
                os._exit(1)
        theirs.close()
        gc.enable()
        if self._control.recv(1) != READY:
            shutil.rmtree(self.folder)
            raise AssertionError("the process that starts others has ended")

    def close(self) -> None:
        """End both and, with them, the copies that are left."""
        self._control.sendall(b"e")
        os.waitpid(self._pid, 0)
        self._control.close()
        shutil.rmtree(self.folder)


def _main(folder: Path, control: socket.socket) -> None:
    """Become `libraries`, once a copy of it is `package`."""
    _forget_pytest()
    libraries = _listener(folder / "libraries")
    mine, theirs = socket.socketpair()
    package = os.fork()
    if package == 0:
        try:
            for opened in (libraries, mine):
                opened.close()
            _import_package()
            listener = _listener(folder / "package")
            control.sendall(READY)
            control.close()
            _serve(listener, theirs)
        except BaseException:
            traceback.print_exc()
            if control.fileno() != -1:
                control.sendall(FAILED)
            raise
        finally:
            os._exit(1)
    theirs.close()
    _serve(libraries, control)
    mine.close()
    os.waitpid(package, 0)


def _import_package() -> None:
    """Import the raycl beside these tests, wherever one is installed."""
    sys.path.insert(0, str(REPO))
    for name in PACKAGE:
        import_module(name)
    sys.path.remove(str(REPO))
    assert "ray" not in sys.modules, "Ray would keep the settings of this process"


def _forget_pytest() -> None:
    """Undo what pytest has set in its process, and a new interpreter would not have; forget the modules of tests."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(REPO / "tests")):
            del sys.modules[name]
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)]
    sys.path[:] = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _listener(address: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    return listener


def _serve(listener: socket.socket, control: socket.socket) -> None:
    """Serve until something comes by `control`, or its other end is closed."""
    gc.enable()
    gc.collect()
    gc.freeze()  # collecting garbage would write to pages that the copies share
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(control, selectors.EVENT_READ)
    copies: set[_Copy] = set()
    while True:
        for key, _ in waiting.select():
            copy = key.data
            if key.fileobj is control:
                for copy in copies:
                    os.kill(copy.pid, signal.SIGKILL)
                return
            if key.fileobj is listener:
                copy = _started(listener.accept()[0], waiting, (listener, control))
                copies.add(copy)
                waiting.register(copy.ended, selectors.EVENT_READ, copy)
                waiting.register(copy.connection, selectors.EVENT_READ, copy)
            elif copy not in copies:  # it ended in this round
                continue
            elif key.fileobj is copy.connection:
                _signal(copy, waiting)
            else:
                copies.remove(copy)
                _end(copy, waiting)


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy.

    Attributes:
        ended: descriptor that can be read when it has ended. connection: to the process that waits for it.
    """

    pid: int
    ended: int
    connection: socket.socket


def _signal(copy: _Copy, waiting: selectors.BaseSelector) -> None:
    """Pass a signal on: Ctrl-C to what the copy has started too, as a terminal does."""
    numbers = b""
    with suppress(ConnectionError):
        numbers = copy.connection.recv(1)
    if not numbers:  # the process that waits was killed
        waiting.unregister(copy.connection)
        os.kill(copy.pid, signal.SIGKILL)
    elif numbers[0] == signal.SIGINT:
        os.killpg(copy.pid, signal.SIGINT)
    else:
        os.kill(copy.pid, numbers[0])


def _end(copy: _Copy, waiting: selectors.BaseSelector) -> None:
    """Pass the exit code on; negative: a signal."""
    code = os.waitstatus_to_exitcode(os.waitpid(copy.pid, 0)[1])
    waiting.unregister(copy.ended)
    os.close(copy.ended)
    with copy.connection:
        if copy.connection in waiting.get_map():
            waiting.unregister(copy.connection)
            with suppress(OSError):  # the process that waits may be killed in this moment
                copy.connection.sendall(code.to_bytes(2, "big", signed=True))


def _started(connection: socket.socket, waiting: selectors.BaseSelector, others: tuple[socket.socket, ...]) -> _Copy:
    """Return a new copy."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size and (more := connection.recv(size - len(data))):  # cut if the process that sends is killed
        data += more
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # Ray ends a worker's whole group
        for opened in (connection, *others):
            opened.close()
        waiting.close()
        _work(data, descriptors)
    os.setpgid(pid, pid)  # the copy does it too: it must be done before either continues
    for descriptor in descriptors:
        os.close(descriptor)
    return _Copy(pid, os.pidfd_open(pid), connection)


def _work(data: bytes, descriptors: list[int]) -> None:
    """Become the process that was requested."""
    code = 1
    try:
        request = json.loads(data)
        _set_up(request, descriptors)
        if sys.argv[0] == "-c":
            _execute(sys.argv.pop())
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code & 255)


def _execute(line: str) -> None:
    """Do what `python -c` does."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(line, sys.modules["__main__"].__dict__)


def _set_up(request: dict[str, object], descriptors: list[int]) -> None:
    """Set up what a new interpreter would have: streams, environment, folder, arguments, paths, signals."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.orig_argv = [sys.executable, *sys.argv]
    paths = [str(Path(sys.argv[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = dict.fromkeys([*filter(None, paths), *sys.path])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
