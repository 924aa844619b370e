"""Searchers: they propose trials from a planned list, or by Optuna's TPE for one metric or several, and can be resumed.

Tune calls a `Searcher`; ours write every proposal into the sweep's folder before the trial starts, and are rebuilt from
there, so Tune's own (pickled) state is never read back.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.tune.search import Searcher

from raycl import config as configs
from raycl.operations.sweep.definition.sweep_config import (
    Draw,
    Settings,
    SweepConfig,
    in_order,
    key_of,
    plain,
    step_value,
)
from raycl.operations.sweep.definition.sweep_folder import FAILED as FAILURES
from raycl.operations.sweep.definition.sweep_folder import SweepFolder
from raycl.operations.sweep.trials.trial import FAILED, SCORES, TASKS
from raycl.training.records.fork_points import FORK_POINT
from raycl.training.records.journal import last_attempt
from raycl.training.records.run_folder import is_stopped
from raycl.training.setup.run_config import plugins_of
from raycl.training.workers.stopping import HostStop

log: logging.Logger = logging.getLogger("raycl")


class RecordingSearcher(Searcher, ABC):  # type: ignore[misc]
    """A searcher whose proposals are written down.

    Attributes:
        numbers: Tune's trial id -> number of the trial. stop: a request there ends the search.
    """

    def __init__(self, sweep: SweepConfig, folder: SweepFolder) -> None:
        super().__init__()
        self.sweep = sweep
        self.folder = folder
        self.numbers: dict[str, int] = {}
        self.stop: HostStop | None = None

    @property
    def waits(self) -> bool:
        """Return whether trials are left though none can start now."""
        return False

    @abstractmethod
    def next_trial(self) -> tuple[int, Settings] | None:
        """Return the number and settings of the next trial; None: there is none, or none can start now."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next proposal, for Tune; None: it is to ask again."""
        stopping = self.stop is not None and self.stop.is_requested
        trial = None if stopping else self.next_trial()
        if trial is None:
            return None if self.waits and not stopping else str(Searcher.FINISHED)
        number, settings = trial
        self.numbers[trial_id] = number
        self.folder.storage.delete(f"{FAILURES}/{number:04d}.json")  # it is tried again
        self.folder.write_settings(number, settings)
        config = self.folder.config(self.sweep, number, settings)  # here, where relative paths are valid
        texts = {"run": json.dumps(configs.as_tree(config)), "plugins": json.dumps(plugins_of(config))}
        return {"number": number, "settings": settings, **texts}

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Do nothing; the sweep's folder has the state."""


