"""The process that scores rows of the matrix beside training (`eval.mode=overlap`), as an actor of the run's Ray.

It belongs to the run's first worker, and ends with it: one process for all rows, which imports its libraries once.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raycl.errors import RayclError, RunError
from raycl.run.config import RunConfig
from raycl.run.scoring import ScoringProcess, own_process
from raycl.training.phase.scoring import ScoredRow
from raycl.training.records.journal import RunState

log = logging.getLogger("raycl")

STARTS = 3
"""Of the process for one row, before the row counts as one that cannot be scored."""

ANSWER_S = 0.5
"""Seconds in which the process says how far it is."""


def needs_scorer(config: RunConfig, state: RunState, phases: int) -> bool:
    """Whether rows are scored beside training, or an earlier attempt has left one to be scored.

    Args:
        phases: of the run. Beside the last one the row of that before it is scored, and nothing after it.
    """
    return state.scored < len(state.phases) or (config.eval.mode == "overlap" and len(state.phases) < phases - 1)


def scorer_resources(config: RunConfig, gpus: float) -> dict[str, float]:
    """What the process takes of the cluster, where each worker has so many GPUs."""
    mine = gpus if config.eval.overlap_gpus is None else config.eval.overlap_gpus
    return {"CPU": config.eval.overlap_cpus, "GPU": mine}


class _OwnProcess(ScoringProcess):
    """In a process of Ray's that is its own."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job, own_process())


class ScoringActor:
    """The process as the first worker sees it (`raycl.training.pending_row.RowScorer`)."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Start it; it imports, and loads the backbone, while the first task is trained.

        Args:
            job: see `raycl.launch.driver.job_of`.
        """
        self._job = job
        self._checkpoint, self._phase, self._starts, self._progress = "", "", 0, 0
        self._actor, self._row = self._started(), None

    def _started(self) -> Any:
        resources = self._job["scorer"]
        options = {"num_cpus": resources["CPU"], "num_gpus": resources["GPU"], "max_concurrency": 2}
        return ray.remote(_OwnProcess).options(**options).remote(self._job)

    def begin(self, checkpoint: str, phase: str) -> None:
        """Start to score the phase of this name, which ends with this checkpoint."""
        self._checkpoint, self._phase, self._starts = checkpoint, phase, 1
        self._row = self._actor.score.remote(checkpoint)

    def result(self, wait_s: float) -> ScoredRow | None:
        """Its row, if it is there within so many seconds. A process that died is started again.

        Raises:
            RunError: it died too often, or it raised an error.
        """
        ready, _ = ray.wait([self._row], timeout=wait_s)
        if not ready:
            return None
        try:
            found: ScoredRow = ray.get(self._row)
        except ActorDiedError as error:
            self._again(error)
            return None
        except RayError as error:
            raise self._failed(str(error if isinstance(error, RayclError) else error.__cause__ or error)) from error
        return found

    def _again(self, error: ActorDiedError) -> None:
        died = f"the process that scores the row of '{self._phase}' beside training died"
        if self._starts == STARTS:
            raise self._failed(f"its process died {STARTS} times (killed, or out of memory?)") from error
        log.warning("%s (killed, or out of memory?): it starts again", died)
        self._starts += 1
        self._actor = self._started()
        self._row = self._actor.score.remote(self._checkpoint)

    def _failed(self, cause: str) -> RunError:
        lines = cause.strip().splitlines() or ["no reason given"]
        return RunError(
            f"the row of '{self._phase}' cannot be scored beside training, from checkpoint '{self._checkpoint}': "
            f"{lines[-1]}; what is learned is kept, and the row is scored when the run continues"
        )

    def progress(self) -> int:
        """Grows while the process scores; its last answer where it does not answer in time."""
        try:
            self._progress = ray.get(self._actor.progress.remote(), timeout=ANSWER_S) + 1000 * self._starts
        except RayError as error:  # `result` will tell
            log.debug("the process that scores does not answer: %s", error)
        return self._progress

    def close(self) -> None:
        """End the process."""
        ray.kill(self._actor)
