"""Tests of events while an endpoint runs: clients leave, snapshots come, decisions are taken back."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from http_client import Wire, listening, problem
from service_client import WAIT_S, bank_of, examples, serving
from tiny import Lab, Taught

from raycl.bank import Bank
from raycl.bank.branches import Move
from raycl.routing.routers import TextRouter
from raycl.serve.snapshots.manager import SnapshotManager
from raycl.storage import Storage
from raycl.storage.records import seal
from raycl.training.assembly import build
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext

ENDLESS = {"model": "base", "prompt": "a sleeps", "max_tokens": 4000}
"""A prompt to which this T5 answers `much` without end; 40 s of it, with fixture `slow`."""


# ---- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["stream", "whole", "many", "socket"])
def test_a_disconnect_stops_generation(taught: Taught, tmp_path: Path, how: str) -> None:
    with listening(bank_of(taught("t5", "separate"), tmp_path), max_batch=3, limits={"max_tokens": 4000}) as wire:
        before = wire.engine.counts["tokens"]
        if how == "stream":
            with wire.openai.completions.create(stream=True, **ENDLESS) as stream:  # type: ignore[call-overload]
                for chunk in stream:
                    if chunk.choices[0].text:
                        break
                assert wire.engine.pending == 1
        else:
            body = {**ENDLESS, "n": 8 if how == "many" else 1, "stream": how == "socket"}
            _ask_and_leave(wire, json.dumps(body).encode(), body["n"])
        wire.settle()
        assert wire.engine.counts["tokens"] - before < 3000, "it went on without a reader"
        wire.until(lambda: not any(wire.snapshot_manager._users.values()))
        assert wire.get("/readyz")["status"] == "ready"


def _ask_and_leave(wire: Wire, body: bytes, load: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", wire.port), timeout=WAIT_S) as door:
        door.sendall(head % len(body) + body)
        wire.until(lambda: wire.engine.pending == load and wire.engine.counts["tokens"] > 0)


def test_a_disconnect_before_the_request(taught: Taught, tmp_path: Path) -> None:
    with listening(bank_of(taught("t5", "separate"), tmp_path)) as wire:
        for part in (b"POST /v1/route HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{", b"POST /v1/ro", b""):
            with socket.create_connection(("127.0.0.1", wire.port), timeout=WAIT_S) as door:
                door.sendall(part)
        assert wire.get("/healthz") == {"status": "ok"} and wire.engine.pending == 0


@pytest.mark.usefixtures("slow")
def test_a_slow_reader_loses_nothing(taught: Taught, tmp_path: Path) -> None:
    with listening(bank_of(taught("t5", "separate"), tmp_path)) as wire:
        asked = {**ENDLESS, "max_tokens": 40}
        expected = wire.openai.completions.create(**asked).choices[0].text  # type: ignore[call-overload]
        text = ""
        for chunk in wire.openai.completions.create(stream=True, **asked):  # type: ignore[call-overload]
            text += chunk.choices[0].text
            time.sleep(0.003)
        assert text == expected


# ---- snapshots -------------------------------------------------------------------------------------------------------


def test_activation_and_rollback_switch_the_answers(taught: Taught, tmp_path: Path) -> None:
    done = taught("llama", "lora")
    bank = bank_of(done, tmp_path)
    answers = {number: {example.text: example.answer for example in examples(done, bank, number)} for number in (1, 2)}
    text = next(text for text in answers[1] if answers[1][text] != answers[2][text])
    pins = {"extra_body": {"raycl": {"task": "colour"}}}
    with listening(bank) as wire:

        def said() -> tuple[int, str]:
            result = wire.chat(text, max_tokens=12, **pins)
            return result.raycl["snapshot"], result.choices[0].message.content

        assert said() == (2, answers[2][text])
        back = wire.post("/admin/activate", {"snapshot": 1})
        assert back.json() == {"active": 1, "before": 2}
        assert said() == (1, answers[1][text]) and wire.get("/v1/snapshots")["active"] == 1
        assert wire.get("/v1/snapshots")["decision"]["why"] == "requested"
        assert wire.chat(text, max_tokens=12, model="snapshot:2", **pins).choices[0].message.content == answers[2][text]
        assert wire.post("/admin/activate", {"snapshot": 2}).json() == {"active": 2, "before": 1}
        assert said() == (2, answers[2][text])
        assert problem(wire.post("/admin/activate", {"snapshot": 3}))[0] == 404
        assert said() == (2, answers[2][text]), "a refused decision changes nothing"
    with serving(bank) as client:
        assert client.snapshot_manager.active.snapshot.number == 2, "decisions outlive the endpoint"


def test_a_rollback_holds_while_following(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "lora"), tmp_path)
    with listening(bank, follow={"enabled": True, "poll_s": 0.01}) as wire:
        assert wire.post("/admin/activate", {"snapshot": 1}).json()["active"] == 1
        for _ in range(20):
            assert wire.get("/readyz")["snapshot"] == 1
            time.sleep(0.01)


def test_published_snapshots_are_followed(lab: Lab, tmp_path: Path) -> None:
    """Served while it learns: the next phase of the same run publishes into the bank that answers."""
    config, storage = lab.config("bert", lab.slots(), train={"epochs": 2}), Storage.at(tmp_path)

    def learn() -> None:
        world = DistributedContext.alone(torch.device("cpu"))
        parts, open_engine = build(config, world)
        StreamLoop(parts, open_engine, storage, world).run(stop_after=1)

    learn()
    bank = Bank(storage.sub("bank"))
    with listening(bank, follow={"enabled": True, "poll_s": 0.02}) as wire:
        ask = {"input": "it purrs"}
        first = wire.post("/v1/classify", ask).json()["data"][0]
        assert first["raycl"]["snapshot"] == 1 and set(first["scores"]) == {"red", "blue"}
        encoder = _encoder(wire.snapshot_manager)
        learn()
        wire.until(lambda: wire.get("/readyz")["snapshot"] == 2)
        then = wire.post("/v1/classify", ask).json()["data"][0]
        assert then["raycl"]["snapshot"] == 2 and "animal" in then["raycl"]["tasks"]
        assert set(wire.post("/v1/classify", {**ask, "model": "animal"}).json()["data"][0]["scores"]) == {"cat", "dog"}
        assert wire.post("/v1/classify", {**ask, "model": "snapshot:1"}).json()["data"][0]["label"] == first["label"]
        assert _encoder(wire.snapshot_manager) is encoder, "the sentence encoder is not loaded again"
        assert wire.get("/v1/snapshots")["problem"] == ""


def _encoder(snapshot_manager: SnapshotManager) -> Any:
    assert isinstance(snapshot_manager.active.router, TextRouter)
    return snapshot_manager.active.router.encoder


def test_an_unusable_snapshot_leaves_the_old_one_active(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "lora"), tmp_path)
    folder = Path(bank.storage.path("snapshots"))
    with listening(bank, follow={"enabled": True, "poll_s": 0.01}) as wire:
        shutil.copy(folder / "000002.json", folder / "000003.json")  # holds 2
        move = Move(3, 3, "", "test", 0.0, "main")
        bank.storage.create("branches/main/000003.json", seal({"format": 1, "branch": "main", **asdict(move)}))
        wire.until(lambda: bool(wire.get("/v1/snapshots")["problem"]))
        assert wire.get("/v1/snapshots")["active"] == 2
        assert wire.chat("fire is", model="lora").raycl["snapshot"] == 2
        assert problem(wire.post("/v1/route", {"input": "fire is", "model": "snapshot:3"}))[0] == 404
        (folder / "000003.json").unlink()
        bank.storage.delete("branches/main/000003.json")
        wire.until(lambda: not wire.get("/v1/snapshots")["problem"])


def test_warm_up_precedes_the_first_answer(taught: Taught, tmp_path: Path) -> None:
    with serving(bank_of(taught("bert", "slm"), tmp_path)) as client:
        assert _encoder(client.snapshot_manager)._model is not None and client.engine.counts["batches"] >= 1
        assert client.engine.model.stack.states


def test_a_failed_warm_up_does_not_prevent_startup(
    taught: Taught, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(bank_of(taught("llama", "separate"), tmp_path), max_loaded_rows=1) as client:
        assert "the warm-up answer failed: animal@1 take 8 rows" in caplog.text
        assert client.ask("fire is", weights={}).finish


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_snapshots_switch_under_load(taught: Taught, tmp_path: Path) -> None:
    """Pins and decisions from several threads with room for one snapshot: every answer is its own snapshot's."""
    done = taught("llama", "lora")
    bank = bank_of(done, tmp_path)
    answers = {number: {example.text: example.answer for example in examples(done, bank, number)} for number in (1, 2)}
    wrong: list[str] = []
    with listening(bank, loaded_snapshots=1, follow={"enabled": True, "poll_s": 0.005}) as wire:

        def ask(turn: int) -> None:
            client = wire.client("none")
            for index in range(6):
                text = list(answers[1])[(turn + index) % len(answers[1])]
                model = ("auto", "snapshot:1", "snapshot:2")[(turn + index) % 3]
                messages: Any = [{"role": "user", "content": text}]
                result: Any = client.chat.completions.create(
                    model=model, messages=messages, max_tokens=12, extra_body={"raycl": {"task": "colour"}}
                )
                number = result.raycl["snapshot"]
                if model != "auto" and model != f"snapshot:{number}":
                    wrong.append(f"{model} was answered by {number}")
                if result.choices[0].message.content != answers[number][text]:
                    wrong.append(f"snapshot {number} said {result.choices[0].message.content!r} to {text!r}")

        def decide() -> None:
            for turn in range(8):
                if not wire.post("/admin/activate", {"snapshot": 1 + turn % 2}).is_success:
                    wrong.append("a decision failed")

        def guarded(work: Any, *given: Any) -> None:
            try:
                work(*given)
            except Exception as error:  # noqa: BLE001 -- reported by the main thread
                wrong.append(repr(error))

        threads = [threading.Thread(target=guarded, args=(ask, turn)) for turn in range(4)]
        threads.append(threading.Thread(target=guarded, args=(decide,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert wrong == []
        wire.settle()
        assert wire.engine.alive and not any(wire.snapshot_manager._users.values())
        assert wire.post("/admin/activate", {"snapshot": 2}).is_success
        assert wire.post("/admin/activate", {"snapshot": 1}).is_success
        assert list(wire.engine.model.loaded) == [1], "loaded_snapshots=1"


def test_requests_may_not_load_snapshots_without_end(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = bank_of(taught("llama", "lora"), tmp_path)
    with listening(bank) as wire:
        wire.service.max_loads = 1
        loads, go = threading.Event(), threading.Event()
        opens = bank.open

        def slowly(number: int) -> Any:
            loads.set()
            assert go.wait(WAIT_S)
            return opens(number)

        monkeypatch.setattr(wire.snapshot_manager.bank, "open", slowly)
        first: list[Any] = []
        body = {"input": "fire is", "model": "snapshot:1", "raycl": {"task": "colour"}}
        waiting = threading.Thread(target=lambda: first.append(wire.post("/v1/route", body)))
        waiting.start()
        assert loads.wait(WAIT_S)
        busy = wire.client("none")
        response = busy._client.post(f"{wire.url}/v1/route", json=body)
        assert problem(response) == (429, "1 snapshots are being loaded: retry in a second")
        assert busy._client.post(f"{wire.url}/v1/route", json={**body, "model": "auto"}).is_success, "others continue"
        go.set()
        waiting.join(WAIT_S)
        assert first[0].json()["data"][0]["raycl"]["snapshot"] == 1
