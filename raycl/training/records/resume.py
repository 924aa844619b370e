"""The point a run resumes from: the newest checkpoint that all workers can read, and the phase records it covers.

A checkpoint can be damaged after it was written. The one before it gives the same run, bit for bit, if everything
recorded after it is ignored: a later phase must not start from a model that is older than it. Workers may see different
files (a node's cache, a local copy): they read each checkpoint together, so that all continue from the same one or stop
with the same error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raycl.errors import CheckpointError, RunError, StorageError
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import RunState
from raycl.training.records.tensor_objects import TensorObjects
from raycl.training.workers.distributed import DistributedContext


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run resumes.

    Attributes:
        checkpoint: None: the start of the stream.
        checkpoints, phases: records of the journal that count from now on.
        problems: why newer checkpoints cannot be used; empty if the newest one is.
        lost: number of phase records that are ignored from now on.
    """

    checkpoint: Checkpoint | None
    checkpoints: list[str]
    phases: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    lost: int = 0

    @property
    def explanation(self) -> str:
        """The problems and what is done about them, as a message."""
        where = f"checkpoint '{self.checkpoints[-1]}'" if self.checkpoints else "the start of the stream"
        again = f", and learns the last {self.lost} finished phases again" if self.lost else ""
        return f"{'; '.join(self.problems)}: the run continues from {where}{again}; its results will be the same"


def load_checkpoint(context: TrainingContext, checkpoint: Checkpoint) -> None:
    """Give method and modifiers the state of a checkpoint; at the end of a phase, the backbone what was learned."""
    context.method.load_state_dict(checkpoint.method, checkpoint.frozen_state)
    context.modifiers.load_state(checkpoint.modifiers, checkpoint.frozen_state)
    if checkpoint.is_phase_end:
        context.load_learned(checkpoint.parameters)


def newest_resume_point(
    storage: Storage,
    state: RunState,
    world: DistributedContext,
    objects: TensorObjects | None = None,
    restore: Callable[[], bool] = lambda: False,
    elsewhere: int = 0,
) -> ResumePoint:
    """Return the newest checkpoint that every worker can read. Collective.

    Args:
        objects: see `read_checkpoint`.
        restore: completes the bank whose objects checkpoints name, and returns whether that changed anything; called
            once, on the first worker, where a checkpoint cannot be read.
        elsewhere: number of earlier phases that other worker groups learn, and `state` does not record.

    Raises:
        RunError: phases are finished but no checkpoint is whole, or one is of another version.
        StorageError: the storage is out of reach.
    """
    names, phases, manifests = state.checkpoints, state.phases, state.manifests
    point, problems, newest, tried = None, [], len(names) - 1, False
    while point is None and newest >= 0:
        point, reasons = _read_by_all(storage, names[newest], manifests, elsewhere + len(phases), world, objects)
        if point is None and not tried:
            tried = True
            with world.shared_errors():
                restored = world.is_first and restore()
            if world.broadcast(restored):
                continue
        problems += reasons
        newest -= point is None
    if point is None and phases:
        raise RunError(
            f"no checkpoint of '{storage.uri}' is whole, though {len(phases)} phases are finished "
            f"({'; '.join(problems) or 'none is recorded'}): restore one from a copy, or start a new run"
        )
    kept = phases[: point.covers - elsewhere] if point is not None else []
    lost = len(phases) - len(kept)
    if lost and not problems:
        problems.append(f"checkpoint '{names[newest]}' is older than the last phase record")
    return ResumePoint(point, names[: newest + 1], kept, problems, lost)


def _read_by_all(
    storage: Storage,
    name: str,
    manifests: Mapping[str, str],
    phases: int,
    world: DistributedContext,
    objects: TensorObjects | None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return a checkpoint, or None and why some worker cannot use it: the same result on every worker.

    Raises:
        RunError, StorageError: the error of any worker for which an older checkpoint would not help.
    """
    checkpoint, error = None, None
    try:
        checkpoint = read_checkpoint(storage, name, objects, sha256=manifests[name])
        if checkpoint.phase > phases:
            raise CheckpointError(
                f"checkpoint '{name}' is of phase {checkpoint.phase}, but {phases} phases are recorded"
            )
    except (RunError, StorageError) as raised:
        error = raised
    damage = isinstance(error, CheckpointError)
    world.raise_any(None if damage else error)
    reasons = world.gather(str(error) if damage else "")
    if not any(reasons):
        return checkpoint, []
    if len(set(reasons)) == 1:
        return None, reasons[:1]
    return None, [f"worker {rank + 1} of {len(reasons)}: {reason}" for rank, reason in enumerate(reasons) if reason]
