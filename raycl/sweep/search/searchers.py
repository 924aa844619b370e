"""Who proposes trials: a list made beforehand, or Optuna's TPE, for one metric or several; both go on where they were.

Why it exists: Tune asks a `Searcher`; ours write every proposal into the sweep's folder before the trial starts, and
are rebuilt from there, so nothing of Tune's own (pickled) state is ever read back.
What it does not know: how trials run, who stops them.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ray.tune.search import Searcher

from raycl import config as configs
from raycl.sweep.config import SweepConfig
from raycl.sweep.place import Place, plain
from raycl.sweep.search.space import Draw, Settings, in_order, step_value
from raycl.sweep.trials.trial import FAILED, SCORES, TASKS
from raycl.training.records.stop_signal import is_stopped

log = logging.getLogger("raycl")


class Remembering(Searcher, ABC):  # type: ignore[misc]
    """A searcher whose proposals are written down.

    Attributes:
        numbers: Tune's trial id -> number of the trial.
    """

    def __init__(self, sweep: SweepConfig, place: Place) -> None:
        super().__init__()
        self.sweep, self.place = sweep, place
        self.numbers: dict[str, int] = {}

    @abstractmethod
    def next_trial(self) -> tuple[int, Settings] | None:
        """Number and settings of the next trial; None: there is none."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """What Tune asks for."""
        found = self.next_trial()
        if found is None:
            return str(Searcher.FINISHED)
        number, settings = found
        self.numbers[trial_id] = number
        self.place.forgive(number)
        self.place.remember(number, settings)
        run = configs.as_tree(self.place.config(self.sweep, number, settings))  # here, where paths mean what they say
        return {"number": number, "settings": settings, "run": json.dumps(run)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing to learn from it."""

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Nothing: the sweep's folder has it all."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing."""

    def get_state(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class Planned(Remembering):
    """Trials of a list, in order."""

    def __init__(self, sweep: SweepConfig, place: Place, trials: Mapping[int, Settings]) -> None:
        super().__init__(sweep, place)
        self.left = dict(trials)

    def next_trial(self) -> tuple[int, Settings] | None:
        """The first that is left."""
        number = next(iter(self.left), None)
        return None if number is None else (number, self.left.pop(number))


class Guided(Remembering):
    """Optuna's TPE, told of every trial's scores.

    A trial that the scheduler stopped counts as pruned: TPE ranks it by the scores that it had on the way.
    """

    def __init__(self, sweep: SweepConfig, place: Place, again: Mapping[int, Settings]) -> None:
        """Args:
        again: trials that were proposed in an earlier session and not finished; they come first.
        """
        super().__init__(sweep, place)
        self.again = dict(again)
        self.study = _study(sweep)
        self.asked: dict[int, Any] = {}
        self.made = max([*place.settings(), -1]) + 1

    def tell_finished(self, settings: Settings, scores: Sequence[Sequence[float | None]], stopped: bool) -> None:
        """A trial of an earlier session.

        Args:
            scores: after each task, of each metric.
        """
        self.study.enqueue_trial(self._as_parameters(settings))
        trial = self.study.ask(self._distributions())
        for tasks, values in enumerate(scores, 1):
            self._on_the_way(trial, tasks, values)
        self._close(trial, scores[-1] if scores else [], stopped)

    def next_trial(self) -> tuple[int, Settings] | None:
        """One of an earlier session, or a fresh one."""
        if self.again:
            number = next(iter(self.again))
            settings = self.again.pop(number)
            self.study.enqueue_trial(self._as_parameters(settings))
            self.asked[number] = self.study.ask(self._distributions())
            return number, settings
        if self.made >= self.sweep.samples:
            return None
        trial = self.study.ask(self._distributions())
        number, self.made = self.made, self.made + 1
        self.asked[number] = trial
        return number, self._as_settings(trial.params)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """A row."""
        number = self.numbers.get(trial_id)
        if number in self.asked and TASKS in result:
            self._on_the_way(self.asked[number], int(result[TASKS]), self._values(result))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The last row, or an error."""
        number = self.numbers.get(trial_id)
        if number is None or number not in self.asked:
            return
        failed = error or not result or FAILED in result
        values = [] if failed or result is None else self._values(result)
        stopped = bool(values) and is_stopped(self.place.run(number), int((result or {})[TASKS]))
        self._close(self.asked.pop(number), values, stopped)

    def _values(self, result: Mapping[str, Any]) -> list[float | None]:
        return [result.get(f"{SCORES}{place}") for place in range(len(self.sweep.metrics))]

    def _on_the_way(self, trial: Any, tasks: int, values: Sequence[float | None]) -> None:
        if len(values) == 1 and values[0] is not None:
            trial.report(values[0], tasks)

    def _close(self, trial: Any, values: Sequence[float | None], stopped: bool) -> None:
        from optuna.trial import TrialState

        if not values or any(value is None for value in values):
            self.study.tell(trial, state=TrialState.FAIL)
        elif stopped:
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, list(values))

    def _distributions(self) -> dict[str, Any]:
        return {path: _distribution(draw) for path, draw in self.sweep.space.items() if draw.expr is None}

    def _as_settings(self, parameters: Mapping[str, Any]) -> Settings:
        found = {path: _value(self.sweep.space[path], value) for path, value in parameters.items()}
        return self.sweep.follow(in_order(found, self.sweep.space))

    def _as_parameters(self, settings: Settings) -> dict[str, Any]:
        drawn = {path: draw for path, draw in self.sweep.space.items() if draw.expr is None and path in settings}
        return {path: _parameter(draw, settings[path]) for path, draw in drawn.items()}


def _study(sweep: SweepConfig) -> Any:
    """An Optuna study in memory.

    Raises:
        ConfigError: Optuna is not installed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = sweep.search
    sampler = optuna.samplers.TPESampler(seed=search.seed, n_startup_trials=search.startup, constant_liar=True)
    better = optuna.study.StudyDirection
    directions = [better.MAXIMIZE if mode == "max" else better.MINIMIZE for mode in sweep.mode]
    return optuna.create_study(sampler=sampler, directions=directions)


def _distribution(draw: Draw) -> Any:
    """Optuna's words for the values; a listed one is its place in the list, and a stepped one its number of steps."""
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
        return [plain(one) for one in draw.values].index(plain(value))
    return round((value - draw.range[0]) / draw.range[2]) if draw.quniform else value
