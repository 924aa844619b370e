"""The files of a page, served with their types, a content security policy and a tag.

The playground and the page of a run's status are served in the same way, and share colours and icon.
"""

import hashlib
from collections.abc import Mapping
from importlib import resources

from fastapi import FastAPI, Request, Response

INDEX = "index.html"

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Suffix -> media type. Files with other suffixes are not part of a page."""

POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The policy: these files alone, no script or style in the page itself, no other host, no text as markup."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_files(package: str) -> dict[str, bytes]:
    """Return name -> content of the files that lie in a package, and of those that all pages share."""
    contents = {}
    for folder in (__package__, package):
        for file in resources.files(folder).iterdir():
            if file.name.endswith(tuple(TYPES)):
                contents[file.name] = file.read_bytes()
    return contents


def add_page(app: FastAPI, package: str, below: str) -> None:
    """Serve a page at `/`, and its files below a path.

    Args:
        package: package with `index.html` and the other files. below: a path such as `/playground`.
    """
    for name, content in page_files(package).items():
        _add_file(app, "/" if name == INDEX else f"{below}/{name}", content, TYPES[f".{name.rpartition('.')[2]}"])


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    headers: Mapping[str, str] = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:20]}"'}

    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)
