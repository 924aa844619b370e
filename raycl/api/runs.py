"""Runs: train on a stream, read the results, and continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycl import config as configs
from raycl.api.models import Model, load, with_texts
from raycl.api.tasks import InMemoryTask
from raycl.config import Tree
from raycl.errors import ConfigError, RunError, StorageError
from raycl.launch import console, driver, prepared_run, requested_run
from raycl.launch.console import repeating
from raycl.launch.prepared_run import Prepared
from raycl.methods.registry import DEFAULT_METHOD
from raycl.metrics.run_results import method_of, metric_of, read_results, tasks_of, values_of
from raycl.operations.report.matrix_picture import draw_matrix
from raycl.operations.report.plots import matrix_figure, save_png
from raycl.operations.report.tables import matrix_table
from raycl.storage import Storage
from raycl.training.records.journal import read_state
from raycl.training.records.publish import open_bank
from raycl.training.setup import run_config

log: logging.Logger = logging.getLogger("raycl")

POLL_S = 0.5

OnPhase = Callable[[Mapping[str, Any]], None]
"""Called in a thread of its own after each phase, with its journal record: `row` (scores by task), `times`, `bank`. An
error that it raises is logged; the run and later calls go on."""

Task = str | PathLike[str] | Mapping[str, Any] | InMemoryTask
"""A name of the stream's tasks, a path or URI, an entry of `stream.tasks`, or what `raycl.task` returns."""


def train(
    stream: str | Sequence[Task] | Mapping[str, Any] = "builtin",
    method: str | Mapping[str, Any] = DEFAULT_METHOD,
    *,
    backbone: str | PathLike[str] | Mapping[str, Any] | None = None,
    name: str | None = None,
    dir: str | PathLike[str] | None = None,
    on_phase: OnPhase | None = None,
    quiet: bool = False,
    **sections: Any,
) -> Run:
    """Train on a stream of tasks, one after another, to its end.

    Args:
        stream: Name of a stream (builtin, long-C, ...), a list of tasks, or settings of the section `stream`.
        method: Its name, or settings of the section `method`.
        backbone: Folder or hub id, or settings of the section `backbone`; None: the packaged one.
        name: Name of the run's folder (`output.name`).
        dir: Parent of the run's folder (`output.dir`).
        on_phase: Called in a thread of its own after each phase, with its journal record: `row` (scores by task),
            `times`, `bank`. An error that it raises is logged; the run and later calls go on.
        quiet: Print no progress, only errors; lines go to the handlers of your own logging, if it has any.
        sections: Other sections of the config, for example `train={"epochs": 3}`, `bank={"dir": "bank"}`;
            `launch={"mode": "local"}` trains in this process, without Ray.

    Raises:
        ConfigError: A setting does not exist or fit.
        RayclError: The run cannot start or failed.

    Examples:
        >>> rows = [("a pot of tea", "drink"), ("a bowl of rice", "food")] * 8
        >>> orders = raycl.task("orders", rows, [("tea", "drink")])
        >>> run = raycl.train([orders], method="slm", name="first", launch={"mode": "local"}, quiet=True)
        >>> run.tasks
        ['orders']
    """
    output = sections.pop("output", {})
    if not isinstance(output, Mapping):
        raise ConfigError(f"output is {_described(output)}: expected settings of the section output")
    output = {**output, **({"name": name} if name else {}), **({"dir": dir} if dir else {})}
    directory = Storage.at(output.get("dir") or run_config.default_directory())
    tree: Tree = {"output": output, "stream": _stream(stream, directory), "method": _named("method", method)}
    if backbone is not None:
        tree["backbone"] = _named("backbone", backbone)
    settings = with_texts({**sections, **tree})
    return _trained(lambda: prepared_run.prepare(run_config.from_tree(settings)), on_phase, quiet)


