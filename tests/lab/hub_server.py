"""A stand-in for the Hugging Face hub: repositories of models over HTTP, as `huggingface_hub` asks for them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Hub:
    """What the server has.

    Attributes:
        commits: repository -> its commits, the last one being `main`; a commit is a folder whose name is its id.
        sent: files of repositories whose contents went out, in order.
    """

    commits: dict[str, list[Path]] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    url: str = ""

    def folder(self, repository: str, revision: str) -> Path | None:
        known = {folder.name: folder for folder in self.commits.get(repository, [])}
        return self.commits[repository][-1] if revision == "main" and known else known.get(revision)


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub at a free port of this machine while the block runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            if match := re.fullmatch(r"api/models/(.+)/(revision|tree)/([^/]+)", path):
                repository, what, revision = match.groups()
                folder = hub.folder(repository, revision)
                self._json(folder and (_info if what == "revision" else _tree)(repository, folder))
            elif match := re.fullmatch(r"(.+)/resolve/([^/]+)/(.+)", path):
                repository, revision, name = match.groups()
                self._file(hub.folder(repository, revision), name)
            else:
                self._json(None)

        def _json(self, content: object) -> None:
            self._send(json.dumps(content or {"error": "not found"}).encode(), 200 if content else 404)

        def _file(self, folder: Path | None, name: str) -> None:
            if folder is None or not (folder / name).is_file():
                return self._send(b"", 404, **{"X-Error-Code": "EntryNotFound"})
            if self.command == "GET":
                hub.sent.append(name)
            data = (folder / name).read_bytes()
            return self._send(data, 200, ETag=f'"{_sha(data)}"', **{"X-Repo-Commit": folder.name})

        def _send(self, data: bytes, status: int, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
        server.shutdown()


def _files(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(file.relative_to(folder)), file.read_bytes()) for file in sorted(folder.rglob("*")) if file.is_file()]


def _info(repository: str, folder: Path) -> object:
    siblings = [{"rfilename": name} for name, _ in _files(folder)]
    return {"id": repository, "modelId": repository, "sha": folder.name, "siblings": siblings, "tags": []}


def _tree(_: str, folder: Path) -> object:
    return [{"type": "file", "path": name, "size": len(data), "oid": _sha(data)} for name, data in _files(folder)]


def _sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
