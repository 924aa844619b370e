"""`raycl compare` as a file, for `ray job submit`."""

from __future__ import annotations

import sys
from functools import partial

from raycl.cli.commands import run

main = partial(run, "compare")

if __name__ == "__main__":
    sys.exit(main())
