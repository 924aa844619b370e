"""The engine's answers equal the snapshot's: in any batch, while others join, leave or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from service_client import LIMIT, WAIT_S, Reply, alone, bank_of, chunks, examples, is_piece, serving
from tiny import Taught, opened

from raycl.errors import ConfigError, RayclError
from raycl.generation.requests import LabelScores, PromptLogprobs, Sampling, Started, TextDelta
from raycl.serve.engine.truncation import PromptRequest, TruncatedPrompt

WEIGHTS: tuple[dict[str, float], ...] = (
    {"colour": -2.0, "animal": 1.0},
    {"animal": -8.0},
    {"colour": 4.0, "animal": 2.0},
    {},
    {"colour": -3.0, "animal": -3.0},
    {"colour": 1.0},
)
"""Mixtures under which tiny models say long and different things."""

TEXTS = ("fire is", "the sea is", "is warm very a", "it purrs", "the barks runs", "purrs a sleeps a")

LONG = Sampling(100)
"""More tokens than any test waits for."""


@pytest.mark.parametrize(
    ("kind", "method", "decoding"),
    [
        *product(("llama", "t5"), ("separate", "slm"), ("dynamic",)),
        ("llama", "olora", "dynamic"),
        ("llama", "sapt", "static"),
        ("llama", "slm", "static"),
    ],
)
def test_served_texts_equal_the_snapshots_own(
    taught: Taught, tmp_path: Path, kind: str, method: str, decoding: str
) -> None:
    bank = bank_of(taught(kind, method), tmp_path)
    asked = examples(taught(kind, method), bank)
    assert len({item.answer for item in asked}) >= 3, "answers must differ, or a mix-up would not be seen"
    with serving(bank, max_batch=5, decoding=decoding) as client:
        task = {item.text: item.task if method == "separate" else None for item in asked}
        with client.paused():
            at_once = [client.ask(item.text, task=task[item.text]) for item in asked]
        assert [reply.text for reply in at_once] == [item.answer for item in asked]
        joining: list[Reply] = []
        for group in chunks(asked[::-1], 2):  # each pair comes while the one before is answered
            joining += [client.ask(item.text, task=task[item.text]) for item in group]
            joining[-1].wait(is_piece)
        assert [reply.text for reply in joining] == [item.answer for item in asked[::-1]]
        assert all(reply.metadata.cut_tokens == 0 for reply in joining)
        client.settle()
        counts = client.engine.counts
        assert counts["rows"] > len(asked) < counts["hits"] and not counts["misses"], "small adapters are there before"


@pytest.mark.parametrize(("kind", "decoding"), [("llama", "dynamic"), ("llama", "static"), ("t5", "dynamic")])
def test_every_row_keeps_its_own_mixture(taught: Taught, tmp_path: Path, kind: str, decoding: str) -> None:
    bank = bank_of(taught(kind, "separate"), tmp_path)
    model = opened(bank, bank.open(2))
    asked = [(text, WEIGHTS[(index + turn) % len(WEIGHTS)]) for turn in range(2) for index, text in enumerate(TEXTS)]
    expected = [alone(model, text, weights, _loudest(weights)) for text, weights in asked]
    assert len(set(expected)) >= 4 and any(len(text.split()) == LIMIT for text in expected)
    with serving(bank, max_batch=7, decoding=decoding) as client:
        first = [client.ask(text, weights=weights) for text, weights in asked[:3]]
        first[0].wait(lambda event: isinstance(event, Started))
        rest = [client.ask(text, weights=weights) for text, weights in asked[3:]]
        assert [reply.text for reply in first + rest] == expected


def _loudest(weights: Mapping[str, float]) -> str:
    return max(weights, key=lambda name: weights[name], default="")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("t5", {}), ("llama", {"decoding": "static"}), ("llama", {"decoding": "static", "max_loaded_rows": 8})],
)
def test_rows_without_soft_prompts_are_unaffected_by_rows_with_them(
    taught: Taught, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    """In a batch with soft prompts, the others' first positions are masked, also when rows with prompts have left."""
    bank = bank_of(taught(kind, "prompts"), tmp_path)
    model = opened(bank, bank.open(2))
    prompted = {name: 1.0 for name in model.loaded.keys if name.startswith("colour")}
    expected = [alone(model, text, {}, "") for text in TEXTS]
    with serving(bank, max_batch=8, **settings) as client:
        with client.paused():
            short = [client.ask(text, weights=prompted, sampling=Sampling(2)) for text in TEXTS[:2]]
            bare = [client.ask(text, weights={}) for text in TEXTS]
        assert [reply.text for reply in bare] == expected
        assert [reply.text for reply in short] == [
            alone(model, text, prompted, "colour", limit=2) for text in TEXTS[:2]
        ]


