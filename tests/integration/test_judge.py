"""`raycl judge`: a stand-in judge on loopback compares a snapshot's answers with those of the bare backbone."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny import Complete

from raycl.bank import Bank, Snapshot
from raycl.cli.main import main
from raycl.serve.offline.judged_answers import FILE
from raycl.serve.offline.model import OfflineModel
from raycl.training.records.named_bank import snapshot_at

PROMPTS = {"helpful": {"Koala": 3, "LIMA": 2}, "harmless": {"CoNa": 2}}


@dataclass
class Judge:
    """A judge that prefers the longer answer.

    Attributes:
        requests: bodies in order. keys: Authorization headers.
        failures: statuses that it answers first. words: what it says instead of a verdict; "": a verdict.
    """

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    words: str = ""

    def answer(self, body: dict[str, Any]) -> str:
        if self.words:
            return self.words
        text = body["messages"][1]["content"]
        first = text.partition("[Answer A]\n")[2].partition("\n[End of answer A]")[0]
        second = text.partition("[Answer B]\n")[2].partition("\n[End of answer B]")[0]
        letter = "C" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
        return f"One of them could be [[A]] or [[B]].\nMy verdict: [[{letter}]]"


@pytest.fixture
def judge() -> Iterator[Judge]:
    state = Judge()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append(body)
            state.keys.append(self.headers.get("Authorization"))
            status = state.failures.pop(0) if state.failures else 200
            content = json.dumps({"choices": [{"message": {"content": state.answer(body)}}]}).encode()
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Write prompts in the layout of TRACE's inference/HHH."""
    for aspect, sets in PROMPTS.items():
        for name, count in sets.items():
            folder = tmp_path / "HHH" / aspect / name
            folder.mkdir(parents=True)
            words = ("the sky is very warm", "a cat purrs and runs", "the fire is cold")
            rows = [{"prompt": f"{words[number]} {name}", "answer": ""} for number in range(count)]
            (folder / "test.json").write_text(json.dumps(rows))
    return tmp_path / "HHH"


@pytest.fixture
def snapshot(complete: Complete) -> tuple[Bank, Snapshot]:
    return snapshot_at(complete("llama", "lora", "torch").storage.sub("bank").uri)


def judged(
    capsys: pytest.CaptureFixture[str], bank: Bank, folder: Path, judge: Judge, *more: str
) -> tuple[int, str, str]:
    given = [
        str(folder),
        "--url",
        judge.url,
        "--model",
        "stand-in",
        "--to",
        str(folder.parent / "judged"),
        "--wait-s",
        "0",
        *more,
    ]
    status = main(["judge", bank.storage.uri, *given, "--max-tokens", "6"])
    out, err = capsys.readouterr()
    return status, out, err


