"""Tests of access to the endpoint, whatever prefix the application stands behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from raycl import config as configs
from raycl.errors import ConfigError
from raycl.launch.http import connections
from raycl.launch.http.connections import is_local, is_loopback
from raycl.serve.http.access import AccessMiddleware, Keys, check_access, guarded
from raycl.serve.settings import AuthConfig, LimitsConfig, ServeConfig, load_serve_config


@pytest.mark.parametrize("prefix", ["", "/", "/models/mine", "/models/mine/"])
@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/admin/activate", "plain", 401),
        ("/admin/activate", "boss", 200),
        ("/v1/models", "plain", 200),
        ("/v1/models", "", 401),
        ("/healthz", "", 200),
        ("/playground/page.js", "", 200),
    ],
)
def test_a_path_prefix_changes_no_access_rights(tmp_path: Path, prefix: str, path: str, key: str, status: int) -> None:
    (tmp_path / "keys").write_text("plain\nadmin:boss\n")
    gate = AccessMiddleware(PlainTextResponse("in"), Keys(AuthConfig(keys_file=str(tmp_path / "keys"))), LimitsConfig())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = TestClient(gate, base_url="http://localhost", root_path=prefix, client=("10.0.0.7", 50_000))
    assert client.post(f"{prefix.rstrip('/')}{path}", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        ("127.0.0.1", 200),
        ("127.3.2.1", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("10.0.0.7", 403),
        ("::ffff:10.0.0.7", 403),
        ("fe80::1%eth0", 403),
        ("localhost.evil.example", 403),
        (None, 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/admin/activate", "/v1/classify", "/healthz"])
def test_without_keys_others_on_the_network_are_refused(path: str, peer: str | None, status: int) -> None:
    """Whatever Host they send: a proxy in front may listen on every address."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await gate({**scope, "client": peer and (peer, 50_000)}, receive, send)

    gate = AccessMiddleware(PlainTextResponse("in"), Keys(AuthConfig()), LimitsConfig())
    response = TestClient(app, base_url="http://localhost").post(path)
    assert response.status_code == status and (status == 200 or "only requests from this machine" in response.text)


PAGE = "https://app.example.org"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


@pytest.mark.parametrize(("origins", "allowed"), [([], False), ([PAGE], True), (["https://other.example.org"], False)])
def test_pages_of_other_origins_may_ask_where_the_setting_names_them(origins: list[str], allowed: bool) -> None:
    config = configs.validate(ServeConfig, {"bank": "b", "auth": {"allowed_origins": origins}})
    client = TestClient(
        guarded(PlainTextResponse("in"), check_access(config), config),
        base_url="http://localhost",
        client=("127.0.0.1", 50_000),
    )
    answered = client.post("/v1/completions", headers={"Origin": PAGE})
    assert answered.status_code == 200 and answered.headers.get("access-control-allow-origin", "") == PAGE * allowed
    asked = client.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
    assert asked.headers.get("access-control-allow-origin", "") == PAGE * allowed
    if allowed:
        assert asked.status_code == 200 and "x-stainless-os" in asked.headers["access-control-allow-headers"]


def test_origins_are_logged_as_pages_that_may_ask(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no servers that raycl asks, as the addresses are of which it says that the config names them."""
    monkeypatch.setattr(logging.getLogger("raycl"), "propagate", True)
    load_serve_config(None, ["bank=b", f"auth.allowed_origins=[{PAGE}]"])
    assert caplog.messages == [f"web pages of '{PAGE}' may send requests (auth.allowed_origins)"]


def test_every_origin_is_allowed_with_keys_only(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("plain\n")
    open_to_all: dict[str, Any] = {"allowed_origins": ["*"]}
    with pytest.raises(ConfigError, match=r"auth\.allowed_origins has '\*'.*no API keys: name the pages' origins"):
        check_access(configs.validate(ServeConfig, {"bank": "b", "auth": open_to_all}))
    with_keys = open_to_all | {"keys_file": str(tmp_path / "keys")}
    assert check_access(configs.validate(ServeConfig, {"bank": "b", "auth": with_keys}))
    with pytest.raises(ConfigError, match="allowed_origins"):
        configs.validate(ServeConfig, {"bank": "b", "auth": {"allowed_origins": ["https://a.example/page"]}})


def test_a_host_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request asks about its client and its Host header."""
    hosts = {b"127.0.0.1:8123": True, b"example.org": False, b"[::1]:80": True}
    assert {host: is_local(host) for host in hosts} == hosts and is_loopback("127.0.0.9")
    monkeypatch.setattr(connections, "ipaddress", None)
    monkeypatch.setattr(connections, "urlsplit", None)
    assert {host: is_local(host) for host in hosts} == hosts and is_loopback("127.0.0.9")
