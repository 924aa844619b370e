"""The playground: a page at `/` that uses the endpoint as any other client would, and shows its answers and mixtures.

Why it exists: to see which adapters are active for a text. The page is plain files beside this one, without a
build step, and loads nothing from anywhere else; a content security policy enforces this.
What it does not know: the service; the page uses the endpoints alone.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import FastAPI, Request, Response

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "card.js": "text/javascript; charset=utf-8",
    "wire.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Every file of the page, and what it is."""

POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only these files, no script or style in the page itself, no other host, and no text that becomes markup."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_playground(app: FastAPI) -> None:
    """Serve the page at `/` and its files below `/playground/`."""
    for name in TYPES:
        _add_file(app, "/" if name == "index.html" else f"/playground/{name}", name)


def _add_file(app: FastAPI, path: str, name: str) -> None:
    content = resources.files(__name__).joinpath(name).read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:20]}"'}

    @app.get(path, include_in_schema=False)
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[name], headers=headers)
