"""Tests of replay from stored rows, generated inputs with the model's own answers, rows of files, and instructions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crash_copies import run_and_leave
from phases import begin_phase
from tiny import ENGINES, TRAIN_ROWS, WORDS, Lab, Stop, exported, matrix, run, trace

from raycl.bank import Bank
from raycl.data.tokens import HeldRows
from raycl.errors import ConfigError, DataError
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.generator import Generator, GeneratorConfig, Texts
from raycl.methods.pseudo_samples.samples import Volume, take_real
from raycl.methods.replay.replay import Replay
from raycl.methods.sapt.sapt import Sapt
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import load_config
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
WRITER = {"steps": 10, "rate": 0.02, "max_tokens": 8}
INSTRUCTION = "is the sky warm"
LABELS = {"colour": ("blue", "red"), "animal": ("cat", "dog")}


def replay(lab: Lab, kind: str, learner: str = "lora", **generator: Any) -> dict[str, Any]:
    """Generated samples, by the run's own backbone, or a small decoder where that cannot write."""
    if kind == "bert":
        generator["backbone"] = {"name": str(lab.model_folder("llama")), "dtype": "float32"}
    settings = {"name": "replay", "learner": learner, "share": 0.3, "source": "generated"}
    return {**settings, "generator": {**WRITER, **generator}}


def instructed(lab: Lab) -> dict[str, Any]:
    """Return the stream's settings with an instruction for its first task alone."""
    return {"tasks": [{**lab.tasks[0], "definition": INSTRUCTION}, lab.tasks[1]], "prompt": "long"}


@pytest.mark.parametrize(
    ("kind", "learner", "generator"),
    [
        ("bert", "lora", {}),
        ("llama", "inclora", {}),
        ("t5", "finetune", {}),
        ("t5", "lora", {"value": "prompt", "prompt_length": 3, "epochs": 5}),
    ],
)
def test_a_run_that_replays_generated_inputs_resumes_where_it_stopped(
    lab: Lab, tmp_path: Path, kind: str, learner: str, generator: dict[str, Any]
) -> None:
    settings = replay(lab, kind, learner, **generator)
    for other in ("steps", "rate") if "value" in generator else ():
        del settings["generator"][other]
    config = lab.config(kind, settings)
    whole, again = Storage.at(tmp_path / "whole"), Storage.at(tmp_path / "again")
    done = run_and_leave(config, whole, {6: tmp_path / "again"})
    method = done.context.method
    assert isinstance(method, Replay)
    for task, kept in method.samples.items():
        assert len(kept) == 4, "30 % of 14 rows"
        said = [LABELS[task][label] for label in kept.labels]
        assert kept.targets == done.context.backbone.codec.encode_target(said), "labels of its own task"
    assert whole.read_json("results.json")["phase_summaries"][-1]["replay"] == {"pseudo": {"colour": 4, "animal": 4}}
    run(config, again)
    assert trace(again) == trace(whole) and exported(again) == exported(whole) and matrix(again) == matrix(whole)
    assert len(trace(whole)) == 4 + 5, "14 rows, then 14 and 4"


def test_engines_that_shard_give_the_same_samples(lab: Lab, tmp_path: Path) -> None:
    collected = []
    for name in ("torch", "zero2", "zero3"):
        config = lab.config("t5", replay(lab, "t5"), ENGINES[name])
        done = run(config, Storage.at(tmp_path / name), on_phase=lambda record: False)
        method = done.context.method
        assert isinstance(method, Replay)
        collected.append(method.samples["colour"])
    assert collected[0] == collected[1] == collected[2] and len(collected[0]) == 4


@pytest.mark.parametrize("learner", ["lora", "finetune"])
def test_generating_changes_nothing_of_what_was_learned_or_is_published(lab: Lab, tmp_path: Path, learner: str) -> None:
    """Adapters in training come back after the generator's; the bank holds what it holds without one."""
    banks, collected = [], []
    for settings in ({"name": "replay", "learner": learner}, replay(lab, "t5", learner)):
        storage = Storage.at(tmp_path / str(len(collected)))
        with pytest.raises(Stop):
            run(lab.config("t5", settings), storage, 5)
        newest = Bank(storage.sub("bank")).newest()
        banks.append([(entry.name, entry.tensors, entry.extras) for entry in newest.adapters] if newest else None)
        collected.append((trace(storage)[:4], newest and newest.router))
    assert collected[0] == collected[1] and banks[0] == banks[1]
    assert bool(banks[0]) is (learner == "lora")