class Run:
    """A run in its folder, finished or not.

    Attributes:
        folder: Address of the folder.

    Examples:
        >>> run = raycl.Run("runs/first")
        >>> print(run)
        slm on orders, ...
    """

    folder: str

    def __init__(self, folder: str | PathLike[str]) -> None:
        """Open the run in this folder.

        Raises:
            ResumeError: There is none.
        """
        self._storage, self._config, _ = prepared_run.run_in(fspath(folder))
        self.folder = self._storage.address

    @property
    def results(self) -> Tree:
        """The content of `results.json`: the matrix so far, metrics, times.

        Raises:
            RunError: No task is finished yet.

        Examples:
            >>> run.results["finished"]
            True
        """
        return read_results(self.folder)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks in their order.

        Examples:
            >>> run.tasks
            ['orders']
        """
        return tasks_of(self.results)

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Scores `[phases, tasks]`: row i after phase i, 0 to 100; NaN: not evaluated.

        Examples:
            >>> run.matrix.shape
            (1, 1)
        """
        rows = [[np.nan if value is None else value for value in row] for row in values_of(self.results)]
        return np.array(rows, dtype=np.float64)

    @property
    def metrics(self) -> dict[str, Any]:
        """ap, f_ra, bwt, fwt and others (docs/guides/metrics.md); None: undefined.

        Examples:
            >>> print(run.metrics["f_ra"])  # a single task has no forgetting
            None
        """
        return dict(self.results["metrics"])

    @property
    def bank(self) -> str:
        """Address of its bank and its branch, for `raycl.load`.

        Examples:
            >>> run.bank
            '...runs/first/bank@main'
        """
        return f"{open_bank(self._config.bank, self._storage).storage.address}@{self._config.bank.branch}"

    def load(self, **settings: Any) -> Model:
        """Return what it has learned, as a model.

        Args:
            settings: Settings of serving; see `raycl.load`.

        Examples:
            >>> with run.load() as model:
            ...     answers = model.generate(["a cup of tea", "a loaf of bread"])
        """
        return load(self.bank, **settings)

    def add(self, *tasks: Task, on_phase: OnPhase | None = None, quiet: bool = False, **sections: Any) -> Run:
        """Learn more tasks, and return the run with them; its older tasks are kept as they are.

        Where its branch of the bank was rolled back, a new run learns them from there, and this one stays as it is.

        Args:
            tasks: Names of the stream's tasks, entries of `stream.tasks`, or what `raycl.task` returns.
            on_phase: As in `raycl.train`.
            quiet: As in `raycl.train`.
            sections: Settings that the added tasks have for themselves, for example
                `train={"epochs": 10, "learning_rate": 1e-3}`.

        Examples:
            >>> moods = raycl.task("moods", [("I love it", "good"), ("I hate it", "bad")] * 8, [("I like it", "good")])
            >>> run = run.add(moods, quiet=True)
            >>> run.tasks
            ['orders', 'moods']
        """
        added = list(map(configs.inline_yaml, _specs(tasks, self._directory)))
        settings = configs.flatten(with_texts(sections))
        overrides = [f"{key}={configs.inline_yaml(value)}" for key, value in settings.items()]
        return _trained(lambda: requested_run.prepared(None, overrides, self.folder, added, None), on_phase, quiet)

    def revise(self, task: Task, name: str | None = None, **options: Any) -> Run:
        """Learn one task again, with new data if given; returns a new run, this one stays as it is.

        Args:
            task: A learned task with its new data, or its name.
            name: Name of the new run's folder.
            options: `on_phase` and `quiet` of `raycl.train`.

        Examples:
            >>> rows = [("a pot of tea", "drink"), ("a bowl of rice", "food"), ("two scoops", "dessert")] * 8
            >>> better = run.revise(raycl.task("orders", rows, [("tea", "drink")]), name="second", quiet=True)
            >>> better.tasks
            ['moods', 'orders']
        """
        given = configs.inline_yaml(_spec(task, self._directory))
        overrides = [f"output.name={configs.inline_yaml(name)}"] if name else []
        return _trained(lambda: requested_run.prepared(None, overrides, self.folder, (), given), **options)

    def resume(self, **options: Any) -> Run:
        """Continue a run that was stopped; the result is that of a run that was not.

        Args:
            options: `on_phase` and `quiet` of `raycl.train`.

        Examples:
            >>> raycl.Run("runs/first").resume(quiet=True).results["finished"]
            True
        """
        return _trained(lambda: prepared_run.reopen(self.folder), **options)

    def plot(self, path: str | Path | None = None) -> Path:
        """Draw the matrix as a heat map, and return the file.

        Args:
            path: None: matrix.png, in the run's folder if it is local.

        Examples:
            >>> run.plot("first.png")
            PosixPath('first.png')
        """
        folder = f"{self._storage.path()}/" if self._storage.is_local else ""
        return save_png(matrix_figure([self.results]), path or f"{folder}matrix.png")

    def _repr_png_(self) -> bytes | None:
        """Return the matrix as a picture, where a notebook shows the run; None: no task is finished yet."""
        try:
            results = self.results
        except RunError:
            return None
        with TemporaryDirectory() as folder:
            return save_png(matrix_figure([results]), f"{folder}/matrix.png").read_bytes()

    @property
    def _directory(self) -> Storage:
        return run_config.directory(self._config)

    def __str__(self) -> str:
        return str(matrix_table(self.results))

    def __repr__(self) -> str:
        try:
            results = self.results
        except RunError:
            return f"Run('{self.folder}', no task is finished)"
        ap = metric_of(results, "ap")
        score = "" if ap is None else f", ap={ap:.1f}"
        return f"Run('{self.folder}', {method_of(results)}, tasks={tasks_of(results)}{score})"


