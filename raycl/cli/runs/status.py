"""State of a run on any machine, its progress, and the next command; starts nothing.

raycl status RUN_DIR
raycl status RUN_DIR --web          the same as a page that follows the run, with its report, until Ctrl-C
"""

import argparse
import sys
from dataclasses import asdict

from raycl.cli.commands import echo, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="folder or URI of a run")
    parser.add_argument("--web", action="store_true", help="serve a page of it on this machine: tasks, loss, matrix")
    parser.add_argument(
        "--port", type=int, metavar="N", help="with --web: this port, 0 for any (default: the first free one from 8300)"
    )
    parser.add_argument("--host", help="with --web: address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--open", action="store_true", help="with --web: open the page in a browser")


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options of the page without it."""
    if not options.web and (options.port is not None or options.host or options.open):
        parser.error("--port, --host and --open need --web")
    if options.port is not None and not 0 <= options.port < 2**16:
        parser.error(f"--port is {options.port}: expected a number from 0 to 65535")


def run(options: argparse.Namespace) -> int:
    """Print the status, or serve its page."""
    from raycl.training.records.run_folder import run_at

    run_at(options.run)
    if options.web:
        return _serve(options)
    from raycl.launch.status import status_of

    status = status_of(options.run)
    show(options, status, asdict(status))
    return 0


def _serve(options: argparse.Namespace) -> int:
    import threading
    import webbrowser

    from raycl.launch.http.connections import is_loopback, url_of
    from raycl.launch.page.server import PageServer, RunReader, listen

    host = options.host or "127.0.0.1"
    reader = RunReader(options.run)
    with listen(host, options.port) as listens:
        url = url_of(host, listens.getsockname()[1])
        if not is_loopback(host):
            echo(f"note: with --host {host} everyone who reaches this machine can read the page", file=sys.stderr)
        show(options, f"status of {options.run} on {url} (Ctrl-C ends it)", {"run": options.run, "url": url})
        if options.open:  # a browser in the terminal would block the page's server
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        PageServer(reader, listens, host, report=lambda: report_of(options.run)).run()
    return 0


def report_of(folder: str) -> str:
    """Return the report of the rows that are evaluated so far, in HTML.

    Raises:
        RunError: there is none.
    """
    from raycl.metrics.run_results import find_results
    from raycl.operations.report.page.report_page import report_page

    return report_page(find_results(folder), folder.rstrip("/").rpartition("/")[2] or folder)
