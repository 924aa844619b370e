"""Tasks with different prompts under a router that chooses nothing: a request names its task, or brings the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_client import listening, problem
from service_client import alone, bank_of
from tiny import TASKS, Taught, on_main, opened

from raycl.bank import Bank, NewSnapshot
from raycl.bank.activations import Activations
from raycl.serve.gate.judge import judge
from raycl.serve.settings import ServeConfig

CHAT, TEXT = "/v1/chat/completions", "the barks runs much"
UNLIKE = {"colour": ("red blue : ", " Output :"), "animal": ("cat dog : ", " Output :")}


def unlike(bank: Bank, times: int = 1) -> Bank:
    """Return the bank with newer snapshots whose tasks have prompts of their own."""
    last = bank.open(max(bank.snapshots()))
    entries = [(entry, last.layouts[entry.layout]) for entry in last.adapters]
    tasks = [summary.model_copy(update={"prompt": UNLIKE[summary.name]}) for summary in last.tasks]
    for number in range(times):
        provenance = {**last.provenance, "number": number}
        on_main(
            bank,
            bank.snapshot(NewSnapshot(entries, last.backbone, last.router, tasks, last.encoder, provenance=provenance)),
        )
    return bank


def asking(text: str, **raycl: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 4, **({"raycl": raycl} if raycl else {})}


@pytest.mark.parametrize("method", ["lora", "olora"])
def test_a_text_gets_the_prompt_of_its_own_task_or_none(taught: Taught, tmp_path: Path, method: str) -> None:
    """It used to get the first task's, whatever it was about."""
    bank = unlike(bank_of(taught("llama", method), tmp_path))
    snapshot = bank.open(max(bank.snapshots()))
    model = opened(bank, snapshot)
    weights = {entry.name: 1.0 for entry in snapshot.adapters}
    with listening(bank) as wire:
        for body in (asking(TEXT), asking(TEXT, adapters=weights)):
            status, message = problem(wire.post(CHAT, body))
            assert status == 400
            assert "colour, animal" in message and "raycl.task" in message and "/v1/completions" in message
        for task in TASKS:
            for body in (asking(TEXT, task=task), asking(TEXT, task=task, adapters=weights)):
                answer = wire.post(CHAT, body).json()
                assert answer["raycl"]["template"] == task
                said = answer["choices"][0]["message"]["content"].strip()
                assert said == alone(model, TEXT, weights, task, limit=4)
        if method == "lora":  # as clients name it that know OpenAI's fields alone
            answer = wire.post(CHAT, {**asking(TEXT), "model": "animal"}).json()
            assert (answer["raycl"]["template"], answer["raycl"]["adapters"]) == ("animal", weights)
        whole = wire.post("/v1/completions", {"prompt": f"cat dog : {TEXT} Output :", "max_tokens": 4}).json()
        assert whole["choices"][0]["text"].strip() == alone(model, TEXT, weights, "animal", limit=4)
        assert wire.post("/v1/route", {"input": TEXT}).status_code == 200, "the mixture depends on no prompt"


def test_one_prompt_for_all_tasks_needs_no_task(taught: Taught, tmp_path: Path) -> None:
    with listening(bank_of(taught("llama", "lora"), tmp_path)) as wire:
        assert wire.post(CHAT, asking(TEXT)).status_code == 200


def test_a_router_that_reads_texts_chooses_the_prompt(taught: Taught, tmp_path: Path) -> None:
    with listening(unlike(bank_of(taught("llama", "slm"), tmp_path))) as wire:
        assert wire.post(CHAT, asking("it purrs a sleeps")).json()["raycl"]["template"] in TASKS


def test_the_gate_names_the_task_as_clients_must(taught: Taught, tmp_path: Path) -> None:
    """Judged with one task's prompt for all, a snapshot would be refused or let through by chance."""
    bank = unlike(bank_of(taught("llama", "lora"), tmp_path), times=2)
    *_, active, candidate = bank.snapshots()
    Activations(bank).add(active, "for the test")
    tree = {"bank": bank.storage.uri, "device": "cpu", "follow": {"enabled": False}, "gate": {"split": "test"}}
    verdict = judge(ServeConfig(**tree), candidate)
    assert set(verdict.before) == set(verdict.after) == set(TASKS)
