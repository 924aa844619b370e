"""Processes for tests that need several at once, or one that they change for good, without importing anything again.

A new interpreter imports the libraries for 5 to 10 seconds. `ForkServer` is a copy of pytest's process from before the
first test, when everything is imported and nothing has been started; each call gets a copy of that copy.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POLL_S = 0.02


@dataclass(frozen=True)
class Call:
    """The call that one process makes.

    Attributes:
        function: `module:name`; the module is imported in the new process.
        log: file for what it prints, errors included.
    """

    function: str
    arguments: tuple[Any, ...]
    log: Path


class ForkServer:
    """The copy; to be made while pytest's process has one thread of its own."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        gc.freeze()  # collecting garbage would write to pages that both share
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._connection.close()
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def codes(self, calls: Sequence[Call], seconds: float, **environment: str) -> list[int]:
        """Return the exit codes of the calls, side by side; `environment` is added to that of this process.

        When one fails or takes longer than `seconds`, the others are killed.
        """
        self._connection.send((list(calls), {**os.environ, **environment}, seconds))
        received: list[int] = self._connection.recv()
        return received

    def run(self, calls: Sequence[Call], seconds: float, **environment: str) -> None:
        """Run calls in the same way, and none may fail.

        Raises:
            AssertionError: with the end of their logs.
        """
        codes = self.codes(calls, seconds, **environment)
        assert codes == [0] * len(calls), f"{codes}\n" + "\n".join(call.log.read_text()[-3000:] for call in calls)

    def pair(self, function: str, folder: Path, *arguments: Any, seconds: float) -> None:
        """Run both ranks of `function(rank, *arguments)`, which meet by gloo; logs are `folder/worker<rank>.log`."""
        calls = [Call(function, (rank, *arguments), folder / f"worker{rank}.log") for rank in range(2)]
        self.run(calls, seconds, GLOO_SOCKET_IFNAME="lo")

    def close(self) -> None:
        """End it."""
        self._connection.close()
        os.waitpid(self._pid, 0)


def _serve(connection: Connection) -> None:
    """Serve until pytest's process has ended."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    while True:
        try:
            calls, environment, seconds = connection.recv()
        except EOFError:
            return
        pids = [_forked(call, environment) for call in calls]
        connection.send(_codes(pids, time.monotonic() + seconds, connection))


def _forked(call: Call, environment: dict[str, str]) -> int:
    """Return the id of a process that does the call."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(call.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        logging.getLogger().handlers.clear()  # those of pytest
        os.environ.clear()
        os.environ.update(environment)
        module, _, name = call.function.partition(":")
        getattr(import_module(module), name)(*call.arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _codes(pids: list[int], ends: float, connection: Connection) -> list[int]:
    """Exit codes, once all have ended; after the time, one's failure or the end of pytest, the others are killed."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        is_over = time.monotonic() > ends or any(codes.values()) or connection.poll()
        for pid in [pid for pid in pids if pid not in codes]:
            if is_over:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if is_over else os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    return [codes[pid] for pid in pids]
