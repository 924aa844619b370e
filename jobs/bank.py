"""Look into a bank of adapters, check it, move adapters in and out, clean up.

    python jobs/bank.py --bank runs/mine/bank list
    python jobs/bank.py --bank runs/mine/bank export --adapters agnews=0.7,yelp=0.3 --to folder [--merged]

Why it exists: the command-line door to `raycl.bank` and `raycl.bank.operations.exchange`.
What it does not know: how anything is stored.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from raycl.bank.operations.commands import answer
from raycl.bank.operations.options import make_parser
from raycl.errors import RayclError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 1 if it failed or found something wrong."""
    options = _parse(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("raycl").setLevel(logging.INFO)
    try:
        found = answer(options)
    except RayclError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.tree, indent=1) if options.json else found.text)
    return 0 if found.ok else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return make_parser(__doc__ or "").parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
