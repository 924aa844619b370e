"""`method.router_text`: one text that the router is fitted on, and reads in evaluation and at an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from service_client import bank_of, serving
from tiny import Done, Lab, evaluated_by, run

from raycl.config import validate
from raycl.data.loader import Collate, eval_batches
from raycl.data.prompts import Prompt
from raycl.data.router_texts import RouterTexts
from raycl.errors import ConfigError
from raycl.generation.requests import Sampling
from raycl.generation.task_prompts import task_prompts
from raycl.routing.routers import routed_text
from raycl.routing.unknown_texts import UnknownRule
from raycl.storage import Storage
from raycl.training.setup.run_config import RunConfig
from raycl.types import Mixture

WORDS = {"colour": "red red", "animal": "cat cat"}


def learned(lab: Lab, folder: Path, kind: str, method: Any, text: str) -> Done:
    tasks = [{**task, "definition": WORDS[task["name"]]} for task in lab.tasks]
    settings = {**({"name": method} if isinstance(method, str) else method), "router_text": text}
    config = lab.config(kind, settings, stream={"tasks": tasks, "prompt": "long"}, train={"learning_rate": 0.03})
    storage = Storage.at(folder / "run")
    return Done(config, storage, run(config, storage).context)


def weights(mixture: Mixture, row: int = 0) -> dict[str, float]:
    return {name: round(w, 4) for name, w in zip(mixture.names, mixture.weights[row].tolist(), strict=True) if w > 1e-5}


RUNS = (("bert", "slm"), ("llama", "sapt"), ("t5", "gainlora"), ("bert", "epi"), ("llama", "moelora"))


@pytest.mark.parametrize(
    ("kind", "method", "text"), sampled([(*run, text) for run in RUNS for text in ("input", "prompt")])
)
def test_a_run_and_its_endpoint_route_by_the_same_text(
    lab: Lab, tmp_path: Path, kind: str, method: str, text: str
) -> None:
    """The bank says which; a router of inputs does not depend on the prompt around them, one of prompts does."""
    done = learned(lab, tmp_path, kind, method, text)
    context, router, codec = done.context, evaluated_by(done), done.context.backbone.codec
    bank = bank_of(done, tmp_path)
    snapshot = bank.open(2)
    assert snapshot.router.settings["router_text"] == text == task_prompts(snapshot, UnknownRule()).routed_text
    asked = []
    moves = False
    for task, other in zip(context.stream.tasks, reversed(context.stream.tasks), strict=True):
        table = context.stream.table(task, "test", codec).part(torch.arange(4).numpy())
        for batch in eval_batches(Collate([table], codec.pad_id, None, True, None, context.router_texts), 1):
            mixture = router.mixture(batch, task.name)
            own = table.texts(batch.rows.tolist())[0]
            asked.append((task.name, own, weights(mixture)))
            prompt = context.stream.prompt(other, codec)
            batch.source_ids = torch.tensor(prompt.encode([own], codec))
            batch.source_mask = torch.ones_like(batch.source_ids)
            batch.texts = (prompt.written(own) if text == "prompt" else own,)
            elsewhere = weights(router.mixture(batch, task.name))
            moves |= elsewhere != pytest.approx(asked[-1][2], abs=1e-3)
    assert moves == (text == "prompt")
    with serving(bank) as client:
        for task_name, own, expected in asked:
            reply = client.ask(own, task=task_name, sampling=None if kind == "bert" else Sampling(3))
            found = {name: round(w, 4) for name, w in reply.metadata.weights.items() if w > 1e-5}
            assert found == pytest.approx(expected, abs=2e-4)
        (name, own, _), definition = asked[0], WORDS[asked[0][0]]
        chat = f"<|system|>\n{definition}\n<|user|>\n{own}"
        reply = client.ask(chat, is_chat=True, sampling=None if kind == "bert" else Sampling(3))
        found = {name: round(w, 4) for name, w in reply.metadata.weights.items() if w > 1e-5}
        assert found == pytest.approx(asked[0][2], abs=2e-4), "a named instruction is as good as the task"
        assert reply.metadata.template == name


def test_inputs_are_read_as_an_endpoint_reads_them(lab: Lab, tmp_path: Path) -> None:
    """They have no prompt and are cut to the longest input of a task; rows that fill a batch are one padding token."""
    config = lab.config("llama", {"name": "sapt", "router_text": "input"})
    done = run(config, Storage.at(tmp_path))
    codec, stream = done.context.backbone.codec, done.context.stream
    table = stream.table(stream.tasks[0], "test", codec).part(torch.arange(3).numpy())
    reads = RouterTexts(stream, codec, "input")
    batch = Collate([table], codec.pad_id, router_texts=reads)(torch.arange(3).numpy(), 4)
    assert batch.input_ids is not None and batch.input_mask is not None
    rows = [ids[: int(m.sum())].tolist() for ids, m in zip(batch.input_ids, batch.input_mask, strict=True)]
    assert rows == [*Prompt().encode(table.texts(range(3)), codec), [codec.pad_id]]
    first = batch.first(2)
    assert first.input_ids is not None and len(first.input_ids) == 2
    long = reads.input_ids(stream.tasks[0], ["cat " * 100])[0]
    assert len(long) == stream.token_limits[0]
    whole = RouterTexts(stream, codec, "prompt")
    assert Collate([table], codec.pad_id, router_texts=whole)(torch.arange(3).numpy(), 3).input_ids is None


def test_older_records_say_what_their_kind_reads(lab: Lab) -> None:
    from raycl.bank.manifest import RouterInfo

    kinds = {"attention": "prompt", "keys": "input", "single": "input", "class_gaussians": "prompt"}
    assert {kind: routed_text(RouterInfo(kind=kind)) for kind in kinds} == kinds


def test_samples_that_are_trained_on_need_their_prompts(lab: Lab) -> None:
    for settings, word in (
        ({"name": "sapt", "ablation": "replay", "router_text": "input"}, "ablation=replay"),
        ({"name": "replay", "source": "generated", "learner": {"name": "l2p", "router_text": "input"}}, "source=real"),
    ):
        with pytest.raises(ConfigError, match=word):
            config = validate(RunConfig, lab.tree("t5", settings))
            run(config, Storage.at(lab.root / "never"))
