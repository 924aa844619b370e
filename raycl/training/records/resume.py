"""Where a run goes on: the newest checkpoint that all workers can read, and the stage records that it covers.

Why it exists: a checkpoint can be damaged after it was written. The one before it gives the same run, bit for bit, if
everything that was recorded after it is forgotten: a later stage must not start from a model that is older than it.
What it does not know: how a model takes its values back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raycl.errors import CheckpointError, RunError
from raycl.storage import Storage
from raycl.training.distributed import World
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import RunState


@dataclass(frozen=True)
class Place:
    """A place to go on from.

    Attributes:
        checkpoint: None: the start of the stream.
        checkpoints, stages: what the ledger says from now on.
        problems: why newer checkpoints are of no use; none where the newest one is used.
        lost: stage records that are ignored from now on.
    """

    checkpoint: Checkpoint | None
    checkpoints: list[str]
    stages: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    lost: int = 0

    @property
    def told(self) -> str:
        """The problems and what is done about them, for people."""
        where = f"checkpoint '{self.checkpoints[-1]}'" if self.checkpoints else "the start of the stream"
        again = f", and learns the last {self.lost} finished stages again" if self.lost else ""
        return f"{'; '.join(self.problems)}: the run goes on from {where}{again}; its results will be the same"


def newest_place(storage: Storage, state: RunState, world: World) -> Place:
    """Where to go on. Collective: the newest checkpoint that every worker can read.

    Raises:
        RunError: stages are finished but no checkpoint is whole, or one is of another version.
        StorageError: the storage is out of reach.
    """
    names, stages = state.checkpoints, state.stages
    mine, found, problems = _newest_whole(storage, names, len(stages))
    place = min(world.gather(mine))
    if place < mine:
        problems.append(f"another worker cannot read checkpoint '{names[mine]}'")
        found = read_checkpoint(storage, names[place]) if place >= 0 else None
    if found is None and stages:
        raise RunError(
            f"no checkpoint of '{storage.uri}' is whole, though {len(stages)} stages are finished "
            f"({'; '.join(problems) or 'none is recorded'}): restore one from a copy, or start a new run"
        )
    kept = stages[: found.covers] if found is not None else []
    lost = len(stages) - len(kept)
    if lost and not problems:
        problems.append(f"checkpoint '{names[place]}' is older than the last stage record")
    return Place(found, names[: place + 1], kept, problems, lost)


def _newest_whole(storage: Storage, names: list[str], stages: int) -> tuple[int, Checkpoint | None, list[str]]:
    """Its place among `names` (-1: none), what it holds, and why newer ones are of no use."""
    problems: list[str] = []
    for place in reversed(range(len(names))):
        try:
            found = read_checkpoint(storage, names[place])
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if found.stage <= stages:
            return place, found, problems
        problems.append(f"checkpoint '{names[place]}' is of stage {found.stage}, but {stages} stages are recorded")
    return -1, None, problems
