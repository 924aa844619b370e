"""A sweep file: a base config, a space over its dotted paths, what counts as better, and how to search.

A sweep takes hours, so whatever can be wrong with any of its trials is an error before the first one starts: unknown
paths (with the nearest field), values of the wrong type, ends of ranges that no field takes.

The search space has the possible values of settings, by dotted path. Grids, random draws and Optuna read the same
description, and trial number i of a planned sweep is a function of the file and i alone, so a sweep that continues
plans what it had planned.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from raycl import config as configs
from raycl.backbone.markup.chat_templates import with_template_files
from raycl.config import Section, Tree, trust
from raycl.config.names import FolderName
from raycl.config.unused import covering, leaves, refuse, setting, unused_in
from raycl.errors import ConfigError
from raycl.operations.sweep.definition.expressions import Expression, parse, read_metric
from raycl.training.setup.run_config import RunConfig, from_tree

Mode = Literal["max", "min"]


Settings = dict[str, Any]
"""Dotted path -> value, of one trial."""


class Draw(Section):
    """The values of one setting; exactly one of these is given. Both ends of a range belong to it."""

    grid: tuple[Any, ...] | None = Field(
        None, min_length=1, description="each of these values, with each value of every other grid"
    )
    choice: tuple[Any, ...] | None = Field(None, min_length=1, description="one of these values")
    uniform: tuple[float, float] | None = Field(None, description="[low, high], drawn evenly")
    loguniform: tuple[float, float] | None = Field(None, description="[low, high], drawn evenly in the logarithm")
    quniform: tuple[float, float, float] | None = Field(None, description="[low, high, step], drawn from low + k step")
    randint: tuple[int, int] | None = Field(None, description="[low, high], drawn from the whole numbers")
    expr: str | None = Field(None, description="computed from other settings by their paths: 10 * train.learning_rate")

    @model_validator(mode="after")
    def _is_one(self) -> Draw:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"expected exactly one of {names}, found {', '.join(given) or 'none'}")
        low, high, *step = [*self.range, 1.0][:3] if self.range else (0.0, 1.0)
        if low >= high or (step and step[0] <= 0) or (self.loguniform and low <= 0):
            raise ValueError(f"{self.kind} is {list(self.range)}: expected low < high, and above 0 where it must be")
        if self.quniform and not math.isclose(high, low + round((high - low) / step[0]) * step[0], rel_tol=1e-9):
            raise ValueError(f"quniform is {list(self.range)}: high is not low plus whole steps")
        return self

    @field_validator("expr")
    @classmethod
    def _is_readable(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                parse(text)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return text

    @property
    def kind(self) -> str:
        """The kind of draw that is given."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def range(self) -> tuple[float, ...]:
        """Low, high and perhaps step; empty for lists and expressions."""
        return self.uniform or self.loguniform or self.quniform or self.randint or ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The listed values; empty for ranges and expressions."""
        return self.grid or self.choice or ()

    @property
    def corners(self) -> tuple[Any, ...]:
        """Values to check before anything starts: all that are listed, or both ends."""
        return self.values or self.range[:2]

    def drawn(self, draw: np.random.Generator) -> Any:
        """Return a random value."""
        if self.values:
            return self.values[int(draw.integers(len(self.values)))]
        low, high = self.range[:2]
        if self.randint:
            return int(draw.integers(int(low), int(high), endpoint=True))
        if self.loguniform:
            return min(high, max(low, math.exp(float(draw.uniform(math.log(low), math.log(high))))))
        if self.quniform:
            step = self.range[2]
            return step_value(low, step, int(draw.integers(round((high - low) / step), endpoint=True)))
        return float(draw.uniform(low, high))


Space = Mapping[str, Draw]


def step_value(low: float, step: float, number: int) -> float:
    """Return `low + number step` in its shortest form: 0.3, not 0.30000000000000004."""
    return float(f"{low + number * step:.12g}")


def planned(space: Space, samples: int, seed: int, follow: Callable[[Settings], Settings]) -> list[Settings]:
    """Return all trials: every combination of the grids, `samples` times, with fresh draws each time.

    Args:
        follow: adds the settings that follow from others (`expr`).
    """
    grids = {path: draw.grid for path, draw in space.items() if draw.grid is not None}
    rest = {path: draw for path, draw in space.items() if draw.grid is None and draw.expr is None}
    combinations = [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]
    trials = []
    for number in range(samples):
        for index, chosen in enumerate(combinations):
            draw = np.random.default_rng([seed, number, index])
            settings = chosen | {path: draw_rule.drawn(draw) for path, draw_rule in rest.items()}
            trials.append(follow(in_order(settings, space)))
    return trials


def key_of(settings: Settings) -> str:
    """Return the same key for equal settings, read from a file or not."""
    return json.dumps(settings, sort_keys=True, default=list)


def in_order(settings: Settings, space: Space) -> Settings:
    """Return settings in the order of the file."""
    return {path: settings[path] for path in space if path in settings}


class SearchConfig(Section):
    """The search algorithm."""

    name: Literal["random", "grid", "tpe"] = Field(
        "random",
        description="how trials are proposed. random: drawn; grid: every combination; tpe: Optuna's TPE, for one "
        "or several metrics",
    )
    seed: int = Field(0, ge=0, description="seed of random draws and of TPE")
    startup: int = Field(10, ge=1, description="tpe: random trials before the model is used")


class SchedulerConfig(Section):
    """Early stopping of trials between two tasks, by the first metric over the tasks seen."""

    name: Literal["none", "asha", "median"] = Field(
        "none", description="none: every trial runs to its end; asha: successive halving; median: stop below the median"
    )
    grace: int = Field(1, ge=1, description="tasks that every trial trains before it may be stopped")
    reduction: float = Field(
        3, gt=1, description="asha: one trial in so many continues at tasks grace, grace x reduction, ..."
    )
    least: int = Field(3, ge=1, description="median: trials that must have reached a task before one is stopped there")


class ResourcesConfig(Section):
    """Resources of one trial; all but `isolated` become `launch.*` of its run."""

    workers: int = Field(1, ge=1, description="worker processes of a trial")
    cpus_per_worker: float = Field(1.0, gt=0, description="CPUs that each worker reserves")
    gpus_per_worker: float | None = Field(None, ge=0, description="GPUs of a worker; null: 1 if the cluster has GPUs")
    isolated: bool = Field(
        False, description="a single worker too gets a fresh process for every trial, which takes 10 to 20 s to start"
    )


class SweepConfig(Section):
    """One sweep."""

    name: FolderName = Field(description="name of the sweep and of its folder")
    base: Tree = Field(default_factory=dict, description="config tree that all trials share")
    space: dict[str, Draw] = Field(min_length=1, description="dotted path -> its values")
    metric: tuple[str, ...] = Field(
        ("ap",), min_length=1, max_length=3, description="ap, ap - f_ra, task('agnews'), ...; several: a Pareto front"
    )
    mode: tuple[Mode, ...] = Field(("max",), description="direction of each metric")
    search: SearchConfig = SearchConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    samples: int = Field(1, ge=1, description="trials per combination of grids (random), or in total (tpe)")
    resources: ResourcesConfig = ResourcesConfig()
    concurrency: int | None = Field(None, ge=1, description="trials at a time; null: as many as the cluster holds")
    retries: int = Field(1, ge=0, description="further tries of a trial that failed")
    over: tuple[str, ...] = Field(
        (), description="paths (seed, stream.tasks) over which trials are averaged, with their spread"
    )
    singles: bool = Field(False, description="also train each task alone (`separate`), once per setting, for FWT")
    share: bool = Field(True, description="trials that agree on the first tasks train them once")

    @field_validator("metric", "mode", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("search", "scheduler", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("metric")
    @classmethod
    def _is_metric(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            try:
                read_metric(text)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return texts

    @model_validator(mode="after")
    def _agrees(self) -> SweepConfig:
        if len(self.mode) != len(self.metric):
            raise ValueError(f"mode has {len(self.mode)} entries and metric {len(self.metric)}: give one for each")
        if len(self.metric) > 1 and self.scheduler.name != "none":
            raise ValueError(f"scheduler '{self.scheduler.name}' compares one metric, but there are {len(self.metric)}")
        if any("fwt" in metric.names for metric in self.metrics) and not self.singles:
            raise ValueError("a metric names fwt, which needs every task trained alone: set singles=true")
        endless = [path for path, draw in self.space.items() if draw.range]
        if self.search.name == "grid" and (endless or self.samples > 1):
            what = f"'{endless[0]}' is a range" if endless else f"samples is {self.samples}"
            raise ValueError(f"search is grid, but {what}: list its values, or use search=random")
        try:
            _ = self._expressions
        except CycleError as error:
            raise ValueError(f"space: {' reads '.join(error.args[1])}: expected expressions in no circle") from error
        unknown = [path for path in self.over if path not in self.space]
        if unknown:
            raise ValueError(f"over names '{unknown[0]}': expected some of {', '.join(self.space)}")
        return self

    @cached_property
    def metrics(self) -> tuple[Expression, ...]:
        """The metrics, parsed."""
        return tuple(read_metric(text) for text in self.metric)

    @property
    def in_process(self) -> bool:
        """Return whether a trial's one worker works in the process that Tune has for the trial, and for the next one.

        Not under DeepSpeed, whose process group ends with the run and is not made again, and not where several tasks of
        a trial are learned at the same time.
        """
        base = self.tree({})
        other = "deepspeed" in str(base.get("engine")) or any(path.split(".")[0] == "engine" for path in self.space)
        return self.resources.workers * self.parallel_tasks == 1 and not (self.resources.isolated or other)

    @property
    def parallel_tasks(self) -> int:
        """The tasks of a trial that are learned at the same time."""
        return int(self.tree({})["launch"].get("parallel_tasks", 1))

    @property
    def plans(self) -> bool:
        """Return whether all trials are known before the first one runs."""
        return self.search.name != "tpe"

    def trials(self) -> list[Settings]:
        """Return the settings of every trial of a planned search, in order.

        With a scheduler a grid is shuffled: where the best stand last, each is better than all before it, and a rule
        that compares with earlier trials stops none.

        Raises:
            ConfigError: an expression cannot be computed.
        """
        assert self.plans, "tpe finds its trials on the way"
        space = self.space
        if self.search.name == "grid":  # has listed values alone
            space = {path: draw if draw.expr is not None else Draw(grid=draw.values) for path, draw in space.items()}
        trials = self._without_repeats(planned(space, self.samples, self.search.seed, self.follow))
        if self.scheduler.name == "none":
            return trials
        return [trials[index] for index in np.random.default_rng(self.search.seed).permutation(len(trials))]

    def collapsed(self, settings: Settings) -> Settings:
        """Return a trial's settings without those that the others leave without effect."""
        unused = unused_in(self.config(settings))
        return {path: value for path, value in settings.items() if covering(path, unused) is None}

    def _without_repeats(self, trials: list[Settings]) -> list[Settings]:
        """Drop settings without effect with a trial's others, and of trials that are then equal keep one."""
        distinct: list[Settings] = []
        seen: set[str] = set()
        for settings in trials:
            kept = self.collapsed(settings)
            key = key_of(kept)
            if len(kept) == len(settings) or key not in seen:
                distinct.append(kept)
            seen.add(key)
        return distinct

    def follow(self, settings: Settings) -> Settings:
        """Return the settings with those that follow from others, in the file's order; what an expression reads is
        computed before it.

        Raises:
            ConfigError: an expression names a path that does not exist, or cannot be computed.
        """
        followed = dict(settings)
        for path, expression in self._expressions.items():
            tree = configs.as_tree(configs.validate(RunConfig, self.tree(followed)))
            followed[path] = expression.value(partial(_at, tree))
        return in_order(followed, self.space)

    @cached_property
    def _expressions(self) -> dict[str, Expression]:
        """Path -> its expression, each after those that it reads.

        Raises:
            CycleError: two of them read each other.
        """
        parsed = {path: parse(draw.expr) for path, draw in self.space.items() if draw.expr is not None}
        read = {
            path: {other for other in parsed for name in expression.names if f"{name}.".startswith(f"{other}.")}
            for path, expression in parsed.items()
        }
        return {path: parsed[path] for path in TopologicalSorter(read).static_order()}

    def tree(self, settings: Settings) -> Tree:
        """Return the base with one trial's settings and resources."""
        tree = copy.deepcopy(self.base)
        ordered = sorted(settings.items(), key=lambda item: item[0].count("."))  # a node before what is in it
        for path, value in ordered:
            configs.assign(tree, path, copy.deepcopy(value), f"space '{path}'")
        given = self.resources.model_dump(exclude={"isolated"})
        launch = {key: value for key, value in given.items() if value is not None}
        tree["launch"] = {**tree.get("launch", {}), **launch}
        return tree

    def config(self, settings: Settings) -> RunConfig:
        """Return the run config of a trial.

        Raises:
            ConfigError: a path that no config has (names the nearest field), a value that its field does not take.
        """
        return from_tree(plain(self.tree(settings)))


