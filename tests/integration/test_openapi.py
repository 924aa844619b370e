"""Tests of requests that the endpoints' description allows, and of others: none ends in a 5xx, all is as described."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import schemathesis
from http_client import Wire, listening
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from service_client import bank_of
from tiny import Complete

CHECKED = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance),
    *(response_schema_conformance, negative_data_rejection, unsupported_method),
]
"""`positive_data_acceptance` is none of them: limits and unknown names refuse what the description allows."""

OPERATIONS = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/classify", "POST /v1/route"),
    *("GET /v1/models", "GET /v1/models/{name}", "GET /v1/adapters", "GET /v1/snapshots"),
    *("GET /v1/tasks", "GET /v1/metrics", "GET /v1/drift", "GET /admin/unsure"),
    *("POST /admin/activate", "GET /healthz", "GET /readyz"),
)
KINDS = {"llama": OPERATIONS, "bert": ("POST /v1/classify", "POST /v1/route", "POST /v1/completions")}
EACH = settings(max_examples=10, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module")
def wires(complete: Complete, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Wire]]:
    limits = {"max_tokens": 4, "n": 2}
    with ExitStack() as stack:
        banks = {kind: bank_of(complete(kind, "slm", "torch"), tmp_path_factory.mktemp(kind)) for kind in KINDS}
        yield {kind: stack.enter_context(listening(bank, limits=limits)) for kind, bank in banks.items()}


@pytest.fixture(scope="module")
def schemas(wires: dict[str, Wire]) -> dict[str, Any]:
    return {kind: schemathesis.openapi.from_url(f"{wire.url}/openapi.json") for kind, wire in wires.items()}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_no_request_breaks_the_endpoint(
    wires: dict[str, Wire], schemas: dict[str, Any], kind: str, name: str, mode: GenerationMode
) -> None:
    wire, (method, path) = wires[kind], name.split()

    @EACH
    @given(case=schemas[kind][path][method].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKED)

    try:
        ask()
    except Unsatisfiable:
        assert method == "GET" and mode is GenerationMode.NEGATIVE, "what takes no body cannot be asked in a wrong way"
    deadline = time.monotonic() + 30
    while wire.engine.pending and time.monotonic() < deadline:  # held-out rows, which GET /v1/drift has routed
        time.sleep(0.01)
    assert wire.engine.alive and wire.engine.pending == 0


def test_every_operation_is_called(wires: dict[str, Wire]) -> None:
    paths = wires["llama"].get("/openapi.json")["paths"]
    assert {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} == set(OPERATIONS)
