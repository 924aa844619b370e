"""Tests of a bank with hostile chat templates: endpoints keep answering, and each reader gets one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_client import listening, problem
from impatient import RENDERING_S, impatient
from service_client import bank_of, examples
from tiny import Complete, on_main

from raycl.backbone.markup import render_process
from raycl.backbone.markup.chat_templates import CHATML
from raycl.bank import Bank, NewSnapshot, Snapshot
from raycl.bank.activations import Activations
from raycl.errors import BankError
from raycl.serve.deployment.endpoint import activate
from raycl.serve.offline.model import OfflineModel
from raycl.serve.settings import ServeConfig

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def templated(bank: Bank, template: str) -> Snapshot:
    """Return the newest snapshot once more, its tasks learned with this chat template."""
    old = bank.open(max(bank.snapshots()))
    kept = [(entry, old.layouts[entry.layout]) for entry in old.adapters]
    tasks = [task.model_copy(update={"chat_template": template, "prompt": ("", "")}) for task in old.tasks]
    return bank.snapshot(NewSnapshot(kept, old.backbone, old.router, tasks, provenance=old.provenance))


def test_a_hostile_template_is_never_activated(complete: Complete, tmp_path: Path) -> None:
    done = complete("llama", "separate", "torch")
    bank = bank_of(done, tmp_path)
    asked = examples(done, bank, 1)
    with (
        impatient(render_process, RENDERING_S, tmp_path),
        listening(bank, follow={"enabled": True, "poll_s": 1.0}) as wire,
    ):

        def answers() -> bool:
            return all(
                wire.post("/v1/route", {"input": item.text, "raycl": {"task": item.task}}).status_code == 200
                for item in asked
            )

        assert wire.get("/readyz")["snapshot"] == 2 and answers()
        for template, said in (
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            (LOOP, f"takes more than {RENDERING_S} s of CPU time"),
        ):
            hostile = templated(bank, template + CHATML)
            status, message = problem(wire.post("/admin/activate", {"snapshot": hostile.number}))
            assert status == 404 and said in message and f"the chat template of snapshot {hostile.number}" in message
            on_main(bank, hostile)
            wire.until(lambda said=said: said in wire.get("/v1/snapshots")["problem"])
            assert wire.get("/readyz")["snapshot"] == 2 and answers()
        divides = bank.open(3)
        with pytest.raises(BankError, match="ZeroDivisionError"):
            OfflineModel.open(bank, divides)
        with pytest.raises(BankError, match="ZeroDivisionError"):
            activate(ServeConfig(bank=bank.storage.uri), str(divides.number))
        assert Activations(bank).latest() is None, "nothing was decided"


def test_a_template_that_waits_for_a_word_holds_up_no_other_request(complete: Complete, tmp_path: Path) -> None:
    """The process that renders it has the second that the product gives it."""
    bank = bank_of(complete("llama", "separate", "torch"), tmp_path)
    waits = "{% if 'fire' in messages[0].content %}" + LOOP + "{% endif %}" + CHATML
    on_main(bank, templated(bank, waits))
    with listening(bank) as wire:
        body = {"model": "auto", "max_tokens": 2, "raycl": {"task": "animal"}}
        for content, expected in (("the sky is", 200), ("the fire is", 400), ("the sky is", 200)):
            response = wire.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]})
            assert response.status_code == expected, response.text
            if expected == 400:
                assert "takes more than 1 s of CPU time" in problem(response)[1]
        assert wire.post("/admin/activate", {"snapshot": 2}).status_code == 200, "rolled back"
