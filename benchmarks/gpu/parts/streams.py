"""Streams of two tiny tasks: every family of methods on every kind of backbone gives the CPU's losses and answers.

Every figure is the largest difference as a share of its tolerance, so 1 is the target of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.figures import Figure
from benchmarks.gpu.battery import FAMILIES, KINDS, TOLERANCES, Battery, compare
from benchmarks.gpu.setup import Case, Setup


def cases(setup: Setup) -> Iterator[Case]:
    """float32 first, which is also resumed; where everything is tiny, each family once."""
    disable_progress_bar()
    battery = Battery(Path(setup.closing.enter_context(tempfile.TemporaryDirectory())))
    number = 0
    for dtype in TOLERANCES:
        for kind in KINDS:
            for family in list(FAMILIES)[number : number + 1] if setup.tiny else FAMILIES:
                yield Case(f"{dtype}, {kind}, {family}", partial(_figure, setup, battery, kind, family, dtype))
            number += 1


def _figure(setup: Setup, battery: Battery, kind: str, family: str, dtype: str, seconds: float) -> Iterator[Figure]:
    yield compare(battery, kind, family, dtype, setup.device)
