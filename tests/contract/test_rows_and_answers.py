"""A run's last rows, with and without instructions, are what an endpoint at its defaults answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import FULL, sampled
from http_client import Wire, listening
from service_client import bank_of
from tiny import (
    NOT_SERVED,
    RUNS_BY_KIND,
    SAMPLE,
    WHOLE_MODELS,
    Complete,
    Lab,
    last_checkpoint,
    on_main,
    routing_family,
)

from raycl.bank import NewSnapshot
from raycl.data.sources.conversation import messages_of
from raycl.data.stream import StreamConfig, open_stream
from raycl.errors import ConfigError
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.evaluation import ScoredRow, score_phase
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'very', 'user': 'a', 'assistant': 'Output :'}[m['role']] }} "
    "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}Output : {% endif %}"
)
"""A chat template of words that the tiny tokenizer knows."""

PROMPTS = ("superni", "long", "olora", "llama2_chat", "trace", "chat", "conversations")
DEFINITIONS = {"colour": "red blue sky ?", "animal": "cat dog warm ?"}
SERVED = [pair for pair in RUNS_BY_KIND if pair[1] not in (*NOT_SERVED, *WHOLE_MODELS)]


def prompts_of(kind: str) -> tuple[str, ...]:
    """Return those that a kind of backbone can read: encoders have no conversations."""
    return PROMPTS[:4] if kind == "bert" else PROMPTS


ALL_CASES = [(*pair, prompt) for pair in SERVED for prompt in prompts_of(pair[0])]
ALWAYS = ("llama", "moelora", "conversations")
"""A router of conversations that chooses no task."""
SHARED = [case for case in ALL_CASES if FULL or case[:2] in SAMPLE or case == ALWAYS]
"""Cases of complete runs that other suites look at too."""


def needed(case: tuple[str, str, str]) -> tuple[Any, ...]:
    """Return what a sample must hold: each prompt on each kind of backbone, and each family of routers."""
    kind, method, prompt = case
    return ("llama" if kind == "mixtral" else kind, prompt), routing_family(method)


CASES = sampled(SHARED, keep=[ALWAYS], needed=needed)


def conversations(lab: Lab, folder: Path) -> list[dict[str, Any]]:
    """Return the tasks of the laboratory, whose texts are asked after another turn, some below a system message.

    Some test rows have more turns than all train rows.
    """
    specs = []
    for spec in lab.tasks:
        (folder / spec["name"]).mkdir()
        for split in ("train", "test"):
            lines = []
            rows = (Path(spec["path"]) / f"{split}.jsonl").read_text().splitlines()
            for number, row in enumerate(map(json.loads, rows)):
                turns = [("user", "the sea"), ("assistant", "runs"), ("user", row["text"]), ("assistant", row["label"])]
                if split == "test" and number % 3 == 1:
                    turns = [("user", "the moon"), ("assistant", "sleeps"), *turns]
                turns = [("system", f"{['fire', 'cold'][number % 2]} sleeps"), *turns] if number % 3 else turns
                lines.append(json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]}))
            (folder / spec["name"] / f"{split}.jsonl").write_text("\n".join(lines))
        specs.append({"name": spec["name"], "path": str(folder / spec["name"])})
    return specs


@pytest.mark.parametrize(("kind", "method", "prompt"), CASES)
def test_a_runs_last_rows_are_the_endpoints_answers(
    complete: Complete,
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    method: str,
    prompt: str,
) -> None:
    done = complete(kind, method, "torch")
    bank = bank_of(done, tmp_path)
    last = bank.newest()
    assert last is not None, "methods that are not served are left out"
    context, storage = copy(done.context), Storage.at(tmp_path / "copy")
    specs = conversations(lab, tmp_path) if prompt == "conversations" else with_definitions(lab)
    named = "chat" if prompt == "conversations" else prompt
    settings = {**context.info.tree["stream"], "tasks": specs, "prompt": named, "max_source_tokens": 40, "test_rows": 4}
    context.stream = open_stream(StreamConfig(**settings), context.info.seed)
    context.phases = context.schedule.phases(context.stream)
    codec = context.backbone.codec
    monkeypatch.setattr(codec, "chat_template", TEMPLATE)
    monkeypatch.setattr(codec, "max_source_tokens", 40)
    prompts = {task.name: context.stream.prompt(task, codec) for task in context.stream.tasks}
    turns = {task.name: context.stream.user_turns(task) for task in context.stream.tasks}
    infos = [
        task.model_copy(update={**prompts[task.name].record(), "user_turns": turns[task.name]}) for task in last.tasks
    ]
    entries = [(entry, last.layouts[entry.layout]) for entry in last.adapters]
    config = {**last.provenance["config"], "stream": settings}
    snapshot = bank.snapshot(
        NewSnapshot(
            entries, last.backbone, last.router, infos, last.encoder, provenance={**last.provenance, "config": config}
        )
    )
    on_main(bank, snapshot)

    def scored() -> ScoredRow:
        world = DistributedContext.alone(torch.device("cpu"))
        last = replace(last_checkpoint(done), published={"snapshot": snapshot.number})
        return score_phase(context, context.phases[-1], world, storage, lambda task: None, last)

    result = scored()
    gives_task = method == "separate" or context.method.config.needs_task
    chooses = context.method.config.chooses_task and method != "separate"
    is_alike = len(set(prompts.values())) == 1 and not chooses  # nothing that a router reads
    is_other_text = prompt == "conversations" and context.method.config.knows_texts  # without the system messages
    assert bool(result.other_row) == (chooses or is_other_text), "methods must say whether they choose"
    with listening(bank) as wire:
        for task in result.row:
            texts, given = rows_of(storage, folder_of(context), task)
            system = "" if gives_task or kind == "bert" else prompts[task].instruction
            assert answers(wire, texts, system, None if system else task) == given
            if result.other_row:
                assert answers(wire, *rows_of(storage, "chosen", task)[:1]) == rows_of(storage, "chosen", task)[1]
            elif is_alike:
                assert gives_task or answers(wire, texts) == given, (
                    "an instruction that all tasks share changes nothing"
                )
            elif not gives_task:
                with pytest.raises(AssertionError, match=r"give the text's task by raycl\.task"):
                    answers(wire, texts)
    if result.other_row:
        monkeypatch.setattr(context, "evaluation", context.evaluation.model_copy(update={"instruction": "chosen"}))
        swapped = scored()
        assert (swapped.row, swapped.other_row) == (result.other_row, result.row)


def with_definitions(lab: Lab) -> list[dict[str, Any]]:
    """Return the tasks of the laboratory with instructions."""
    return [{**spec, "definition": DEFINITIONS[spec["name"]]} for spec in lab.tasks]


def rows_of(storage: Storage, folder: str, task: str) -> tuple[list[str], list[str]]:
    """Return texts, and the answers that were scored."""
    rows = [json.loads(line) for line in storage.read(f"predictions/{folder}/{task}.jsonl").splitlines()]
    return [row["text"] for row in rows], [row["answer"] for row in rows]


def folder_of(context: TrainingContext) -> str:
    """Return the name of the folder of the answers after the last phase."""
    phase = context.phases[-1]
    return f"{phase.index:03d}-{phase.name}"


def answers(wire: Wire, texts: Sequence[str], system: str = "", task: str | None = None) -> list[str]:
    """Return what the endpoint answers.

    Args:
        texts: of rows, conversations among them. system: message in front of each; "": none.
        task: of all; None: it is not given.
    """
    raycl = {"raycl": {"task": task}} if task else {}
    if wire.engine.kind == "encoder":
        response = wire.post("/v1/classify", {"input": list(texts), **raycl})
        assert response.status_code == 200, response.text
        return [item["label"] for item in response.json()["data"]]
    said = []
    for text in texts:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": role, "content": content} for role, content in messages_of(text)]
        response = wire.post("/v1/chat/completions", {"messages": messages, **raycl})
        assert response.status_code == 200, response.text
        said.append(response.json()["choices"][0]["message"]["content"].strip())
    return said


@pytest.mark.parametrize(
    ("method", "sections", "words"),
    [
        ("lora", {}, "with method 'lora' no router chooses among them"),
        ("slm", {"stream": {"schedule": "joint"}}, r"with stream\.schedule=joint no router"),
        ("sapt", {"bank": {"publish": False}}, r"bank\.publish=false publishes none"),
    ],
)
def test_texts_are_chosen_for_only_where_a_router_can(
    lab: Lab, method: str, sections: dict[str, dict[str, Any]], words: str
) -> None:
    stream = {"tasks": with_definitions(lab), "prompt": "long", **sections.get("stream", {})}
    others = {"eval": {"instruction": "chosen"}, **sections, "stream": stream}
    with pytest.raises(ConfigError, match=words):
        check(lab.config("t5", method, **others))
