"""`raycl report` as a file."""

from __future__ import annotations

import sys
from functools import partial

from raycl.cli.commands import run

main = partial(run, "report")

if __name__ == "__main__":
    sys.exit(main())
