"""The folder of a task that a worker group has learned by itself, in that of the run (`launch.parallel_tasks`).

It is a folder like the run's own, with a journal, checkpoints, a trace and a log. Its journal has two records: what the
training of the task took, and the row of the matrix that was scored once all earlier tasks were learned. When the run
has joined the task, its checkpoints are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raycl.errors import CheckpointError, RunError
from raycl.storage import Storage
from raycl.training.definition.job import TaskPart
from raycl.training.records import checkpoint as checkpoints
from raycl.training.records.checkpoint import Checkpoint, read_checkpoint
from raycl.training.records.journal import RunState, read_state
from raycl.training.records.tensor_objects import SharedReader, TensorObjects
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase


@dataclass(frozen=True)
class TaskRecords:
    """The records in the journal of a task's own folder.

    Attributes:
        storage: the folder. state: state of its journal.
    """

    storage: Storage
    state: RunState

    @staticmethod
    def of(run: Storage, phase: Phase, world: DistributedContext | None = None) -> TaskRecords:
        """Read the journal of a phase's task; with several workers the first one reads. Collective.

        Raises:
            RunError: a record is damaged.
        """
        storage = run.sub(TaskPart("learn", phase.index, phase.name).folder)
        if world is None or world.size == 1:
            return TaskRecords(storage, read_state(storage))
        with world.shared_errors():
            state = read_state(storage) if world.is_first else RunState()
        return TaskRecords(storage, world.broadcast(state))

    @property
    def learned(self) -> dict[str, Any] | None:
        """The record of the training; None: it is not over, or the task was joined and its checkpoints are deleted."""
        if not self.state.phases:
            return None
        manifest = f"{checkpoints.FOLDER}/{self.state.checkpoints[-1]}/{checkpoints.MANIFEST}"
        return self.state.phases[0] if self.storage.exists(manifest) else None

    @property
    def scored(self) -> dict[str, Any] | None:
        """The record of the phase's row of the matrix; None: it is not scored."""
        return self.state.phases[1] if self.learned is not None and len(self.state.phases) > 1 else None

    def checkpoint(self, world: DistributedContext, shared: SharedReader | None = None) -> Checkpoint:
        """Return the last checkpoint of the task. Collective.

        Raises:
            RunError: it is damaged.
        """
        name = self.state.checkpoints[-1]
        objects = TensorObjects(self.storage, None, shared)
        with world.shared_errors():
            try:
                read = read_checkpoint(self.storage, name, objects, sha256=self.state.manifests[name])
            except CheckpointError as error:
                raise RunError(f"{error}, or remove '{self.storage.uri}', and the task is learned again") from error
        return read

    def delete(self) -> None:
        """Delete what the run has of its own now: the checkpoints and their tensors."""
        self.storage.delete(checkpoints.FOLDER)
        self.storage.delete("objects")