def _trained(prepare: Callable[[], Prepared], on_phase: OnPhase | None = None, quiet: bool = False) -> Run:
    with _logged(quiet):
        prepared = prepare()
        with _watched(prepared.storage, on_phase):
            driver.train(prepared, driver.RunOptions(draw=draw_matrix))
    return Run(prepared.storage.address)


@contextmanager
def _logged(quiet: bool) -> Iterator[None]:
    """Print raycl's lines inside, with `quiet` errors alone; afterwards logging is as the caller has it."""
    if quiet and log.hasHandlers():
        yield
        return
    loggers = (log, logging.getLogger("raycl.progress"))
    levels, handlers, propagate = [logger.level for logger in loggers], log.handlers, log.propagate
    console.log_to_stderr(quiet)
    try:
        yield
    finally:
        for handler in log.handlers:
            handler.close()
        log.handlers, log.propagate = handlers, propagate
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _watched(storage: Storage, on_phase: OnPhase | None) -> Iterator[None]:
    """Call `on_phase` for each phase that is finished from now on."""
    if on_phase is None:
        yield
        return
    seen = len(read_state(storage).phases)

    def report() -> str:
        """Have `on_phase` called for new phases, and return why they cannot be read; "": they were."""
        nonlocal seen
        try:
            phases = read_state(storage).phases[seen:]
        except (RunError, StorageError) as error:
            return str(error)
        for record in phases:
            seen += 1
            calls.submit(on_phase, record).add_done_callback(_log_failed_call)
        return ""

    with ThreadPoolExecutor(1, "raycl-phases") as calls:
        try:
            with repeating(report, POLL_S, "raycl-watch"):  # the next call reads again what this one could not
                yield
        finally:
            if problem := report():
                log.warning("on_phase was not called for phases after the first %d: %s", seen, problem)


def _log_failed_call(call: Future[None]) -> None:
    if (error := call.exception()) is not None:
        log.error("on_phase failed: %s: %s; the run continues", type(error).__name__, error, exc_info=error)


def _stream(stream: str | Sequence[Task] | Mapping[str, Any], directory: Storage) -> Tree:
    if isinstance(stream, str) and stream:
        return {"name": stream}
    if isinstance(stream, Mapping):
        return {
            **stream,
            **{key: _specs(tasks, directory) for key in ("tasks", "unseen") if (tasks := stream.get(key))},
        }
    if not isinstance(stream, list | tuple) or not stream:
        raise ConfigError(
            f"a run cannot train on {_described(stream)}: expected the name of a stream, a list of tasks, or settings "
            "of the section stream; raycl.task(NAME, TRAIN, TEST) makes a task of rows"
        )
    return {"tasks": _specs(stream, directory)}


def _specs(tasks: Task | list[Task] | tuple[Task, ...], directory: Storage) -> list[Any]:
    """Return entries of `stream.tasks`; one task alone may stand for a list of one."""
    several = tasks if isinstance(tasks, list | tuple) else [tasks]
    return [_spec(task, directory) for task in several]


def _spec(task: Task, directory: Storage) -> Any:
    if isinstance(task, InMemoryTask):
        return task.saved(directory)
    if isinstance(task, Mapping):
        return with_texts(task)
    if isinstance(task, PathLike):
        return str(Path(task).absolute())  # a word without a slash is the name of a known task
    if not isinstance(task, str) or not task:
        raise ConfigError(
            f"{_described(task)} is no task: expected its name, an entry of stream.tasks, or what raycl.task(NAME, "
            "TRAIN, TEST) returns"
        )
    return task


def _described(value: object) -> str:
    """Return a value that is none of those expected, for a message: small ones as they are, others by their class."""
    plain = value is None or isinstance(value, str | int | float) or (isinstance(value, list | tuple) and not value)
    return repr(value) if plain else f"a {type(value).__name__}"


def _named(section: str, value: str | PathLike[str] | Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str | PathLike):
        raise ConfigError(f"{section} is {_described(value)}: expected its name, or settings of the section {section}")
    return {"name": value}