def test_an_adapter_in_training_is_put_aside_while_a_generator_is_trained(lab: Lab) -> None:
    context, _ = build(lab.config("t5", replay(lab, "t5")), WORLD)
    method = context.method
    begin_phase(context)
    assert isinstance(method, Replay) and method.stack is not None
    names = [name for name, _ in method.backbone.named_parameters()]
    before = {name: p.detach().clone() for name, p in method.backbone.named_parameters()}
    held = {name: id(p) for name, p in method.backbone.named_parameters()}
    trainable = dict(method.stack.trainable)
    rows = TaskContext(context.phases[0], 4, context.stream, context.backbone.codec)
    Generator(GeneratorConfig(**WRITER), method.backbone, method.stack, 0).write(rows, Volume(0.3))
    assert [name for name, _ in method.backbone.named_parameters()] == names and method.stack.trainable == trainable
    assert {name: id(p) for name, p in method.backbone.named_parameters()} == held
    assert all(torch.equal(p, before[name]) for name, p in method.backbone.named_parameters())


def test_samples_are_shuffled_among_the_rows_of_every_epoch(lab: Lab, tmp_path: Path) -> None:
    config = lab.config("bert", replay(lab, "bert"), train={"epochs": 2})
    with pytest.raises(Stop):
        run(config, Storage.at(tmp_path), 5)
    done = run(config, Storage.at(tmp_path))
    method = done.context.method
    assert isinstance(method, Replay)
    kept = method.samples["colour"]
    loader = begin_phase(done.context, 1, resumed=True).loader()
    order = loader.order
    assert order.count == TRAIN_ROWS + 4 and order.steps_per_epoch == 5
    rows = {label: row for row, label in enumerate(done.context.backbone.label_ids())}
    expected = sorted((s, rows[LABELS["colour"][label]]) for s, label in zip(kept.sources, kept.labels, strict=True))
    for epoch in range(2):
        seen = []
        for step in range(5 * epoch, 5 * epoch + 5):
            (batch,) = loader.micro_batches(step)
            for ids, mask, label in zip(batch.source_ids, batch.source_mask, batch.label_ids.tolist(), strict=True):
                seen.append((ids[mask > 0].tolist(), label))
        old = [pair for pair in seen if pair[1] in (rows["red"], rows["blue"])]
        assert sorted(old) == expected


def test_held_rows_are_read_as_those_of_a_table() -> None:
    (task,) = load_config(None, ["stream.tasks=[topic]"]).stream.tasks and [None]
    rows = HeldRows(task, [[5, 6, 7], [8]], [[1], [2, 3]], [0, -1])  # type: ignore[arg-type]
    columns = rows.columns(np.array([1, 0]))
    assert [ids.tolist() for ids in columns.source_ids] == [[8], [5, 6, 7]] and columns.labels.tolist() == [-1, 0]
    assert [ids.tolist() for ids in columns.target_ids] == [[2, 3], [1]] and rows.source_lengths.tolist() == [3, 1]
    assert rows.has_targets and not HeldRows(task, [[5]], [[]], [0]).has_targets  # type: ignore[arg-type]


