"""State of a run on any machine, its progress, and the next command; starts nothing.

raycl status RUN_DIR
raycl status RUN_DIR --web          the same as a page that follows the run, until Ctrl-C
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from raycl.cli.terminal import echo


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command's parser."""
    found = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("run", metavar="RUN_DIR", help="folder or URI of a run")
    found.add_argument("--web", action="store_true", help="serve a page of it on this machine: tasks, loss, matrix")
    found.add_argument(
        "--port", type=int, metavar="N", help="with --web: this port, 0 for any (default: the first free one from 8300)"
    )
    found.add_argument("--host", help="with --web: address to listen on (default: 127.0.0.1, this machine alone)")
    found.add_argument("--open", action="store_true", help="with --web: open the page in a browser")
    return found


def arguments(words: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    found = parser(prog)
    options = found.parse_args(words)
    if not options.web and (options.port is not None or options.host or options.open):
        found.error("--port, --host and --open need --web")
    if options.port is not None and not 0 <= options.port < 2**16:
        found.error(f"--port is {options.port}: expected a number from 0 to 65535")
    return options


def run(options: argparse.Namespace) -> int:
    """Print it, or serve its page."""
    from raycl.run.folder import run_at

    run_at(options.run)
    if options.web:
        return _serve(options)
    from raycl.launch.status import status_of

    echo(status_of(options.run))
    return 0


def _serve(options: argparse.Namespace) -> int:
    """Until Ctrl-C."""
    import threading
    import webbrowser

    from raycl.launch.http.address import is_loopback, url_of
    from raycl.launch.page.server import PageServer, RunReader, listen

    host = options.host or "127.0.0.1"
    reader = RunReader(options.run)
    with listen(host, options.port) as listens:
        url = url_of(host, listens.getsockname()[1])
        if not is_loopback(host):
            echo(f"note: with --host {host} everyone who reaches this machine can read the page", file=sys.stderr)
        echo(f"status of {options.run} on {url} (Ctrl-C ends it)", flush=True)
        if options.open:  # a browser in the terminal would keep the page waiting for its server
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        PageServer(reader, listens, host).run()
    return 0