@pytest.mark.parametrize("method", ["separate", "slm", "olora", "sapt"])
def test_served_labels_equal_the_snapshots_own(taught: Taught, tmp_path: Path, method: str) -> None:
    bank = bank_of(taught("bert", method), tmp_path)
    asked = examples(taught("bert", method), bank)
    forgot = {"red"} if method == "olora" else set()
    assert {item.answer for item in asked} == {"red", "blue", "cat", "dog"} - forgot
    with serving(bank, max_batch=5) as client:
        with client.paused():
            replies = [
                client.ask(item.text, task=item.task if method == "separate" else None, sampling=None) for item in asked
            ]
        assert [reply.label for reply in replies] == [item.answer for item in asked]
        item = client.ask(asked[0].text, task=asked[0].task, sampling=None)
        assert item.label == asked[0].answer, "alone as among others"
        assert isinstance(item.last, LabelScores) and isinstance(replies[0].last, LabelScores)
        assert item.last.scores == pytest.approx(replies[0].last.scores, abs=1e-5)
        assert sum(item.last.scores.values()) == pytest.approx(1.0, abs=1e-5)


def test_a_batch_of_labels_waits_for_clients_that_were_just_answered(taught: Taught, tmp_path: Path) -> None:
    """For as many texts as were answered or waiting, and a share of the time that these took."""
    bank = bank_of(taught("bert", "slm"), tmp_path)
    with serving(bank, max_batch=4) as client:
        engine = client.engine
        with client.paused():
            first = [client.ask(text, sampling=None) for text in TEXTS]
        assert [reply.metadata.batch for reply in first] == [4] * 4 + [2] * 2
        client.until(lambda: engine._expected == 2)

        def waits(seconds: float) -> None:
            engine._expected, engine._gathered_s = 4, time.monotonic() + seconds

        engine.call(lambda: waits(10 * WAIT_S)).result()
        early = client.ask(TEXTS[0], sampling=None)
        time.sleep(0.1)
        assert not early.events, "it waits for the others"
        others = [client.ask(text, sampling=None) for text in TEXTS[1:4]]
        assert [reply.metadata.batch for reply in (early, *others)] == [4] * 4
        engine.call(lambda: waits(0.05)).result()
        assert client.ask(TEXTS[0], sampling=None).metadata.batch == 1, "no other text came"


