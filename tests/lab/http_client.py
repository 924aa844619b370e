"""The endpoints behind a real server on a free loopback port, and their clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from local_endpoint import on_a_port
from openai import OpenAI
from service_client import WAIT_S, ServiceClient, serving

from raycl.bank import Bank
from raycl.serve.http.access import Keys
from raycl.serve.http.web import make_web
from raycl.serve.settings import AuthConfig


class Wire(ServiceClient):
    """A service, its server's address, and two clients."""

    def __init__(self, client: ServiceClient, port: int) -> None:
        super().__init__(client.service)
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False, verify=False)
        self.openai = self.client("no key")

    def client(self, key: str) -> OpenAI:
        """Return the official client with a key."""
        inner = httpx.Client(timeout=WAIT_S, trust_env=False, verify=False)  # no time is spent on certificates
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=inner)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """Post any JSON, and whatever else httpx takes."""
        return self.http.post(path, **({} if body is None else {"json": body}), **settings)

    def get(self, path: str) -> Any:
        """Return what is there, as JSON."""
        value = self.http.get(path)
        assert value.status_code == 200, value.text
        return value.json()

    def chat(self, text: str, **settings: Any) -> Any:
        """Ask for one turn."""
        messages: Any = [{"role": "user", "content": text}]
        return self.openai.chat.completions.create(**{"model": "auto", "messages": messages, **settings})


@contextmanager
def listening(bank: Bank, auth: AuthConfig | None = None, **settings: Any) -> Iterator[Wire]:
    """Serve the bank's service behind a server, until the end."""
    with serving(bank, **settings) as client, on_a_port(make_web(client.service, Keys(auth or AuthConfig()))) as port:
        wire = Wire(client, port)
        with wire.http:
            yield wire


def problem(response: httpx.Response) -> tuple[int, str]:
    """Return the status and message of a refusal, whose shape must be OpenAI's."""
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}, body
    message = body["error"]["message"]
    assert isinstance(message, str) and message and "\n" not in message and "Traceback" not in message
    return response.status_code, message
