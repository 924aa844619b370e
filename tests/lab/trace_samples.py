"""Small files in the layout of TRACE's release, with sentences of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Row = dict[str, str]

STANCES = "ABC"


def c_stance(number: int) -> Row:
    text, object_, answer = (
        (f"第{number}条：新的公园很漂亮，我们都喜欢。", "新公园", "A"),
        (f"第{number}条：这条路太吵，不应该再修。", "修路", "B"),
        (f"第{number}条：图书馆星期一开门。", "图书馆", "C"),
    )[number % 3]
    instruction = "判断以下文本对指定对象的态度，选择一项：A.支持，B.反对，C.中立。输出A，B或者C。"
    return {"prompt": f"{instruction}\n文本：\n{text}\n对象：\n{object_}\n态度：", "answer": answer}


def fomc(number: int) -> Row:
    text = (
        f"In month {number} the committee lowered its rate.",
        f"In month {number} the committee raised its rate.",
        f"In month {number} the committee met.",
    )[number % 3]
    instruction = (
        "What is the monetary policy stance for the following text? A. dovish, B. hawkish, C. neutral. Choose one from "
        "A, B and C."
    )
    return {"prompt": f"{instruction}\nText:\n{text}\nStance:", "answer": STANCES[number % 3]}


def meeting_bank(number: int) -> Row:
    text = f"Thank you. Item {number} is the bridge. Is there a motion? So moved. All in favor. It passes."
    prompt = f"Write a summary of the following meeting transcripts.\nMeeting transcripts:\n{text}\nSummary:"
    return {"prompt": prompt, "answer": f"The council passed item {number} on the bridge. The vote was unanimous."}


def py150(number: int) -> Row:
    code = f"<s> import os <EOL> def size ( path ) : <EOL> count = <NUM_LIT:{number}> <EOL>"
    return {"prompt": code, "answer": "return os . path . getsize ( path ) + count"}


def science_qa(number: int) -> Row:
    question = f"Which animal is a mammal?\n(A) trout {number}\n(B) whale\n(C) eagle"
    prompt = f"Choose an answer for the following question and give your reasons.\n\nQuestion:\n{question}\n\nAnswer:"
    return {"prompt": prompt, "answer": "B\nA whale breathes air and feeds its young with milk."}


def num_glue(number: int) -> Row:
    question = f"Ann has {number} pens and buys 2. How many pens does she have?"
    prompt = f"Solve the following math problem.\nQuestion:\n{question}\nAnswer:"
    return {"prompt": prompt, "answer": str(number + 2)}


def zwanzig_minuten(number: int) -> Row:
    text = f"Die Behörden teilten mit, dass Brücke {number} wegen Bauarbeiten vorübergehend geschlossen werde."
    instruction = "Provide a simplified version of the following paragraph in German."
    return {
        "prompt": f"{instruction}\n\nParagraph:\n{text}\n\nSimplification:",
        "answer": f"Die Brücke {number} ist zu. Sie wird repariert.",
    }


TASKS: dict[str, Callable[[int], Row]] = {
    "C-STANCE": c_stance,
    "FOMC": fomc,
    "MeetingBank": meeting_bank,
    "Py150": py150,
    "ScienceQA": science_qa,
    "NumGLUE-cm": num_glue,
    "NumGLUE-ds": num_glue,
    "20Minuten": zwanzig_minuten,
}


def write_trace(root: Path, train: int = 12, test: int = 3, name: str = "LLM-CL-Benchmark_5000") -> Path:
    """Write `<root>/<name>/<task>/{train,eval,test}.json`; return that folder."""
    for task, row in TASKS.items():
        folder = root / name / task
        folder.mkdir(parents=True)
        numbers = {"train": range(train), "eval": range(100, 100 + test), "test": range(200, 200 + test)}
        for split, rows in numbers.items():
            (folder / f"{split}.json").write_text(json.dumps([row(number) for number in rows], ensure_ascii=False))
    return root / name
