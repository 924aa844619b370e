"""The evaluation gate: a snapshot is scored through the serving path, router and mixture included, on held-out rows.

A task that the candidate lacks is evaluated all the same. One whose rows are not those that it had, because it was
learned again, is evaluated on both.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raycl.data.stream import Stream
from raycl.errors import BankError
from raycl.scoring.general_ability import ability
from raycl.scoring.scored_task import recorded_settings
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.gate.earlier_rows import earlier_rows, stream_of
from raycl.serve.offline.evaluation import score_snapshot
from raycl.serve.offline.model import OfflineModel
from raycl.serve.service.opening import close_service, open_service
from raycl.serve.settings import ServeConfig
from raycl.types import Score, Task

log: logging.Logger = logging.getLogger("raycl")


@dataclass(frozen=True)
class GateResult:
    """The result of the gate.

    Attributes:
        before, after: task -> score of the active snapshot and of the candidate; tasks that are new have no `before`.
            A revised task is there twice: `animal (rows of snapshot 4)`, `animal (rows of snapshot 3)`.
        revised: tasks with other rows than they had. gone: such tasks whose earlier rows are not there any more.
        general: general ability of the active snapshot and of the candidate (`gate.general`); None: not measured.
        max_general_drop: points that it may fall by; None: any number.
    """

    active: int
    candidate: int
    before: dict[str, Score]
    after: dict[str, Score]
    max_drop: float
    revised: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    general: tuple[float, float] | None = None
    max_general_drop: float | None = None

    @property
    def general_drop(self) -> float:
        """Return the points by which general ability falls; negative: it grows; 0 where it is not measured."""
        return 0.0 if self.general is None else self.general[0] - self.general[1]

    @property
    def drops(self) -> dict[str, float]:
        """Task -> points lost, of tasks that the active snapshot has learned; negative: gained."""
        return {task: score.value - self.after[task].value for task, score in self.before.items()}

    @property
    def reason(self) -> str:
        """The reason of the decision: the task that falls most, by how much, and the rows of revised tasks."""
        drops = self.drops
        if self._loses_ability:
            return f"general ability falls by {self.general_drop:.1f} points, allowed are {self.max_general_drop:g}"
        if not self.passed:
            worst = max(drops, key=lambda task: drops[task])
            return f"{worst} falls by {drops[worst]:.1f} points, allowed are {self.max_drop:g}"
        old, new = f"rows of snapshot {self.active}", f"rows of snapshot {self.candidate}"
        notes = [f"{task}: {old} and {new}" for task in self.revised]
        notes += [f"{task}: {new} alone, since the {old} are gone" for task in self.gone]
        if self.general is not None:
            notes.append(f"general ability {self.general[0]:.1f}, then {self.general[1]:.1f}")
        most = round(max(drops.values(), default=0.0), 1)
        falls = f" by more than {most:.1f} points, allowed are {self.max_drop:g}" if most > 0 else ""
        return f"no task falls{falls}" + (f" ({'; '.join(notes)})" if notes else "")

    @property
    def passed(self) -> bool:
        """Return whether no task falls by more than allowed, and general ability does not."""
        return not self._loses_ability and all(drop <= self.max_drop for drop in self.drops.values())

    @property
    def _loses_ability(self) -> bool:
        return self.max_general_drop is not None and self.general_drop > self.max_general_drop


def judge(config: ServeConfig, candidate: int, object_store_cache: bool = False) -> GateResult:
    """Score the active snapshot and a candidate.

    Args:
        object_store_cache: adapters and routers come through the cluster's object store.

    Raises:
        BankError: the candidate does not exist or answers already; a task has no rows to evaluate on.
        RayclError: data or backbone cannot be read.
    """
    quiet = config.model_copy(update={"follow": config.follow.model_copy(update={"enabled": False})})
    service = open_service(quiet, object_store_cache)
    try:
        active, engine = service.snapshot_manager.active, service.engine
        if candidate == active.snapshot.number:
            raise BankError(f"snapshot {candidate} answers already: name another one")
        newer = service.snapshot_manager.open(candidate, check=True)
        stream = stream_of(newer.snapshot, config)
        known = {task.name for task in active.snapshot.tasks}
        learned = known | {task.name for task in newer.snapshot.tasks}
        tasks = [task for task in stream.tasks if task.name in learned]
        _check_rows(stream, tasks, learned, config)
        tasks = [task for task in tasks if stream.has_data(task)]
        earlier, revised, gone = earlier_rows(active.snapshot, newer.snapshot, stream, config)
        # as an endpoint answers texts alone, and both snapshots by one measure
        settings = recorded_settings(newer.snapshot, split=config.gate.split, instruction="chosen")
        rows = {task.name: f" (rows of snapshot {candidate})" for task in revised}
        old_rows = f" (rows of snapshot {active.snapshot.number})"

        def scores(loaded: LoadedSnapshot, tasks: Sequence[Task]) -> dict[str, Score]:
            model = OfflineModel(engine, loaded)
            now = score_snapshot(model, stream, tasks, settings)
            if revised:
                log.info("snapshot %d, on the rows of snapshot %d:", loaded.snapshot.number, active.snapshot.number)
            then = score_snapshot(model, earlier, revised, settings)
            named = {f"{name}{rows.get(name, '')}": score for name, score in now.items()}
            return named | {f"{name}{old_rows}": score for name, score in then.items()}

        log.info("snapshot %d, which answers now:", active.snapshot.number)
        before = scores(active, [task for task in tasks if task.name in known])
        log.info("snapshot %d:", candidate)
        after = scores(newer, tasks)
        result = GateResult(active.snapshot.number, candidate, before, after, config.gate.max_drop, tuple(rows), gone)
        if config.gate.max_general_drop is None:
            return result
        general = config.gate.general
        was, now = (ability(OfflineModel(engine, loaded).general(general)) for loaded in (active, newer))
        log.info("general ability: %.1f, then %.1f", was, now)
        return replace(result, general=(was, now), max_general_drop=config.gate.max_general_drop)
    finally:
        close_service(service)


def _check_rows(stream: Stream, tasks: Sequence[Task], learned: set[str], config: ServeConfig) -> None:
    missing = sorted(learned - {task.name for task in tasks})
    if missing:
        raise BankError(
            f"the candidate's stream has no {', '.join(missing)}: the active snapshot cannot be compared on it; "
            "activate the candidate without the gate if that is right"
        )
    split = config.gate.split
    for task in tasks:
        if not stream.has_data(task):
            log.warning("task '%s' is not evaluated: its data is out of reach", task.name)
    empty = [task.name for task in tasks if stream.has_data(task) and not len(stream.rows(task, split))]
    if empty:
        raise BankError(
            f"{', '.join(empty)}: no {split} rows to evaluate on; train with stream.dev_fraction above 0, or set "
            "gate.split=test"
        )