def test_rows_of_files_are_answered_by_the_model_where_the_answer_is_left_out(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    first = {"text": "fire is cold", "label": "blue"}
    (folder / "colour.jsonl").write_text("\n".join(map(json.dumps, (first, {"text": "the sea"}))))
    (folder / "animal").mkdir()
    instances = [{"input": "it purrs", "output": "dog"}, {"input": "it barks", "output": ""}]
    (folder / "animal" / "train.json").write_text(json.dumps({"Instances": instances}))
    settings = {"name": "replay", "share": 0.3, "source": "file", "files": str(folder)}
    config, storage = lab.config("t5", settings), Storage.at(tmp_path / "run")
    done = run(config, storage)
    method = done.context.method
    assert isinstance(method, Replay)
    codec = done.context.backbone.codec
    for task, texts in (("colour", ["fire is cold", "the sea"]), ("animal", ["it purrs", "it barks"])):
        kept = method.samples[task]
        rows = TaskContext(done.context.phases[0], 4, done.context.stream, codec)
        assert kept.sources == rows.prompts(next(t for t in done.context.stream.tasks if t.name == task), texts)
        given = LABELS[task][kept.labels[0]]
        assert given == {"colour": "blue", "animal": "dog"}[task] and kept.labels[1] in (0, 1)
    for content, said in (
        ('{"text": "fire", "label": "green"}', r"has the answer 'green', which is no label of task 'colour': expected"),
        ("", r"colour.jsonl' holds no pseudo-sample"),
    ):
        (folder / "colour.jsonl").write_text(content)
        with pytest.raises(DataError, match=said):
            check(config)
    (folder / "colour.jsonl").unlink()
    with pytest.raises(DataError, match=r"is missing: .* \(method\.files\), or choose method\.source=real"):
        check(config)


def test_a_generator_writes_instructions_that_stand_for_the_tasks_own(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAPT, appendix E.1. A task without an instruction gets inputs alone."""
    written, given = list[list[tuple[str, str]]](), list[str | None]()
    sample, prompts = Generator._sample, TaskContext.prompts

    def watched(self: Generator, start: Any, count: int, texts: Texts) -> list[tuple[str, str]]:
        written.append(sample(self, start, count, texts))
        return written[-1]

    def recorded(self: TaskContext, task: Any, texts: Any, instruction: str | None = None) -> list[list[int]]:
        given.append(instruction)
        return prompts(self, task, texts, instruction)

    monkeypatch.setattr(Generator, "_sample", watched)
    monkeypatch.setattr(TaskContext, "prompts", recorded)
    writer = {"steps": 60, "rate": 0.02, "max_tokens": 16, "lora_dropout": 0.0, "writes": "instruction_and_input"}
    writer |= {"repetition_penalty": 1.0, "top_k": 1}
    arm = {"source": "generated", "fraction": 0.3}
    settings = {"name": "sapt", "target_modules": ["attention", "ffn"], "arm": arm, "generator": writer}
    done = run(lab.config("t5", settings, stream=instructed(lab)), Storage.at(tmp_path))
    method = done.context.method
    assert isinstance(method, Sapt)
    first, second = written
    assert {instruction for instruction, _ in first} == {INSTRUCTION} and all(text for _, text in first)
    assert [instruction for instruction, _ in second] == [""] * 4 and given == [INSTRUCTION, None]
    kept = method.reflection.samples["colour"]
    start = done.context.backbone.codec.encode_target([INSTRUCTION])[0][:-1]
    assert all(ids[: len(start)] == start for ids in kept.sources)


def test_the_instruction_is_one_that_was_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn at random; one that leaves no room for a text is passed over, and if none does, the task keeps its own."""
    settings = {"name": "sapt", "arm": {"source": "generated", "fraction": 0.3}}
    context, _ = build(lab.config("t5", settings, stream=instructed(lab)), WORLD)
    rows = TaskContext(context.phases[0], 4, context.stream, context.backbone.codec)
    assert isinstance(context.method, Sapt)
    generator = Generator(GeneratorConfig(writes="instruction_and_input"), context.backbone, context.method.stack, 0)
    (task,) = rows.phase.tasks
    assert rows.instruction(task) == INSTRUCTION and rows.instruction(context.stream.tasks[1]) == ""
    long = "fire " * 30
    for written, expected in (
        ([(long, "the sea"), ("fire runs", "is cold")] * 2, "fire runs"),
        ([(long, "the sea"), (long, "is cold")] * 2, INSTRUCTION),
    ):
        monkeypatch.setattr(Generator, "_samples_like", lambda *given, written=written: written)
        result = generator.write(rows, Volume(0.3))
        assert result.sources == rows.prompts(task, [text for _, text in written], expected)
    assert result.sources == rows.prompts(task, [text for _, text in written])


def test_texts_are_parted_at_a_token_that_none_of_them_has(lab: Lab) -> None:
    codec = build(lab.config("t5"), WORLD)[0].backbone.codec
    texts = Texts.of(codec, ["the sea", "fire is much"], "is a cold", 100)
    separator = texts.separator
    assert separator is not None and codec.tokenizer.convert_ids_to_tokens(separator) == "red"
    (front,), (one, other) = codec.encode_target(["is a cold"]), codec.encode_target(["the sea", "fire is much"])
    assert texts.ids == [[*front[:-1], separator, *one], [*front[:-1], separator, *other]]
    width = max(map(len, texts.ids))
    rows = [[codec.pad_id, *ids, *[codec.pad_id] * (width - len(ids))] for ids in texts.ids]
    blank = [codec.pad_id] * (width + 1)
    lost = [[*front, *blank][: width + 1], [*front[:-1], separator, *blank][: width + 1], [separator, *one, *blank]]
    rows += [row[: width + 1] for row in lost]
    assert texts.parted(torch.tensor(rows)) == [("is a cold", "the sea"), ("is a cold", "fire is much")]
    everything = Texts.of(codec, [" ".join(WORDS)], "is a cold", 100)
    assert everything.separator is None, "no token is free: inputs alone"
    assert Texts.of(codec, ["the sea"], "", 2).ids == [codec.encode_target(["the sea"])[0][:2]]


def test_wrong_settings_are_refused_before_anything_starts(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.source=generated needs a backbone that generates texts, and this"):
        check(lab.config("bert", {"name": "replay", "source": "generated"}))
    with pytest.raises(ConfigError, match=r"method\.source=file needs method\.files, the folder of <task>\.jsonl"):
        load_config(None, ["method=replay", "method.source=file"])
    with pytest.raises(ConfigError, match=r"method\.generator\.steps=5 acts on nothing beside method\.source=real"):
        load_config(None, ["method=replay", "method.generator.steps=5"])
    with pytest.raises(ConfigError, match=r"config key 'method\.source' is 'pseudo'"):
        load_config(None, ["method=replay", "method.source=pseudo"])
    with pytest.raises(ConfigError, match=r"method\.source=generated replays inputs with answers, which stream\.obj"):
        check(lab.config("llama", replay(lab, "llama"), stream={"objective": "clm"}))
    writer: dict[str, Any] = {"writes": "instruction_and_input", "max_tokens": 16}
    with pytest.raises(ConfigError, match=r"writes=instruction_and_input, but no task has an instruction in its prom"):
        check(lab.config("t5", replay(lab, "t5", **writer)))
    check(lab.config("t5", replay(lab, "t5", **writer), stream=instructed(lab)))
    for short, reads in ((8, {}), (7, {"backbone": {"name": str(lab.model_folder("llama")), "dtype": "float32"}})):
        writer["max_tokens"] = short
        with pytest.raises(ConfigError, match=rf"task 'colour' leaves no room .*max_tokens={short}: expected at least"):
            check(lab.config("t5", replay(lab, "t5", **writer, **reads), stream=instructed(lab)))


def test_real_rows_stay_numbers(lab: Lab, tmp_path: Path) -> None:
    """Replayed rows are stored as before there were other sources: nothing of those is in a checkpoint."""
    done = run(lab.config("bert", {"name": "replay", "share": 0.2}), Storage.at(tmp_path))
    method = done.context.method
    assert isinstance(method, Replay) and method.source is None and not len(method.samples)
    values, tensors = method.state_dict()
    assert "replayed" not in values and not [name for name in tensors if name.startswith("replayed")]
    assert method.summary({}) == method.learner.summary({})
    rows = TaskContext(done.context.phases[0], 4, done.context.stream, done.context.backbone.codec)
    assert len(take_real(rows, Volume(0.2), 0)) == len(rows.stored_rows(rows.phase.tasks[0], 0.2))
