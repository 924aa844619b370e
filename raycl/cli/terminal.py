"""Output of commands: unchanged texts, except for characters that a terminal obeys."""

from __future__ import annotations

import sys
from typing import Any

from raycl.errors import printable


def echo(text: object = "", **options: Any) -> None:
    """Print texts; `options` are those of `print`."""
    print(printable(str(text)), **options)


def log_to_stderr() -> None:
    """Log lines, without decoration."""
    import logging

    from raycl.launch.console import PlainFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