@pytest.mark.parametrize(("kind", "method"), [("bert", "slm"), ("bert", "sapt"), ("llama", "slm"), ("t5", "separate")])
def test_bfloat16_answers_are_close_to_float32(taught: Taught, tmp_path: Path, kind: str, method: str) -> None:
    bank = bank_of(taught(kind, method), tmp_path)
    asked, sampling = examples(taught(kind, method), bank), None if kind == "bert" else Sampling(LIMIT)
    with serving(bank, dtype="bfloat16") as client:
        assert client.engine.model.backbone.dtype == torch.bfloat16
        replies = [client.ask(item.text, task=item.task, sampling=sampling) for item in asked]
        said = [reply.label if kind == "bert" else reply.text for reply in replies]
    same = sum(answer == item.answer for answer, item in zip(said, asked, strict=True))
    assert same >= len(asked) - 2, f"{same} of {len(asked)}"


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
def test_two_snapshots_answer_side_by_side(taught: Taught, tmp_path: Path, decoding: str) -> None:
    done = taught("llama", "lora")  # one adapter that changes: version 1 knows colours, version 2 both tasks
    bank = bank_of(done, tmp_path)
    older = {example.text: example.answer for example in examples(done, bank, 1)}
    newer = {example.text: example.answer for example in examples(done, bank, 2)}
    assert any(newer[text] != answer for text, answer in older.items())
    with serving(bank, max_batch=6, decoding=decoding) as client:
        client.loaded(1)
        with client.paused():
            pairs = [(client.ask(text, 1, task="colour"), client.ask(text, 2, task="colour")) for text in older]
        for (text, answer), (old, new) in zip(older.items(), pairs, strict=True):
            assert (old.text, new.text) == (answer, newer[text])
            assert (old.metadata.snapshot, new.metadata.snapshot) == (1, 2)
            assert (old.metadata.weights, new.metadata.weights) == ({"lora": 1.0}, {"lora": 1.0})


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
def test_beginnings_that_were_read_before_change_no_answer(taught: Taught, tmp_path: Path, decoding: str) -> None:
    """Prompts of a common beginning, at once and one after another, under mixtures of two snapshots."""
    bank = bank_of(taught("llama", "separate"), tmp_path)
    system = " ".join(TEXTS[:3] * 4)
    asked = [(f"{system} {text}", weights) for text in TEXTS for weights in WEIGHTS]
    answers = {}
    for size in (0, 1):
        with serving(bank, max_batch=5, decoding=decoding, prefix_cache_mb=size) as client:
            old = client.loaded(1)
            replies = [client.ask(text, weights=weights, templated=False).wait() for text, weights in asked]
            with client.paused():
                replies += [client.ask(text, weights=weights, templated=False) for text, weights in asked]
                replies += [client.ask(text, 1, {"colour": 1.0}, templated=False) for text, _ in asked]
            answers[size] = [reply.text for reply in replies]
            client.settle()
            prefixes, counts = client.engine.model.prefixes, client.engine.counts
            assert (counts["reused_tokens"] > 60 * 32) == (prefixes.bytes > 0) == bool(size)
            client.engine.unload_snapshot(old)
            scopes = {block.scope for block in prefixes._blocks.values()}
            assert all(scope.owner is not old for scope in scopes) and bool(scopes) == bool(size)
    assert answers[0] == answers[1] and len(set(answers[0])) > 8


def test_a_request_keeps_its_snapshot(taught: Taught, tmp_path: Path) -> None:
    done = taught("llama", "lora")
    bank = bank_of(done, tmp_path)
    older, newer = examples(done, bank, 1), examples(done, bank, 2)
    text = next(item.text for item, other in zip(older, newer, strict=False) if item.answer != other.answer)
    with serving(bank, snapshot=1, loaded_snapshots=1) as client:
        client.snapshot_manager.activate(1, "to begin with")
        held = client.snapshot_manager.acquire()
        with client.paused():
            before = client.ask(text, task="colour")
            activation = threading.Thread(target=client.snapshot_manager.activate, args=(2, "newer"))
            activation.start()
        activation.join(WAIT_S)
        after = client.ask(text, task="colour")
        assert (
            client.snapshot_manager.active.snapshot.number == 2 and held.snapshot.number in client.engine.model.loaded
        )
        assert (before.metadata.snapshot, after.metadata.snapshot) == (1, 2)
        assert before.text == next(item.answer for item in older if item.text == text)
        assert after.text == next(item.answer for item in newer if item.text == text)
        client.snapshot_manager.release(held)
        client.snapshot_manager.activate(1, "back")
        assert list(client.engine.model.loaded) == [1], "loaded_snapshots=1, and the other one is unused"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_row_that_overflows_fails_alone(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    model = opened(bank, bank.open(2))
    with serving(bank) as client:
        with client.paused():
            bad = client.ask("fire is", weights={"colour": 1e38}, sampling=Sampling(LIMIT, temperature=1.0))
            good = client.ask("fire is", weights={"colour": -2.0})
        assert "not finite under this mixture" in bad.error
        assert good.text == alone(model, "fire is", {"colour": -2.0}, "colour")


@pytest.mark.parametrize(
    ("decoding", "function_name"),
    [
        ("dynamic", "raycl.generation.dynamic_cache.step"),
        ("static", "raycl.generation.static_cache.StaticKVCache.step"),
    ],
)
def test_an_internal_error_fails_one_request_only(
    taught: Taught,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    decoding: str,
    function_name: str,
) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank, decoding=decoding) as client:
        fit = client.engine._truncation.fit

        def fault(wanted: Sequence[PromptRequest]) -> list[TruncatedPrompt]:
            if any(item.text == "secret words" for item in wanted):
                raise ZeroDivisionError("by zero")
            return fit(wanted)

        monkeypatch.setattr(client.engine._truncation, "fit", fault)
        with client.paused():
            bad, good = client.ask("secret words", weights={}), client.ask("fire is", weights={})
        assert bad.error == "the model failed on this request (ZeroDivisionError): see the server's log"
        assert good.finish and "by zero" in caplog.text and "secret words" not in caplog.text
        broken = threading.Event()

        def step(*_: object) -> None:
            broken.set()
            raise ZeroDivisionError("in a step")

        with monkeypatch.context() as patch:
            patch.setattr(function_name, step)
            assert "the model failed" in client.ask("fire is", weights={}).error and broken.is_set()
        assert client.ask("fire is", weights={}).finish and client.engine.pending == 0