def _at(tree: Tree, name: str) -> Any:
    """Return the value at a dotted path; of a node that names its choice, the name."""
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            raise KeyError(name)
        node = node[part]
    return node["name"] if isinstance(node, dict) and "name" in node else node


def plain(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON: tuples as lists, which YAML would have given."""
    return json.loads(json.dumps(value))


def load_sweep(file: str, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file and check every setting of its space against the config's fields and types.

    Args:
        overrides: `key.path=value`; behind `space.` the rest is one path, with or without the kind of draw:
            `space.train.epochs={grid: [1, 2]}` or `space.train.epochs.grid=[1,2]`; null takes it out of the space.

    Raises:
        ConfigError: the first thing that is wrong, or that only the command may allow (`raycl.config.trust`).
    """
    tree = configs.load_tree(file)
    for override in overrides:
        key, value = configs.read_override(override)
        if key.startswith("space."):
            path, _, kind = key.removeprefix("space.").rpartition(".")
            named: Tree = {path: {kind: value}} if path and kind in Draw.model_fields else {key[6:]: value}
            tree["space"] = {**tree.get("space", {}), **named}
        else:
            configs.assign(tree, key, value, f"override '{override}'")
    tree["space"] = {key: value for key, value in (tree.get("space") or {}).items() if value is not None}
    sweep = configs.validate(SweepConfig, {**tree, "base": with_template_files(tree.get("base") or {})})
    trials = check_space(sweep)
    # what any trial could ask for: in the base, a listed value, or by a rule for its path
    searched = {path for path in sweep.space if path.rpartition(".")[2] in trust.RISKS}
    trees = [configs.as_tree(config) for config in (sweep.config({}), *trials)]
    requested = {path for tree in trees for path in trust.requested(tree)} | searched
    trust.require(sorted(requested), overrides, f"sweep file '{file}'", "base.")
    refuse(_unused(sweep, trials), f"sweep file '{file}'")
    return sweep


def _unused(sweep: SweepConfig, configs_of: Sequence[RunConfig]) -> dict[str, str]:
    """Return settings of base and space that act on nothing in any of these trials -> the reason."""
    taken = [key for key in ResourcesConfig.model_fields if key != "isolated"]
    given = {"output": "--dir and the sweep's name", **{f"launch.{key}": f"resources.{key}" for key in taken}}
    written = {f"base.{setting(path, value)}": path for path, value in leaves(sweep.base).items()}
    written |= {f"space '{path}'": path for path in sweep.space}
    unused_reasons = {name: given[above] for name, path in written.items() if (above := covering(path, given))}
    trials = list(map(unused_in, configs_of))
    for name, path in written.items():
        reasons = [unused[above] for unused in trials if (above := covering(path, unused))]
        if len(reasons) == len(trials):
            unused_reasons[name] = reasons[0]
    return unused_reasons


def examples(sweep: SweepConfig) -> list[Settings]:
    """Return settings that a search may come to: each listed value or end of a range beside the others' first."""
    return [sweep.follow(settings) for _, settings in _corners(sweep)]


def _corners(sweep: SweepConfig) -> Iterator[tuple[str, Settings]]:
    """Yield a path, and settings with a corner of it beside the others' first."""
    first = {path: draw.corners[0] for path, draw in sweep.space.items() if draw.expr is None}
    for path in first:
        yield from ((path, first | {path: value}) for value in sweep.space[path].corners)


def check_space(sweep: SweepConfig) -> list[RunConfig]:
    """Check every listed value and both ends of every range, with the others at their first; then all planned trials.

    Returns:
        The configs of the first check, which are those of `examples`.

    Raises:
        ConfigError: names the path, and the nearest field where there is no such path.
    """
    if sweep.search.name == "tpe" and find_spec("optuna") is None:
        raise ConfigError("search=tpe needs Optuna: pip install 'raycl[sweep]', or use search=random")
    configs.validate(RunConfig, sweep.tree({}))
    checked = []
    for path, settings in _corners(sweep):
        try:
            checked.append(sweep.config(sweep.follow(settings)))
        except ConfigError as error:
            raise ConfigError(f"space.{path} = {settings[path]!r}: {error}") from error
    for settings in sweep.trials() if sweep.plans else []:
        sweep.config(settings)
    return checked
