"""Adapters on a device that cannot hold all of them, and adapters that cannot be loaded at all."""

from __future__ import annotations

import threading
from pathlib import Path

from service_client import WAIT_S, alone, bank_of, examples, is_piece, serving
from tiny import Taught, opened

from raycl.bank import Bank
from raycl.generation.requests import Sampling, Started

TEXTS = ("fire is", "the sea is")

LONG = Sampling(100)
"""More tokens than any test waits for."""


def test_adapters_that_are_evicted_come_back(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    model = opened(bank, bank.open(2))
    rank = bank.open(2).adapters[0].rank
    asked = [(text, weights) for text in TEXTS[:2] for weights in ({"colour": 1.0}, {"animal": -8.0}, {})]
    expected = [alone(model, text, weights, next(iter(weights), "")) for text, weights in asked]
    with serving(bank, max_loaded_rows=rank) as client:
        with client.paused():
            replies = [client.ask(text, weights=weights) for text, weights in asked]
        assert [reply.text for reply in replies] == expected
        assert client.engine.model.stack.table.evicted >= 1
        both = client.ask(TEXTS[0], weights={"colour": 1.0, "animal": 1.0})
        assert "colour@1, animal@1 take 16 rows on the device together, this endpoint keeps 8" in both.error
        assert client.ask(TEXTS[0], weights={"animal": -8.0}).text == expected[1], "the engine lives on"
        shown = client.ask(TEXTS[0], weights={"colour": 1.0, "animal": 1.0}, route_only=True)
        assert shown.wait(lambda event: isinstance(event, Started)).metadata.weights == {"colour": 1.0, "animal": 1.0}


def test_small_adapters_are_loaded_before_the_first_request(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    rank = bank.open(2).adapters[0].rank
    for settings, count in (({}, 2), ({"max_loaded_rows": 2 * rank - 1}, 1), ({"max_loaded_rows": rank - 1}, 0)):
        with serving(bank, **settings) as client:
            assert len(client.engine.model.stack.states) == count
    other, lost = bank.open(2).adapters
    with serving(bank, max_loaded_rows=rank) as client:
        Path(bank.storage.path(lost.tensors.file)).unlink()
        client.engine.call(lambda: client.engine.model.stack.need([str(other)])).result(WAIT_S)
        assert f"adapter {lost} cannot be loaded" in client.ask("fire is", weights={lost.name: 1.0}).error
        assert client.ask("fire is", weights={other.name: 1.0}).finish, (
            "one that is lost while its snapshot answers fails who needs it alone"
        )


def test_labels_on_a_small_device(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("bert", "separate"), tmp_path)
    asked = examples(taught("bert", "separate"), bank)
    rank = bank.open(2).adapters[0].rank
    with serving(bank, max_loaded_rows=rank) as client:
        with client.paused():
            replies = [client.ask(item.text, task=item.task, sampling=None) for item in asked]
        assert [reply.label for reply in replies] == [item.answer for item in asked]
    with serving(bank, max_loaded_rows=rank - 1) as client:
        assert "take 8 rows" in client.ask("fire is", task="colour", sampling=None).error
        assert "no selected adapter has a label head" in client.ask("fire is", weights={}, sampling=None).error
        assert client.engine.alive


def test_adapters_in_use_are_not_evicted(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    rank = bank.open(2).adapters[0].rank
    with serving(bank, max_loaded_rows=rank) as client:
        assert client.ask("fire is", weights={"colour": 1.0}).finish
        fetched, sources = [], client.engine.model._sources
        for key, (source, name) in list(sources.items()):
            sources[key] = (lambda asked, source=source: fetched.append(asked) or source(asked), name)  # type: ignore[misc]
        running = client.ask("fire is", weights={"colour": -2.0}, sampling=LONG)
        running.wait(is_piece)
        other = client.ask("it purrs", weights={"animal": 1.0})
        assert running.finish and other.finish and fetched == ["animal"], "it waited until there was room"
        assert client.ask("fire is", weights={"colour": 1.0}).finish and fetched == ["animal", "colour"]


def test_requests_that_wait_for_memory_are_served_in_order(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    rank = bank.open(2).adapters[0].rank
    with serving(bank, max_loaded_rows=rank) as client:
        client.engine._texts.patience_s = 0.05
        stop, seen = threading.Event(), []

        def crowd() -> None:
            while not stop.is_set() and len(seen) < 2000:
                seen.append(client.ask("fire is", weights={"colour": -2.0}, sampling=LONG))
                seen[-1].wait(is_piece)

        thread = threading.Thread(target=crowd)
        thread.start()
        while not seen:
            thread.join(0.001)
        assert client.ask("it purrs", weights={"animal": 1.0}).finish
        stop.set()
        thread.join(WAIT_S)


def test_a_damaged_adapter_fails_only_the_requests_that_use_it(taught: Taught, tmp_path: Path) -> None:
    """Damaged after its snapshot was activated, and not on the device any more."""
    bank = bank_of(taught("llama", "separate"), tmp_path)
    model = opened(bank, bank.open(2))
    expected = alone(model, "fire is", {"colour": 1.0}, "colour")
    with serving(bank) as client:
        _damage(bank, "animal")
        key = client.loaded().keys["animal"]
        client.engine.call(lambda: client.engine.model.stack.drop(key)).result(WAIT_S)
        with client.paused():
            good = [client.ask("fire is", weights={"colour": 1.0}) for _ in range(3)]
            bad = client.ask("it purrs", weights={"animal": 1.0})
            bare = client.ask("it purrs", weights={})
            mixed = client.ask("it purrs", weights={"animal": 0.5, "colour": 0.5})
        assert "adapter animal@1 cannot be loaded: the tensors of animal@1 are damaged" in bad.error
        assert "are damaged" in mixed.error
        assert [reply.text for reply in good] == [expected] * 3 and bare.finish
        client.settle()


def _damage(bank: Bank, name: str) -> None:
    file = Path(bank.storage.path(bank.open(2).adapter(name).tensors.file))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