@pytest.mark.usefixtures("slow")
def test_cancelled_requests_stop(taught: Taught, tmp_path: Path) -> None:
    endless = {"weights": {}, "templated": False, "sampling": Sampling(4000)}
    with serving(bank_of(taught("t5", "separate"), tmp_path), max_batch=2) as client:
        with client.paused():
            replies = [client.ask("a sleeps", **endless) for _ in range(6)]  # type: ignore[arg-type]
            assert client.engine.pending == 6
        replies[0].wait(is_piece)
        for reply in replies:
            reply.request.cancelled = True  # type: ignore[attr-defined]
        client.settle()
        assert client.engine.counts["tokens"] < 4000
        assert not any(isinstance(event, TextDelta) and event.finish for reply in replies for event in reply.events)
        assert not any(isinstance(event, TextDelta) for reply in replies[2:] for event in reply.events), (
            "they never spoke"
        )
        assert client.ask("fire is", weights={"colour": 1.0}).finish


def test_the_prompt_of_a_cancelled_request_is_not_scored(taught: Taught, tmp_path: Path) -> None:
    scored = Sampling(0, logprobs=1, prompt_logprobs=True)
    with serving(bank_of(taught("llama", "separate"), tmp_path)) as client:
        with client.paused():
            first, other = (
                client.ask("fire is", weights={}, templated=False, sampling=scored).request for _ in range(2)
            )
            seen: list[object] = []
            first.send, other.send = (lambda event: setattr(other, "cancelled", True)), seen.append
        client.settle()
        assert not any(isinstance(event, PromptLogprobs) for event in seen)
        assert client.engine.pending == 0


