"""A command in a process of its own that gets a signal at a known place."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from raycl.cli.main import main


def interrupted(words: Sequence[str], where: str, result: Path, number: int = signal.SIGINT) -> None:
    """Run `raycl` with these words; its status goes to a file.

    Args:
        where: function (`module:name`) whose first call brings the signal.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new interpreter
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        setattr(owner, name, real)
        os.kill(os.getpid(), number)
        return real(*given, **named)

    setattr(owner, name, call)
    result.write_text(str(main(words)))
