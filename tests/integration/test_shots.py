"""`eval.shots`: in-context learning by the backbone before any training, beside the untrained row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import TASKS, Complete, Lab, exported, matrix, run, trace

from raycl.backbone import load_codec
from raycl.data.lengths import Positions
from raycl.data.prompts import Prompt
from raycl.data.stream import open_stream
from raycl.errors import ConfigError
from raycl.launch import prepared_run
from raycl.operations.report.run_comparison import compare
from raycl.operations.report.tables import comparison_table, matrix_table
from raycl.operations.sweep.trials.prefix import prefix_keys
from raycl.operations.sweep.trials.trial import separate_tree
from raycl.scoring.scored_task import ScoredTask
from raycl.storage import Storage
from raycl.training.setup import lengths


def test_the_rows_stand_beside_each_other_and_training_stays_as_it_was(
    lab: Lab, complete: Complete, tmp_path: Path
) -> None:
    """Examples are train rows with their answers, the same for each text; the last prompt is the text's own."""
    plain, storage = complete("llama", "lora", "torch").storage, Storage.at(tmp_path)
    config = lab.config("llama", "lora", eval={"untrained": True, "shots": 3})
    done = run(config, storage)
    assert trace(storage) == trace(plain) and matrix(storage) == matrix(plain) and exported(storage) == exported(plain)
    results = storage.read_json("results.json")
    tree = results["in_context"]
    assert set(tree["cells"]) == set(TASKS) == set(results["untrained"]["cells"])
    assert tree["mean"] == sum(cell["value"] for cell in tree["cells"].values()) / len(TASKS)
    assert plain.read_json("results.json")["in_context"] is None
    stream, codec = done.context.stream, done.context.backbone.codec
    for task in stream.tasks:
        scored = ScoredTask(stream, task, config.eval, codec, shots=3)
        train = stream.table(task, "train", codec)
        known = set(
            zip(train.texts(range(len(train))), (r[0] for r in train.references(range(len(train)))), strict=True)
        )
        prompt = stream.with_shots(task, 3, codec)[0]
        assert len(set(prompt.shots)) == 3 and set(prompt.shots) <= known
        ids = scored.table.columns([0]).source_ids[0].tolist()
        assert ids == prompt.encode(scored.texts[:1], codec)[0]
        assert len(ids) > 3 * len(stream.table(task, "test", codec).columns([0]).source_ids[0]) / 2
        answers = [
            json.loads(line)["answer"]
            for line in storage.read_text(f"predictions/in_context/{task.name}.jsonl").splitlines()
        ]
        assert len(answers) == len(scored.table)
        assert scored.score([f"{refs[0]}\n\nmore" for refs in scored.references]).value == 100
    shown = str(matrix_table(results))
    assert "untrained " in shown and "in context (3) " in shown
    assert [line.method for line in compare([results])][:2] == ["untrained", "in context (3)"]
    assert "in context (3)" in str(comparison_table(compare([results])))
    assert separate_tree(config)["eval"]["shots"] == 0
    assert prefix_keys(config, list(TASKS)) != prefix_keys(
        lab.config("llama", "lora", eval={"untrained": True}), list(TASKS)
    )


def test_examples_are_turns_of_the_chat_template() -> None:
    shots = (("two plus two", "four"), ("<|system|>\nBe kind.\n<|user|>\nthree plus one", "four"))
    chat = Prompt(chat_template="any", system="Add.", shots=shots)
    roles = [(message.role, message.content) for message in chat.messages("one plus one")]
    assert roles == [
        ("system", "Add."),
        ("user", "two plus two"),
        ("assistant", "four"),
        ("user", "three plus one"),
        ("assistant", "four"),
        ("user", "one plus one"),
    ]
    own = chat.messages("<|system|>\nSubtract.\n<|user|>\none minus one")
    assert own[0].content == "Subtract." and own[-1].content == "one minus one" and len(own) == 6
    assert Prompt("Q: ", "\nA: ", shots=(("a", "b"),)).written("c") == "Q: a\nA: b\n\nQ: c\nA: "


@pytest.mark.parametrize(
    ("kind", "sections", "words"),
    [
        ("bert", {}, "eval.shots is set and encoder-only backbone"),
        (
            "llama",
            {"eval": {"shots": 60}},
            "eval.shots=60 and task 'colour' has 14 train rows: expected at most as many",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(lab: Lab, kind: str, sections: dict[str, Any], words: str) -> None:
    tree = {"eval": {"shots": 2}, **sections}
    with pytest.raises(ConfigError, match=words):
        prepared_run.prepare(lab.config(kind, "lora", **tree))


def test_examples_must_fit_the_positions(lab: Lab) -> None:
    config = lab.config("llama", "lora", eval={"shots": 3})
    stream = open_stream(config.stream, config.seed)
    codec = load_codec(config.backbone, *stream.token_limits)
    lengths._check_shots(3, stream, codec, Positions(120, 120))
    with pytest.raises(ConfigError, match=r"eval.shots=3: examples, text and answer of task 'colour' take up to \d\d"):
        lengths._check_shots(3, stream, codec, Positions(40, 40))
