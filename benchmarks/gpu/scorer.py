"""Rows scored in a process of their own, without Ray: what `eval.mode=overlap` does, for measurements.

`python -m benchmarks.gpu.scorer` is that process: it reads requests as lines of JSON, `{"job": ...}` of a run and then
`{"score": CHECKPOINT}` for each row, and writes an answer to each.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import IO, Any

from raycl.errors import RayclError, RunError
from raycl.run.scoring import ScoringProcess, own_process
from raycl.training.phase.scoring import ScoredRow

READY_S = 300.0
"""Seconds in which the process imports its libraries and loads a backbone."""
CODE = Path(__file__).parents[2]


class ProcessScorer:
    """The process as a run sees it (`raycl.training.pending_row.RowScorer`)."""

    def __init__(self) -> None:
        """Start it; what it logs goes where this process's errors go."""
        path = os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.scorer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._begun = 0
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"error": "its process ended"})

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _answer(self, wait_s: float) -> dict[str, Any] | None:
        try:
            found = self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
        except queue.Empty:
            return None
        if "error" in found:
            raise RunError(f"a row cannot be scored beside training: {found['error']}")
        return found

    def take(self, job: dict[str, Any]) -> None:
        """Score rows of this run (`raycl.run.scoring.ScoringProcess`); returns when its backbone is loaded.

        Raises:
            RunError: it cannot be loaded.
        """
        self._ask({"job": job})
        if self._answer(READY_S) is None:
            raise RunError(f"the process that scores is not ready after {READY_S:g} s")

    def begin(self, checkpoint: str, phase: str) -> None:
        """Start to score the phase that ends with this checkpoint."""
        self._begun += 1
        self._ask({"score": checkpoint})

    def result(self, wait_s: float) -> ScoredRow | None:
        """Its row, if it is there within so many seconds.

        Raises:
            RunError: it cannot be scored.
        """
        found = self._answer(wait_s)
        return None if found is None else ScoredRow(**{**found, "lines": tuple(found["lines"])})

    def progress(self) -> int:
        """Rows begun."""
        return self._begun

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def main(requests: IO[str], answers: IO[str]) -> None:
    """Until there are no more requests."""
    lines, process = own_process(), None
    for line in requests:
        request = json.loads(line)
        try:
            if "job" in request:
                process = None  # its memory first
                process = ScoringProcess(request["job"], lines)
                process.wait()
                found: dict[str, Any] = {}
            else:
                assert process is not None, "a row before its run"
                found = asdict(process.score(request["score"]))
        except RayclError as error:
            found = {"error": str(error)}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    main(sys.stdin, own)
