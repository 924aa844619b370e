"""The server of the page: `/` and its files, `/status.json`, which it requests every two seconds, and the report."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from raycl.errors import LaunchError, RayclError
from raycl.launch.http.connections import LimitedProtocol, bound, is_local, is_loopback, server_of
from raycl.launch.http.page_files import add_page
from raycl.launch.page.progress import progress_of
from raycl.launch.status import read_run
from raycl.storage import Storage
from raycl.training.records.journal import JournalReader
from raycl.training.records.progress import TraceReader

PORT, PORTS = 8300, 20
"""The first port that is tried where none is given, and how many."""

FRESH_S = 1.0
"""Age up to which what was read is answered again: several windows cost no more than one."""

REPORT_S = 30
"""Seconds after which a browser loads the report of a running run again."""

CLOSE_S = 2
"""Seconds for answers that have begun when the server ends."""


class RunReader:
    """Reads one run whenever it is asked, and remembers the last reading.

    Args:
        fresh_s: age in seconds up to which the last reading is returned again.

    Raises:
        RayclError: there is no run, or it cannot be read now.
    """

    def __init__(self, folder: str, fresh_s: float = FRESH_S) -> None:
        self._fresh_s = fresh_s
        self.storage: Storage = Storage.at(folder)
        self._journal, self._trace = JournalReader(self.storage), TraceReader(self.storage)
        self._lock = threading.Lock()
        self._found = self._read()
        self._looked = time.monotonic()

    def progress(self) -> dict[str, Any]:
        """Return what is known of the run (`progress_of`), with `problem`: why it is not what the files say now."""
        with self._lock:
            if time.monotonic() - self._looked > self._fresh_s:
                try:
                    self._found = self._read()
                except RayclError as error:
                    self._found = {**self._found, "problem": str(error)}
                self._looked = time.monotonic()
            return self._found

    def _read(self) -> dict[str, Any]:
        return {**progress_of(read_run(self.storage, self._journal), self._trace), "problem": None}


def make_app(reader: RunReader, local_only: bool, report: Callable[[], str] | None = None) -> FastAPI:
    """Return the ASGI application.

    Args:
        local_only: requests for another host are refused: a web page elsewhere may have its name point here.
        report: makes the run's report in HTML; None: there is none.
    """
    app = FastAPI(title="raycl status", docs_url=None, redoc_url=None, openapi_url=None)
    add_page(app, __package__ or "", "/page")

    @app.get("/status.json")
    def status() -> Response:
        return JSONResponse(reader.progress(), headers={"Cache-Control": "no-store"})

    @app.get("/report.html")
    def whole() -> Response:
        if report is None:
            return PlainTextResponse("this server has no report: raycl report RUN_DIR --html FILE writes one", 404)
        try:
            page = report()
        except RayclError as error:
            return PlainTextResponse(str(error), 404, {"Refresh": str(REPORT_S)})
        again = {"Refresh": str(REPORT_S)} if reader.progress()["state"] == "running" else {}
        return HTMLResponse(page, headers={"Cache-Control": "no-store", **again})

    @app.middleware("http")
    async def check_host(request: Request, call_next: Any) -> Response:
        if local_only and not is_local(request.headers.get("host", "localhost").encode("latin-1")):
            return PlainTextResponse("only requests to 127.0.0.1 or localhost are answered", 403)
        answer: Response = await call_next(request)
        return answer

    return app


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket on this port; without one, on the first of `PORTS` from `PORT` on that is free.

    Raises:
        LaunchError: the port is taken, or the host is none of this machine's.
    """
    tried = [port] if port is not None else range(PORT, PORT + PORTS)
    for number in tried[:-1]:
        with suppress(LaunchError):
            return bound(host, number, setting="--port ")
    return bound(host, tried[-1], setting="--port ")


class PageServer:
    """The page of one run on one socket.

    Args:
        report: see `make_app`.
    """

    def __init__(
        self,
        reader: RunReader,
        listens: socket.socket,
        host: str,
        protocol: type[LimitedProtocol] = LimitedProtocol,
        report: Callable[[], str] | None = None,
    ) -> None:
        self._listens = listens
        settings: dict[str, Any] = {"lifespan": "off", "access_log": False, "timeout_graceful_shutdown": CLOSE_S}
        self._server = server_of(make_app(reader, is_loopback(host), report), protocol, **settings)

    def run(self) -> None:
        """Answer until Ctrl-C, or `stop` in another thread."""
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has closed its connections
            self._server.run([self._listens])

    def stop(self) -> None:
        """Let `run` return."""
        self._server.should_exit = True
