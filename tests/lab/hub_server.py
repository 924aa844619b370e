"""A stand-in for the Hugging Face hub: repositories of models over HTTP, as `huggingface_hub` asks for them.

It reads and writes: files below 10 MB that are no safetensors come in the commit itself, others by the LFS protocol.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.hf_api
import pytest

LARGE = (".safetensors", ".bin", ".pkl")


@dataclass
class Hub:
    """The state of the server.

    Attributes:
        commits: repository -> its commits, the last one being `main`; a commit is a folder whose name is its id.
        sent: files of repositories whose contents went out, in order.
        root: folder of the commits and large files that clients write.
        received: SHA-256 of the large files that came in, in order.
        refused: whether the server refuses (403) to send or to take a file, by its name or SHA-256.
    """

    commits: dict[str, list[Path]] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    url: str = ""
    root: Path | None = None
    received: list[str] = field(default_factory=list)
    refused: Callable[[str], bool] = lambda _: False

    def folder(self, repository: str, revision: str) -> Path | None:
        known = {folder.name: folder for folder in self.commits.get(repository, [])}
        return self.commits[repository][-1] if revision == "main" and known else known.get(revision)

    def large(self, sha256: str) -> Path:
        """Return the path of a large file."""
        assert self.root is not None, "a hub that clients write to has a root"
        return self.root / "large" / sha256

    def create(self, repository: str) -> bool:
        """Begin a repository with an empty commit; False: it exists."""
        return repository not in self.commits and self.add(repository, []) is not None

    def add(self, repository: str, operations: list[dict[str, Any]]) -> Path:
        """Add a commit: the files of the one before it, changed by the operations of its request."""
        assert self.root is not None, "a hub that clients write to has a root"
        commits = self.commits.setdefault(repository, [])
        number = f"{len(commits)}:{json.dumps(operations)}:{repository}"
        folder = self.root / repository / hashlib.sha1(number.encode()).hexdigest()
        folder.mkdir(parents=True)
        if commits:
            shutil.copytree(commits[-1], folder, dirs_exist_ok=True)
        for operation in operations:
            value = operation["value"]
            file = folder / value.get("path", "")
            if operation["key"] == "deletedFile":
                file.unlink()
            elif operation["key"] in ("file", "lfsFile"):
                file.parent.mkdir(parents=True, exist_ok=True)
                is_large = operation["key"] == "lfsFile"
                file.write_bytes(
                    self.large(value["oid"]).read_bytes() if is_large else base64.b64decode(value["content"])
                )
        commits.append(folder)
        return folder


@contextmanager
def asked_by_this_process(root: Path) -> Iterator[Hub]:
    """A hub that this process reads and writes, with an empty cache; both below `root`."""
    with serving_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.root = root / "repositories"
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        own = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(root / "hf")}
        switches = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True}
        for name, value in {**own, **switches}.items():
            patch.setattr(huggingface_hub.constants, name, value)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        yield hub


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub at a free port of this machine while the block runs."""
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
            elif match := re.fullmatch(r"api/models/([^/]+/[^/]+)", path):
                folder = hub.folder(match[1], "main")
                self._json(folder and _info(match[1], folder))
            else:
                self._json(None)

        def do_POST(self) -> None:
            path, data = self.path.partition("?")[0].strip("/"), self._body()
            if path == "api/repos/create":
                given = json.loads(data)
                name = "/".join(filter(None, (given.get("organization"), given["name"])))
                status = 200 if hub.create(name) else 409
                self._send(json.dumps({"url": f"{hub.url}/{name}", "error": "it exists"}).encode(), status)
            elif path == "api/validate-yaml":
                self._json({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"api/models/(.+)/preupload/main", path):
                self._json({"files": [_mode(hub.folder(match[1], "main"), file) for file in json.loads(data)["files"]]})
            elif match := re.fullmatch(r"(.+)\.git/info/lfs/objects/batch", path):
                self._json({"transfer": "basic", "objects": list(map(_action, json.loads(data)["objects"]))})
            elif match := re.fullmatch(r"api/models/(.+)/commit/main", path):
                header, *operations = map(json.loads, data.splitlines())
                parent = header["value"].get("parentCommit")
                if parent not in (None, hub.commits[match[1]][-1].name):
                    return self._send(b'{"error": "a commit has happened since"}', 412)
                commit = hub.add(match[1], operations).name
                self._json({"commitUrl": f"{hub.url}/{match[1]}/commit/{commit}", "commitOid": commit})
            else:
                self._json(None)
            return None

        def do_PUT(self) -> None:
            sha256, data = self.path.rpartition("/")[2], self._body()
            if hub.refused(sha256):
                return self._send(b"{}", 403)
            assert hashlib.sha256(data).hexdigest() == sha256
            hub.large(sha256).parent.mkdir(parents=True, exist_ok=True)
            hub.large(sha256).write_bytes(data)
            hub.received.append(sha256)
            return self._send(b"", 200)

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _json(self, content: object) -> None:
            found = content is not None
            self._send(json.dumps(content if found else {"error": "not found"}).encode(), 200 if found else 404)

        def _file(self, folder: Path | None, name: str) -> None:
            if folder is None or not (folder / name).is_file():
                return self._send(b"", 404, **{"X-Error-Code": "EntryNotFound"})
            if hub.refused(name):
                return self._send(b"", 403)
            if self.command == "GET":
                hub.sent.append(name)
            data = (folder / name).read_bytes()
            return self._send(data, 200, ETag=f'"{_sha(data)}"', **{"X-Repo-Commit": folder.name})

        def _send(self, data: bytes, status: int, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    def _action(file: dict[str, Any]) -> dict[str, Any]:
        if hub.large(file["oid"]).is_file():
            return file
        return {**file, "actions": {"upload": {"href": f"{hub.url}/large/{file['oid']}"}}}

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


def _mode(folder: Path | None, file: dict[str, Any]) -> dict[str, Any]:
    """Return the way in which a file is to be sent, and git's id of the one that is there."""
    path, known = file["path"], None
    is_large = path.endswith(LARGE) or file["size"] > 10_000_000
    if folder is not None and (folder / path).is_file():
        data = (folder / path).read_bytes()
        known = hashlib.sha256(data).hexdigest() if is_large else _sha(b"blob %d\0%b" % (len(data), data))
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": known}


def _sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
