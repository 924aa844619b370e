"""A bar for each trial that learns: the steps of its present task, from the heartbeat of its run."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from raycl.errors import StorageError
from raycl.launch.console import repeating
from raycl.launch.follow import FOLLOW_S, StepsBar
from raycl.operations.sweep.definition.sweep_folder import SweepFolder


@contextmanager
def steps_shown(folder: SweepFolder, running: Collection[int], every_s: float = FOLLOW_S) -> Iterator[None]:
    """Show the steps of running trials while this is open.

    Args:
        running: their numbers; another thread may change them. every_s: seconds between two looks.
    """
    bars: dict[int, StepsBar] = {}

    def look() -> None:
        numbers = tuple(running)
        for number in bars.keys() - set(numbers):
            bars.pop(number).end()
        for number in numbers:
            with suppress(StorageError):  # away for a moment: the next look shows it
                storage = folder.run(number).with_retries(0)
                if number not in bars:
                    bars[number] = StepsBar(storage, f"trial {number + 1} ")
                bars[number].look(storage)

    try:
        with repeating(look, every_s, "steps"):
            yield
    finally:
        for bar in bars.values():
            bar.end()
