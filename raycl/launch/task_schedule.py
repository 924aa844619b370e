"""The order in which worker groups learn and score the tasks of a run that are learned at the same time.

Tasks are learned in the stream's order, as soon as a group is free. A row of the accuracy matrix can be scored once all
its tasks are learned; of several such rows the last one comes first, since it has the most tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from raycl.training.definition.job import TaskPart
from raycl.types import Phase


@dataclass
class TaskSchedule:
    """The parts of a run that are left, those that are being done, and those that failed.

    Attributes:
        waiting: parts that have not begun, in the order in which they are looked at.
        running, failed: parts that have.
    """

    waiting: list[TaskPart]
    running: list[TaskPart] = field(default_factory=list)
    failed: list[TaskPart] = field(default_factory=list)

    @staticmethod
    def of(phases: Iterable[Phase], learned: Collection[int], scored: Collection[int], first: int) -> TaskSchedule:
        """Return what is left of a run.

        Args:
            phases: phases that are not in the run's own records yet.
            learned: index of those whose task is learned. scored: index of those that need no row any more.
            first: index of the first one that groups learn; what comes before it the run does itself.
        """
        listed = list(phases)
        begins = [TaskPart("begin", phase.index, phase.name) for phase in listed if phase.index == first - 1]
        own = [phase for phase in listed if phase.index >= first]
        learn = [TaskPart("learn", phase.index, phase.name) for phase in own if phase.index not in learned]
        score = [TaskPart("score", phase.index, phase.name) for phase in reversed(own) if phase.index not in scored]
        return TaskSchedule([*begins, *learn, *score] if learn or score else [])

    def take(self) -> TaskPart | None:
        """Return a part that a free group does next; None: none can begin now."""
        part = next((part for part in self.waiting if self._is_ready(part)), None)
        if part is not None:
            self.waiting.remove(part)
            self.running.append(part)
        return part

    def _is_ready(self, part: TaskPart) -> bool:
        if part.kind != "score":
            return True
        needed = [other for other in (*self.waiting, *self.running, *self.failed) if other.kind != "score"]
        return all(other.phase > part.phase for other in needed)

    def end(self, part: TaskPart, failed: bool = False) -> None:
        """Record that a part is over."""
        self.running.remove(part)
        if failed:
            self.failed.append(part)

    @property
    def is_over(self) -> bool:
        """Return whether nothing is being done, and nothing can begin."""
        return not self.running and not any(map(self._is_ready, self.waiting))