def test_answers_are_compared_in_both_orders_and_summed_by_aspect(
    snapshot: tuple[Bank, Snapshot],
    prompts: Path,
    judge: Judge,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    status, out, _ = judged(capsys, snapshot[0], prompts, judge, "--key-env", "JUDGE_KEY", "--json")
    assert status == 0
    tree = json.loads(out)
    assert {aspect: list(sets) for aspect, sets in tree["scores"].items()} == {
        "helpful": ["Koala", "LIMA", "all"],
        "harmless": ["CoNa", "all"],
    }
    texts = [
        f"{text} {name}"
        for name, count in (("Koala", 3), ("LIMA", 2), ("CoNa", 2))
        for text in ("the sky is very warm", "a cat purrs and runs", "the fire is cold")[:count]
    ]
    with OfflineModel.open(*snapshot) as model:
        before, after = (
            [answer.text for answer in model.predict(texts, max_tokens=6, bare=bare, templated=False)]
            for bare in (True, False)
        )
    assert before != after
    signs = [
        (len(second) > len(first)) - (len(second) < len(first)) for first, second in zip(before, after, strict=True)
    ]
    assert tree["scores"]["helpful"]["all"]["delta"] == pytest.approx(100 * sum(signs[:5]) / 5)
    assert tree["scores"]["harmless"]["all"]["delta"] == pytest.approx(100 * sum(signs[5:]) / 2)
    different = sum(first.strip() != second.strip() for first, second in zip(before, after, strict=True))
    assert len(judge.requests) == 2 * different
    assert set(judge.keys) == {"Bearer secret"} and {body["model"] for body in judge.requests} == {"stand-in"}
    assert "secret" not in out and "secret" not in (prompts.parent / "judged" / FILE).read_text()
    status, out, _ = judged(capsys, snapshot[0], prompts, judge)  # all of it is known
    assert status == 0 and len(judge.requests) == 2 * different
    assert "instruction following" in out and "safety" in out and "delta" in out


def test_a_comparison_that_stops_continues_where_it_was(
    snapshot: tuple[Bank, Snapshot], prompts: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(capsys, snapshot[0], prompts, judge)[0] == 0
    whole, asked = (prompts.parent / "judged" / FILE).read_text(), len(judge.requests)
    lines = whole.splitlines(keepends=True)
    (prompts.parent / "judged" / FILE).write_text("".join(lines[:-1]) + lines[-1][:20])  # cut in the last line
    assert judged(capsys, snapshot[0], prompts, judge)[0] == 0
    assert len(judge.requests) == asked + 2
    assert sorted((prompts.parent / "judged" / FILE).read_text().splitlines()) == sorted(whole.splitlines())


def test_a_chat_template_that_the_model_lacks_is_refused(
    snapshot: tuple[Bank, Snapshot], prompts: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = judged(capsys, snapshot[0], prompts, judge, "--chat-template")
    assert status != 0 and "has no chat template: leave --chat-template out" in err and not judge.requests


def test_an_overloaded_judge_is_asked_again(
    snapshot: tuple[Bank, Snapshot], prompts: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.failures = [503]
    assert judged(capsys, snapshot[0], prompts, judge, "--at-once", "1", "--limit", "1")[0] == 0


def out_of_reach(judge: Judge) -> None:
    judge.failures = [401]


def without_verdict(judge: Judge) -> None:
    judge.words = "I like both."


def elsewhere(judge: Judge) -> None:
    judge.url = judge.url.removesuffix("/v1") + "/v2"


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (out_of_reach, "gives no verdict, it answers 401"),
        (without_verdict, r"its answer has no verdict: 'I like both\.': expected \[\[A\]\], \[\[B\]\] or \[\[C\]\]"),
        (elsewhere, "gives no verdict, it answers 404"),
    ],
)
def test_a_judge_that_gives_no_verdict_is_one_sentence(
    snapshot: tuple[Bank, Snapshot],
    prompts: Path,
    judge: Judge,
    capsys: pytest.CaptureFixture[str],
    break_it: Any,
    sentence: str,
) -> None:
    break_it(judge)
    status, _, err = judged(capsys, snapshot[0], prompts, judge, "--limit", "1")
    assert status != 0 and re.search(sentence, err)


def remove_all(folder: Path) -> None:
    for file in folder.glob("*/*/test.json"):
        file.unlink()


def other_field(folder: Path) -> None:
    (folder / "helpful" / "Koala" / "test.json").write_text('[{"question": "Why?"}]')


def empty_prompt(folder: Path) -> None:
    (folder / "helpful" / "Koala" / "test.json").write_text('[{"prompt": " "}]')


def cut(folder: Path) -> None:
    file = folder / "helpful" / "Koala" / "test.json"
    file.write_text(file.read_text()[:-9])


def foreign_journal(folder: Path) -> None:
    (folder.parent / "judged").mkdir()
    (folder.parent / "judged" / FILE).write_text('{"prompt": "x"}\n')


def other_outcome(folder: Path) -> None:
    (folder.parent / "judged").mkdir()
    line = {"aspect": "helpful", "prompt": "x", "before": "a", "after": "b", "judge": "m", "outcome": "wim"}
    (folder.parent / "judged" / FILE).write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (remove_all, "has no prompts: expected helpful/<set>/test.json or harmless/<set>/test.json"),
        (other_field, "Koala/test.json, row 1: the prompt is a missing value: expected a string"),
        (empty_prompt, "Koala/test.json, row 1: the prompt is empty: expected at least one word"),
        (cut, "Koala/test.json, row 3: malformed JSON"),
        (other_outcome, r"judged.jsonl, line 1: outcome: Input should be 'win', 'tie' or 'loss': expected a judged"),
        (foreign_journal, "judged.jsonl, line 1: aspect: Field required: expected a judged prompt"),
    ],
)
def test_damaged_files_are_named_before_the_judge_is_asked(
    snapshot: tuple[Bank, Snapshot],
    prompts: Path,
    judge: Judge,
    capsys: pytest.CaptureFixture[str],
    damage: Any,
    sentence: str,
) -> None:
    damage(prompts)
    status, _, err = judged(capsys, snapshot[0], prompts, judge)
    assert status != 0 and sentence in err and not judge.requests


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("127.0.0.1:8000", "url is '127.0.0.1:8000': expected an address such as http://127.0.0.1:8000/v1"),
        ("http://me:word@127.0.0.1/v1", "url holds a user, a password or a query"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(
    prompts: Path,
    judge: Judge,
    snapshot: tuple[Bank, Snapshot],
    capsys: pytest.CaptureFixture[str],
    url: str,
    sentence: str,
) -> None:
    judge.url = url
    status, _, err = judged(capsys, snapshot[0], prompts, judge)
    assert status != 0 and sentence in err and "word@" not in err


def test_judged_texts_may_hold_any_line_separator(
    snapshot: tuple[Bank, Snapshot], prompts: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    (prompts.parent / "judged").mkdir()
    line = {"aspect": "helpful", "prompt": "x\u2028y", "before": "a\x85", "after": "b", "judge": "m", "outcome": "win"}
    (prompts.parent / "judged" / FILE).write_text(json.dumps(line, ensure_ascii=False) + "\n")
    assert judged(capsys, snapshot[0], prompts, judge, "--limit", "1")[0] == 0
