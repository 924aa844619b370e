"""SAPT served: the attention runs beside the model, on each request's own prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service_client import bank_of, examples, serving
from tiny import KINDS, Complete, Done, Lab, evaluated_by, opened, run

from raycl import config as configs
from raycl.cli import main
from raycl.data.loader import Collate, eval_batches
from raycl.generation.requests import Sampling
from raycl.generation.task_prompts import route_batch
from raycl.launch.page.server import RunReader
from raycl.launch.worker import CONFIG
from raycl.operations.report.tables import matrix_table
from raycl.storage import Storage


@pytest.mark.parametrize(("kind", "method"), [*((kind, "sapt") for kind in KINDS), ("t5", "sapt-prompt")])
def test_each_request_has_the_weights_of_its_own_prompt(
    complete: Complete, tmp_path: Path, kind: str, method: str
) -> None:
    """A request among others of other lengths has the weights that it has alone and in the stream's own evaluation."""
    done = complete(kind, method, "torch")
    bank = bank_of(done, tmp_path)
    model, expected = opened(bank, bank.open(2)), {}
    codec = model.backbone.codec
    for task in done.context.stream.tasks:
        table = done.context.stream.table(task, "test", codec)
        for batch in eval_batches(Collate([table], codec.pad_id), 1):
            evaluated = evaluated_by(done).mixture(batch)
            weights = dict(zip(evaluated.names, evaluated.weights[0].tolist(), strict=True))
            mixture = model.loaded.named(route_batch(model.router, model.backbone, model.model.stack, batch))
            names = [model.loaded.names[key] for key in mixture.names]
            assert dict(zip(names, mixture.weights[0].tolist(), strict=True)) == pytest.approx(weights, abs=1e-6)
            expected[table.texts(batch.rows.tolist())[0]] = weights
    assert len({round(weights.get("colour", 0.0), 4) for weights in expected.values()}) >= 3, "a mix-up would be seen"
    sampling = None if kind == "bert" else Sampling(3)
    with serving(bank, max_batch=len(expected)) as client:
        with client.paused():
            replies = {text: client.ask(text, sampling=sampling) for text in expected}
        for text, reply in replies.items():
            result = {name: weight for name, weight in reply.metadata.weights.items() if weight}
            assert result == pytest.approx({name: item for name, item in expected[text].items() if item}, abs=1e-5)


def test_each_text_is_read_with_the_template_of_its_task(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks with instructions of their own: named, guessed from the bare text, or not put around it at all.

    Results, table and `raycl evaluate` tell both rows.
    """
    tasks = [{**task, "definition": words} for task, words in zip(lab.tasks, ("red red", "cat cat"), strict=True)]
    config = lab.config(
        "llama",
        {"name": "sapt", "arm": {"fraction": 1.0}},
        stream={"tasks": tasks, "prompt": "long"},
        train={"epochs": 6, "learning_rate": 0.03},
    )
    storage = Storage.at(tmp_path / "run")
    done = Done(config, storage, run(config, storage).context)
    bank = bank_of(done, tmp_path)
    results = storage.read_json("results.json")
    other, given = results["other_row"], dict(zip(("colour", "animal"), results["matrix"][-1], strict=True))
    assert other["instruction"] == "chosen"
    assert other["mean"] == sum(cell["value"] for cell in other["cells"].values()) / 2
    alone = f"{results['metrics']['ap']:.1f} with its task's instruction, {other['mean']:.1f} by the text alone"
    table = str(matrix_table(results))
    assert f"AP at an endpoint: {alone}" in table and "\n  by the text alone " in table
    storage.write(CONFIG, configs.to_yaml(config).encode())
    shown = RunReader(storage.uri).progress()["matrix"]
    assert shown["rows"] == ["after colour", "after animal", "by the text alone"]
    assert shown["values"][-1] == [other["cells"][name]["value"] for name in shown["tasks"]]
    for spec in lab.tasks:
        rows, name = f"{spec['path']}/test.jsonl", spec["name"]
        for options in ([], ["--task", name]):
            assert main.main(["evaluate", bank.storage.uri, rows, "--json", *options]) == 0
            tree = json.loads(capsys.readouterr().out)
            measured = tree["alone"] if options else tree["score"]
            assert measured["value"] == other["cells"][name]["value"]
        assert tree["score"]["value"] == given[name]["value"]
        assert main.main(["evaluate", bank.storage.uri, rows, "--task", name]) == 0
        assert f"by the text alone: {measured['value']:.1f}" in capsys.readouterr().out
    asked = examples(done, bank)
    with serving(bank, max_batch=5) as client:
        with client.paused():
            told = [client.ask(item.text, task=item.task) for item in asked]
            free = [client.ask(item.text) for item in asked]
            bare = client.ask("red red\nfire is\nOutput: ", templated=False)
        assert [reply.text for reply in told] == [item.answer for item in asked]
        assert all(reply.metadata.template == item.task for reply, item in zip(told, asked, strict=True))
        by_name = {(item.task, item.text): reply for item, reply in zip(asked, told, strict=True)}
        for item, reply in zip(asked, free, strict=True):
            assert reply.metadata.template == item.task, "by its words"
            same = by_name[item.task, item.text]
            assert reply.text == same.text
            assert reply.metadata.weights == pytest.approx(same.metadata.weights, abs=1e-5)
        named = client.ask("fire is", task="colour")
        assert bare.text.strip() == named.text and bare.metadata.weights == pytest.approx(
            named.metadata.weights, abs=1e-5
        )