def test_the_load_counts_what_is_not_finished(taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of(taught("bert", "separate"), tmp_path)
    with serving(bank, max_batch=4) as client:
        seen: list[int] = []
        fit = client.engine._truncation.fit

        def counting(wanted: Sequence[PromptRequest]) -> list[TruncatedPrompt]:
            seen.append(client.engine.pending)
            return fit(wanted)

        monkeypatch.setattr(client.engine._truncation, "fit", counting)
        with client.paused():
            replies = [client.ask(f"fire is {number}", task="colour", sampling=None) for number in range(6)]
            replies.append(client.ask("fire", task="colour", sampling=None, route_only=True))
            assert client.engine.pending == 7
        for reply in replies[:6]:
            reply.wait()
        client.settle()
        assert seen == [7, 3], "those that are being routed count too"


def test_closing_the_engine_ends_all_requests(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank, max_batch=1) as client:
        with client.paused():
            replies = [client.ask("fire is", weights={"colour": -2.0}, sampling=LONG) for _ in range(3)]
            closing = threading.Thread(target=client.engine.close)
            closing.start()
            late = [client.ask("fire is", weights={}) for _ in range(2)]
            waits = client.engine.call(lambda: None)
        closing.join(WAIT_S)
        assert not client.engine.alive
        for reply in (*replies, *late, client.ask("fire is", weights={})):
            assert "shutting down" in reply.error
        with pytest.raises(RayclError, match="shutting down"):
            client.engine.call(lambda: None).result(WAIT_S)
        assert waits.done() and client.engine.pending == 0


# ---- settings of single answers --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_in_any_batch(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    drawn = [Sampling(LIMIT, temperature=1.5, seed=seed) for seed in range(4)]
    with serving(bank) as client:
        lonely = [client.ask("fire is", weights={}, sampling=item).text for item in drawn]
        assert len(set(lonely)) == len(lonely), "other seeds say other things"
        with client.paused():
            extreme = [Sampling(LIMIT, heat, top_p) for heat in (5e-324, 2.0) for top_p in (5e-324, 1e-46, 1 - 2**-53)]
            each = product(TEXTS, WEIGHTS, (drawn[0], *extreme))
            others = [client.ask(text, weights=weights, sampling=item) for text, weights, item in each]
            crowd = [client.ask("fire is", weights={}, sampling=item) for item in drawn]
        assert [reply.text for reply in crowd] == lonely
        assert all(reply.finish for reply in others)
        cold = client.ask("fire is", weights={}, sampling=Sampling(LIMIT, temperature=1.5, top_p=1e-9, seed=1))
        assert cold.text == client.ask("fire is", weights={}).text, "top_p near 0 leaves the most likely token"


def test_a_stop_ends_the_text_before_it(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank) as client:
        whole = client.ask("fire is", weights={})
        words = whole.text.split()
        assert whole.finish == "length" and len(words) == LIMIT
        stop = " ".join(words[3:5])
        ended = client.ask("fire is", weights={}, sampling=Sampling(LIMIT, stop=("nothing", stop)))
        assert (ended.text, ended.finish) == (whole.text[: whole.text.index(stop)].rstrip(), "stop")
        assert isinstance(ended.last, TextDelta) and ended.last.tokens == 5


def test_each_end_token_of_the_model_ends_the_text(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end token ends the text and is no part of it; many tuned models end a turn with another token than a text."""
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank) as client:
        words = client.ask("fire is", weights={}).text.split()
        backbone = client.engine.model.backbone
        number = backbone.codec.tokenizer.convert_tokens_to_ids(words[3])
        monkeypatch.setattr(backbone.model.generation_config, "eos_token_id", [backbone.codec.eos_id, number])
        assert client.ask("fire is", weights={}).text.split() == words, "an ordinary word is no end"
        monkeypatch.setattr(backbone.codec, "special_ids", backbone.codec.special_ids | {number})
        ended = client.ask("fire is", weights={})
        assert ended.text.split() == words[: words.index(words[3])] and ended.finish == "stop"


def test_a_completion_is_what_its_tokens_say(taught: Taught, tmp_path: Path) -> None:
    """An answer to an input or to messages is without white space around it, as it is scored."""
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank) as client:
        whole = client.ask("fire is", weights={}, templated=False).text
        assert whole.startswith(" ") and client.ask("fire is", weights={}).text.strip()
        assert client.ask("fire is", weights={}, templated=False, is_chat=True).text == whole.strip()
        sampling = Sampling(LIMIT, stop=(whole[:3],))
        stopped = client.ask("fire is", weights={}, templated=False, sampling=sampling)
        assert (stopped.text, stopped.finish) == ("", "stop")


def test_inputs_that_do_not_fit_are_truncated_or_refused(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)  # 128 positions, inputs of 24 tokens
    with serving(bank) as client:
        text = " ".join(["fire"] * 150)
        cut = client.ask(text, weights={"colour": 1.0})
        assert cut.finish and cut.metadata.prompt_tokens == 24 and cut.metadata.cut_tokens == 150 + 3 - 24
        raw = client.ask(text, weights={}, templated=False)
        assert raw.error == "the prompt has 151 tokens, this endpoint reads at most 127: send less text"
        whole = client.ask(" ".join(["fire"] * 120), weights={}, templated=False, sampling=Sampling(100))
        assert whole.metadata.prompt_tokens == 121 and whole.metadata.cut_tokens == 0 and whole.metadata.template == ""
        assert whole.finish == "length" and isinstance(whole.last, TextDelta) and whole.last.tokens == 128 - 121
        assert client.ask("", weights={}, templated=False).finish, "its start token is enough"


def test_the_prompt_is_that_of_the_task_that_is_named(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)
    with serving(bank) as client:
        assert client.ask("fire is", weights={"colour": 1.0}).metadata.template == "colour"
        assert client.ask("fire is", weights={"colour": 1.0}, task="animal").metadata.template == "animal"
        assert client.ask("fire is", weights={}).metadata.template == ""
        assert client.ask("fire is", weights={}, task="animal").metadata.template == "animal"
        assert client.ask("fire is", weights={"colour": 1.0}, templated=False).metadata.template == ""


def test_a_request_without_a_task_changes_no_other(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("bert", "separate"), tmp_path)
    asked = examples(taught("bert", "separate"), bank)
    with serving(bank) as client:
        calls: list[object] = []
        route = client.loaded().router.route
        client.loaded().router.route = lambda texts, tasks: calls.append(tasks) or route(texts, tasks)  # type: ignore[method-assign, func-returns-value]
        with client.paused():
            given = [client.ask(item.text, task=item.task, sampling=None) for item in asked[:3]]
            untold = client.ask("fire is", sampling=None)
            wrong = client.ask("fire is", task="weather", sampling=None)
            pinned = client.ask("fire is", weights={"colour": 1.0}, sampling=None)
        assert "needs the task of each text" in untold.error
        assert "no adapter was trained on weather" in wrong.error
        assert [reply.label for reply in given] == [item.answer for item in asked[:3]]
        assert pinned.label == asked[0].answer
        assert None in calls and any(tasks is not None and len(tasks) == 4 for tasks in calls)  # type: ignore[arg-type]


def test_states_are_shared_by_snapshots_that_hold_the_same(taught: Taught, tmp_path: Path) -> None:
    bank = bank_of(taught("llama", "separate"), tmp_path)  # snapshot 2 keeps colour@1 of snapshot 1
    with serving(bank) as client:
        before = client.ask("fire is", 1, weights={"colour": 1.0})
        text, state = before.text, client.engine.model.stack.states["colour@1"]
        assert client.ask("fire is", 2, weights={"colour": 1.0}).text == text
        assert client.engine.model.stack.states["colour@1"] is state


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_what_cannot_be_decoded_in_place_is_refused_by_name(taught: Taught, tmp_path: Path, kind: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"decoding is 'static', but a '(t5|bert)' model .* expected one of gpt2, "),
        serving(bank_of(taught(kind, "separate"), tmp_path), decoding="static"),
    ):
        pass


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
def test_rows_are_grouped_by_active_adapters(taught: Taught, tmp_path: Path, decoding: str) -> None:
    """Unused slots are no rows, and an adapter that had to be loaded is a miss."""
    with serving(bank_of(taught("llama", "separate"), tmp_path), max_batch=7, decoding=decoding) as client:
        for key in list(client.engine.model.stack.states):
            client.engine.call(lambda key=key: client.engine.model.stack.drop(key)).result()
        before = dict(client.engine.counts)
        with client.paused():
            for reply in [client.ask(text, weights={"colour": 1.0}, sampling=Sampling(3)) for text in TEXTS[:2]]:
                assert reply is not None
        client.settle()
        result = {name: client.engine.counts[name] - before[name] for name in before}
    assert 2 <= result["rows"] <= 2 * result["batches"] and result["misses"] >= 1


@pytest.mark.parametrize(("method", "decoding"), product(("lora-dora", "lora-copies"), ("dynamic", "static")))
def test_what_is_no_sum_answers_alone_or_not_at_all(taught: Taught, tmp_path: Path, method: str, decoding: str) -> None:
    bank = bank_of(taught("llama", method), tmp_path)
    asked = examples(taught("llama", method), bank)
    with serving(bank, max_batch=5, decoding=decoding) as client:
        with client.paused():
            replies = [client.ask(item.text) for item in asked]
            half, bare = client.ask(TEXTS[0], weights={"lora": 0.5}), client.ask(TEXTS[0], weights={})
        assert [reply.text for reply in replies] == [item.answer for item in asked]
        assert "which is no sum with others: expected it alone with weight 1" in half.error
        assert bare.text not in {reply.text for reply in replies}
