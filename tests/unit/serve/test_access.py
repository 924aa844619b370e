"""Who may ask, whatever prefix the application stands behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from raycl.serve.http.access import AccessMiddleware, Keys
from raycl.serve.settings import AuthConfig, LimitsConfig


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
    client = TestClient(gate, base_url="http://localhost", root_path=prefix)
    assert client.post(f"{prefix.rstrip('/')}{path}", headers=headers).status_code == status
