"""Who may ask, and how large a request may be: pure ASGI, before anything is parsed.

What it does not know: what is asked.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from pathlib import Path
from typing import Any

from raycl.errors import ConfigError
from raycl.serve.settings import AuthConfig, ServeConfig

OPEN = ("/", "/healthz", "/readyz", "/openapi.json", "/playground/")
"""Paths that need no key: what loads the page that asks for one, and what probes look at."""


class Keys:
    """API keys and those that may also administer."""

    def __init__(self, config: AuthConfig) -> None:
        """Read them.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        lines = os.environ.get(config.keys_env, "").split(",")
        if config.keys_file is not None:
            try:
                lines += Path(config.keys_file).read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise ConfigError(f"auth.keys_file '{config.keys_file}' cannot be read: {error.strerror}") from error
        found = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        self._admin = [key.removeprefix("admin:").encode() for key in found if key.startswith("admin:")]
        self._plain = [key.encode() for key in found if not key.startswith("admin:")]
        if config.keys_file is not None and not found:
            raise ConfigError(f"auth.keys_file '{config.keys_file}' holds no key: write one a line")

    def __bool__(self) -> bool:
        return bool(self._admin or self._plain)

    def knows(self, key: bytes, admin: bool) -> bool:
        """Whether it is one of them; takes as long whichever it is, or none."""
        allowed = self._admin if admin else [*self._admin, *self._plain]
        return sum(hmac.compare_digest(key, other) for other in allowed) > 0


def check_access(config: ServeConfig) -> Keys:
    """The keys, if the endpoint may start with them.

    Raises:
        ConfigError: it would be open to the network.
    """
    keys = Keys(config.auth)
    if not keys and not is_loopback(config.host):
        raise ConfigError(
            f"host={config.host} lets others on the network in, and there are no API keys: set auth.keys_file, or "
            f"{config.auth.keys_env}, or host=127.0.0.1"
        )
    return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Gate:
    """ASGI middleware: keys and size of bodies."""

    def __init__(self, app: Any, keys: Keys, body_bytes: int) -> None:
        self.app, self.keys, self.body_bytes = app, keys, body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refused = self._refused(scope["path"], headers)
        if refused is not None:
            await _answer(send, *refused)
            return
        left, too_large = self.body_bytes, False

        async def counted() -> Any:
            nonlocal left, too_large
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0 and not too_large:
                too_large = True
                raise _TooLargeError
            return message

        try:
            await self.app(scope, counted, send)
        except _TooLargeError:
            await _answer(send, 413, self._too_large(), "invalid_request_error")

    def _refused(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        admin = path.startswith("/admin")
        if self.keys and (admin or not (path in OPEN or path.startswith("/playground/"))):
            given = headers.get(b"authorization", b"")
            key = given[7:].strip() if given[:7].lower() == b"bearer " else b""
            if not self.keys.knows(key, admin):
                kind = "an admin key" if admin else "an API key"
                return 401, f"{kind} is needed: send 'Authorization: Bearer KEY'", "authentication_error"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.body_bytes:
            return 413, self._too_large(), "invalid_request_error"
        return None

    def _too_large(self) -> str:
        return f"the request is larger than {self.body_bytes // 1024} KiB: send less text"


class _TooLargeError(Exception):
    """The body goes on beyond the limit."""


async def _answer(send: Any, status: int, message: str, kind: str) -> None:
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
