"""`raycl train` as a file, for `ray job submit --working-dir . -- python jobs/train_stream.py`."""

from __future__ import annotations

import sys
from functools import partial

from raycl.cli.commands import run

main = partial(run, "train")

if __name__ == "__main__":
    sys.exit(main())
