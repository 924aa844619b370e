"""Early stopping of trials: Tune's ASHA and median rules over tasks; a stopped run ends by itself between two tasks.

Tune would kill a stopped trial in the middle of its next task, and what its workers held stays taken for most of a
minute. Here the rule's decision goes to the run (`raycl.training.records.run_folder`), whose workers wait for it, and
Tune gets the decision to continue: the trial ends as if its stream were over.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.trials.trial import FAILED, SCORES, TASKS
from raycl.progress import report
from raycl.training.records.run_folder import read_decision, write_decision

log: logging.Logger = logging.getLogger("raycl")

SCORE = f"{SCORES}0"
NEVER = float("inf")

TRIALS = "trials"
"""The name of their bar."""


@dataclass(frozen=True, eq=False)
class EarlierTrial:
    """Replaces Tune's trial of an earlier session; rules distinguish trials by identity and `trial_id`."""

    trial_id: str


def rule_of(sweep: SweepConfig, tasks: int) -> Any:
    """Return Tune's rule, with tasks as time."""
    chosen = sweep.scheduler
    common = {"time_attr": TASKS, "metric": SCORE, "mode": sweep.mode[0]}
    if chosen.name == "asha":
        grace = min(chosen.grace, tasks)
        return ASHAScheduler(max_t=tasks, grace_period=grace, reduction_factor=chosen.reduction, **common)
    if chosen.name == "median":
        return MedianStoppingRule(
            grace_period=chosen.grace, min_samples_required=chosen.least, min_time_slice=NEVER, **common
        )
    return None


class AtTaskEnds(FIFOScheduler):  # type: ignore[misc]
    """Starts trials in order; after each task the rule decides whether a trial continues.

    Attributes:
        over: number of trials that have ended. running: numbers of those that have not, of the ones that Tune has.
    """

    def __init__(self, folder: SweepFolder, rule: Any, tasks: int, total: int, over: int) -> None:
        """Stop trials by a rule.

        Args:
            rule: Tune's scheduler; None: all continue.
            total: number of all trials, for people. over: those that earlier sessions ended.
        """
        super().__init__()
        self.folder, self.rule, self.tasks, self.total, self.over = folder, rule, tasks, total, over
        self.running: set[int] = set()

    def replay(self, number: int, scores: Sequence[float | None]) -> None:
        """Add a trial of an earlier session to the rule, which compares later ones with it."""
        if self.rule is None:
            return
        trial = EarlierTrial(f"earlier-{number}")
        results = [{TASKS: tasks, SCORE: score} for tasks, score in enumerate(scores, 1) if score is not None]
        self.rule.on_trial_add(None, trial)
        for result in results:
            self.rule.on_trial_result(None, trial, result)
        if results:
            self.rule.on_trial_complete(None, trial, results[-1])

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Add a trial."""
        self.running.add(trial.config["number"])
        if self.rule is not None:
            self.rule.on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Give the run its word; Tune continues in any case."""
        if FAILED in result or TASKS not in result or result.get("done"):
            return str(TrialScheduler.CONTINUE)
        continues = True
        if self.rule is not None:
            decision = self.rule.on_trial_result(tune_controller, trial, result)
            last = result[TASKS] >= self.tasks
            run = self.folder.run(trial.config["number"])
            earlier = read_decision(
                run, int(result[TASKS])
            )  # by an earlier session, or before its process died: it holds
            continues = decision != TrialScheduler.STOP or last if earlier is None else earlier
            if earlier is None:
                write_decision(run, int(result[TASKS]), continues)
        self._log(trial.config, result, continues)
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Remove a finished trial."""
        self._count(trial)
        if self.rule is not None and SCORE in result:
            self.rule.on_trial_complete(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Count it; rules forget it."""
        self._count(trial)

    def _count(self, trial: Any) -> None:
        self.running.discard(trial.config["number"])
        self.over += 1
        report(TRIALS, self.over, self.total, has_lines=True)

    def _log(self, given: dict[str, Any], result: dict[str, Any], continues: bool) -> None:
        scores = [f"{value:.2f}" for key, value in sorted(result.items()) if key.startswith(SCORES)]
        settings = " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in given.get("settings", {}).items())
        stopped = "" if continues else ", stopped"
        values = (given["number"] + 1, self.total, settings, result[TASKS], self.tasks)
        log.info("trial %d of %d (%s): %d of %d tasks, %s%s", *values, " ".join(scores) or "-", stopped)
