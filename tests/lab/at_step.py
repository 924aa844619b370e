"""A tracker through which a test acts in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable


class At:
    """A tracker that calls `act` once `step` optimizer steps of the run are done."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step and "loss" in metrics:
            self.act()

    def table(self, step: int, name: str, columns: object, rows: object) -> None:
        """Nothing happens at a table."""
