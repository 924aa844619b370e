"""The newest row of the matrix while a process scores it beside training (`eval.mode=overlap`).

Evaluation takes longer with every task, and workers need its result for nothing but the records. At most one row is
pending: what a task publishes names the rows of all tasks before it, so workers wait before the task's last step, where
a checkpoint can still be written.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Protocol

from raycl.errors import RunError
from raycl.training.control import Control
from raycl.training.distributed import DistributedContext
from raycl.training.phase.scoring import ScoredRow
from raycl.training.recorder import Recorder
from raycl.training.records.stops.request import StopRequested

log = logging.getLogger("raycl")

POLL_S = 0.5
"""Seconds between two looks for the row."""


class RowScorer(Protocol):
    """A process that scores rows, one after another."""

    def begin(self, checkpoint: str, phase: str) -> None:
        """Start to score the phase of this name, which ends with this checkpoint."""
        ...

    def result(self, wait_s: float) -> ScoredRow | None:
        """Its row, if it is there within so many seconds.

        Raises:
            RunError: it cannot be scored.
        """
        ...

    def progress(self) -> int:
        """A number that grows while the process scores."""
        ...


class PendingRow:
    """The pending row on one worker; the first worker alone has the scorer."""

    def __init__(
        self, recorder: Recorder, world: DistributedContext, control: Control, scorer: RowScorer | None
    ) -> None:
        self._recorder, self._world, self._control, self._scorer = recorder, world, control, scorer
        self._is_pending = False
        self._error: RunError | None = None
        self._looked = 0.0

    def begin(self) -> None:
        """Start to score the newest phase, if its row is pending. Every worker calls it."""
        records = self._recorder.state.phases
        self._is_pending = bool(records) and "pending" in records[-1]
        if self._is_pending and self._world.is_first:
            assert self._scorer is not None, "a row is pending, and nothing can score it"
            self._error = None
            self._scorer.begin(records[-1]["pending"], records[-1]["times"]["phase"])

    def poll(self) -> None:
        """Record the row if it is there, without waiting; an error is logged, and raised by `wait`."""
        if self._is_pending and self._world.is_first and time.monotonic() - self._looked > POLL_S:
            self._is_recorded(0.0)
            self._looked = time.monotonic()

    def wait(self) -> None:
        """Wait until the row is recorded, if one is pending. Collective.

        Raises:
            RunError: it cannot be scored. StopRequested: the run is to stop.
        """
        if not self._is_pending:
            return
        self._control.progress("waiting for the row of the newest task")
        seen = -1
        while True:
            is_recorded = self._world.is_first and self._is_recorded(POLL_S if seen >= 0 else 0.0)
            self._world.raise_any(self._error)
            count = self._scorer.progress() if self._scorer is not None and not is_recorded else 0
            is_recorded, count = self._world.broadcast((is_recorded, count))
            if is_recorded:
                break
            if seen < 0 and self._world.is_first:
                log.info("    waiting for the row of '%s'", self._recorder.state.phases[-1]["times"]["phase"])
            if count > seen:
                self._control.progress("waiting for the row of the newest task")
            seen = max(seen, count)
            if self._control.stop_requested(now=True):
                raise StopRequested
        state = self._recorder.state
        newest = self._world.broadcast(state.phases[-1])
        self._recorder.state = replace(state, phases=[*state.phases[:-1], newest])
        self._is_pending = False

    def _is_recorded(self, wait_s: float) -> bool:
        """Whether the first worker has recorded the row; looks for it if not."""
        if "pending" not in self._recorder.state.phases[-1]:
            return True
        if self._error is not None or self._scorer is None:
            return False
        try:
            found = self._scorer.result(wait_s)
        except RunError as error:
            log.warning("%s", error)
            self._error = error
            return False
        if found is not None:
            self._recorder.row(found)
        return found is not None