class Planned(RecordingSearcher):
    """Trials of a list, in order, but for those that wait for what a running trial learns for them.

    Of trials that have first phases in common one learns these, while the others wait for its fork point. If it ends
    without one, the next takes the phases up.

    Attributes:
        prefixes: number -> keys of the trial's first phases that other trials have too, the shortest first.
    """

    def __init__(
        self,
        sweep: SweepConfig,
        folder: SweepFolder,
        trials: Mapping[int, Settings],
        prefixes: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(sweep, folder)
        self.left: dict[int, Settings] = dict(trials)
        self.prefixes = prefixes or {}
        self._running: set[int] = set()

    @property
    def waits(self) -> bool:
        return bool(self.left)

    def next_trial(self) -> tuple[int, Settings] | None:
        """Return the first that is left and need not wait."""
        learned = {key for number in self._running for key in self.prefixes.get(number, ())}
        for number in self.left:
            if self._next_key(number) not in learned:
                self._running.add(number)
                return number, self.left.pop(number)
        return None

    def _next_key(self, number: int) -> str:
        """Return the key of the first shared phases that a trial would have to learn itself; "": none."""
        if last_attempt(self.folder.run(number)):  # it continues where it was
            return ""
        missing = ""
        for key in reversed(self.prefixes.get(number, ())):
            if self.folder.prefix(key).exists(FORK_POINT):
                break
            missing = key
        return missing

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Let others take up what the trial did not learn."""
        self._running.discard(self.numbers.get(trial_id, -1))


@dataclass(frozen=True)
class Result:
    """The result of a trial for Optuna.

    Attributes:
        curve: tasks learned -> value of each metric. scores: at the end; empty: the trial failed.
    """

    curve: Mapping[int, Sequence[float | None]]
    scores: Sequence[float | None]
    stopped: bool


class TpeSearcher(RecordingSearcher):
    """Optuna's TPE, which receives every trial's scores.

    A trial that the scheduler stopped counts as pruned: TPE ranks it by the scores that it had on the way.
    Settings without effect with a proposal's others are left out of the trial; a proposal that equals an earlier
    trial then is not run, but gets its result, now or when it ends. It counts as one of the samples, so that the search
    ends where few different trials are left.
    """

    def __init__(self, sweep: SweepConfig, folder: SweepFolder, again: Mapping[int, Settings]) -> None:
        """Begin with the trials in `again`, which an earlier session proposed and did not finish."""
        super().__init__(sweep, folder)
        self.again: dict[int, Settings] = dict(again)
        self.study: Any = _study(sweep)
        self.open_trials: dict[int, Any] = {}
        self.curves: dict[int, dict[int, Sequence[float | None]]] = {}
        self.keys: dict[int, str] = {number: key_of(settings) for number, settings in folder.settings().items()}
        self.results: dict[str, Result] = {}
        self.waiting: dict[str, list[Any]] = {}
        repeated = folder.settings(repeated=True)
        self.proposed: int = max([*self.keys, *repeated, -1]) + 1
        for settings in repeated.values():
            self._repeat(key_of(sweep.collapsed(settings)), self._ask_for(settings))

    def tell_finished(self, settings: Settings, scores: Sequence[Sequence[float | None]], stopped: bool) -> None:
        """Tell Optuna about a trial of an earlier session.

        Args:
            scores: after each task, of each metric.
        """
        result = Result(dict(enumerate(scores, 1)), scores[-1] if scores else [], stopped)
        self._replay(self._ask_for(settings), result)
        self._share(key_of(settings), result)

    def next_trial(self) -> tuple[int, Settings] | None:
        """Return a trial of an earlier session, or a fresh one."""
        if self.again:
            number = next(iter(self.again))
            settings = self.again.pop(number)
            self.open_trials[number], self.keys[number] = self._ask_for(settings), key_of(settings)
            return number, settings
        while self.proposed < self.sweep.samples:
            number, self.proposed = self.proposed, self.proposed + 1
            self.study.sampler = _sampler(self.sweep, number)
            trial = self.study.ask(self._distributions())
            drawn = {path: _value(self.sweep.space[path], value) for path, value in trial.params.items()}
            proposed = self.sweep.follow(in_order(drawn, self.sweep.space))
            settings = self.sweep.collapsed(proposed)
            key = key_of(settings)
            if key in self.keys.values() and len(settings) < len(proposed):
                log.info("proposal %d equals an earlier trial and gets its result", number)
                self.folder.write_settings(number, proposed, repeated=True)
                self._repeat(key, trial)
                continue
            self.open_trials[number], self.keys[number] = trial, key
            return number, settings
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Record a row of a trial."""
        number = self.numbers.get(trial_id)
        if number is not None and number in self.open_trials and TASKS in result:
            tasks, values = int(result[TASKS]), self._values(result)
            self.curves.setdefault(number, {})[tasks] = values
            self._on_the_way(self.open_trials[number], tasks, values)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record the last row of a trial, or an error."""
        number = self.numbers.get(trial_id)
        if number is None or number not in self.open_trials:
            return
        failed = error or not result or FAILED in result
        values = [] if failed or result is None else self._values(result)
        stopped = bool(values) and is_stopped(self.folder.run(number), int((result or {})[TASKS]))
        trial_result = Result(self.curves.pop(number, {}), values, stopped)
        self._close(self.open_trials.pop(number), trial_result)
        self._share(self.keys[number], trial_result)

    def _ask_for(self, settings: Settings) -> Any:
        """Return an Optuna trial with given settings; what they leave out is drawn."""
        drawn = {path: draw for path, draw in self.sweep.space.items() if draw.expr is None and path in settings}
        self.study.enqueue_trial({path: _parameter(draw, settings[path]) for path, draw in drawn.items()})
        return self.study.ask(self._distributions())

    def _repeat(self, key: str, trial: Any) -> None:
        """Give a proposal that is not run the result of the trial that it equals, as soon as that has ended."""
        self.waiting.setdefault(key, []).append(trial)
        if key in self.results:
            self._share(key, self.results[key])

    def _share(self, key: str, result: Result) -> None:
        """Keep the first result of a trial, and give it to the proposals that wait for it."""
        first = self.results.setdefault(key, result)
        for trial in self.waiting.pop(key, []):
            self._replay(trial, first)

    def _replay(self, trial: Any, result: Result) -> None:
        for tasks, values in result.curve.items():
            self._on_the_way(trial, tasks, values)
        self._close(trial, result)

    def _values(self, result: Mapping[str, Any]) -> list[float | None]:
        return [result.get(f"{SCORES}{index}") for index in range(len(self.sweep.metrics))]

    def _on_the_way(self, trial: Any, tasks: int, values: Sequence[float | None]) -> None:
        if len(values) == 1 and values[0] is not None:
            trial.report(values[0], tasks)

    def _close(self, trial: Any, result: Result) -> None:
        from optuna.trial import TrialState

        if not result.scores or any(value is None for value in result.scores):
            self.study.tell(trial, state=TrialState.FAIL)
        elif result.stopped:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, list(result.scores))

    def _distributions(self) -> dict[str, Any]:
        return {path: _distribution(draw) for path, draw in self.sweep.space.items() if draw.expr is None}


def _study(sweep: SweepConfig) -> Any:
    """Return an Optuna study in memory."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    better = optuna.study.StudyDirection
    directions = [better.MAXIMIZE if mode == "max" else better.MINIMIZE for mode in sweep.mode]
    return optuna.create_study(sampler=_sampler(sweep, 0), directions=directions)


def _sampler(sweep: SweepConfig, number: int) -> Any:
    """Return what proposes a trial: its draws depend on the number alone, so that a search that continues does not
    draw again what it has drawn."""
    from optuna.samplers import TPESampler

    seed = int(np.random.SeedSequence([sweep.search.seed, number]).generate_state(1)[0])
    return TPESampler(seed=seed, n_startup_trials=sweep.search.startup, constant_liar=True)


def _distribution(draw: Draw) -> Any:
    """Return Optuna's distribution: of places in a list, numbers of steps, or the values themselves."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if draw.values:
        return CategoricalDistribution(tuple(range(len(draw.values))))
    low, high = draw.range[:2]
    if draw.randint:
        return IntDistribution(int(low), int(high))
    if draw.quniform:
        return IntDistribution(0, round((high - low) / draw.range[2]))
    return FloatDistribution(low, high, log=draw.loguniform is not None)


def _value(draw: Draw, parameter: Any) -> Any:
    if draw.values:
        return draw.values[parameter]
    return step_value(draw.range[0], draw.range[2], parameter) if draw.quniform else parameter


def _parameter(draw: Draw, value: Any) -> Any:
    if draw.values:
        return [plain(choice) for choice in draw.values].index(plain(value))
    return round((value - draw.range[0]) / draw.range[2]) if draw.quniform else value
