"""ARM by itself: which inputs a step draws, what it adds, and how much of a task is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Lab

from raycl.errors import ConfigError, DataError
from raycl.methods.context import Step, TaskContext
from raycl.methods.pseudo_samples.samples import PseudoSamples, Volume, counts_of, take_real
from raycl.methods.pseudo_samples.sources import read_file, read_texts
from raycl.methods.sapt.reflection import Reflection, ReflectionConfig
from raycl.routing.attention import Attention, AttentionConfig, divergence
from raycl.training.assembly import build
from raycl.training.setup.run_config import load_config
from raycl.training.workers.distributed import DistributedContext

WIDE = 8


def remembered(tasks: int, rows: int = 20, weight: float = 0.5, **settings: Any) -> tuple[Reflection, Attention]:
    """Return a reflection on so many earlier tasks, and an attention that has a key more."""
    attention = Attention(WIDE, AttentionConfig(width=3), 0)
    reflection = Reflection(ReflectionConfig(**settings), weight)
    draw = torch.Generator().manual_seed(5)
    for number in range(tasks + 1):
        attention.begin(f"t{number}", number)
        if number < tasks:
            assert attention.key is not None
            attention.end({**attention.tensors(), "key": attention.key})
            reflection.samples[f"t{number}"] = PseudoSamples([[1]] * rows, [], [])
            reflection.abar[f"t{number}"] = torch.rand(number + 1, generator=draw).softmax(0)
            reflection.pooled[f"t{number}"] = torch.randn(rows, WIDE, generator=draw)
    return reflection, attention


FIRST = Step()


def value(reflection: Reflection, attention: Attention, step: Step = FIRST) -> float:
    term = reflection.term(attention, step)
    assert term is not None
    return float(term)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [(126, 2), (142, 2), (160, 3), (250, 5), (338, 6), (975, 19), (1000, 20), (14000, 280), (4000, 80), (5000, 100)],
)
def test_how_many_pseudo_samples(rows: int, kept: int) -> None:
    """2 % (SAPT, appendix C), rounded as in the files released with its code."""
    assert Volume(0.02).of(rows) == kept
    assert Volume(0.02).of(1) == 1 and Volume(1.0).of(rows) == rows
    assert Volume(1.0, 7).of(rows) == 7


def test_the_term_is_the_mean_over_inputs_summed_over_tasks() -> None:
    reflection, attention = remembered(3, rows=6)  # fewer than a draw: all of them count
    expected = 0.0
    for number in range(3):
        kept = torch.zeros(4)
        kept[: number + 1] = reflection.abar[f"t{number}"]
        rows = divergence(kept.expand(6, -1), attention(reflection.pooled[f"t{number}"]))
        expected += 0.5 * float(rows.mean())
    assert value(reflection, attention) == pytest.approx(expected, rel=1e-5)
    mean, _ = remembered(3, rows=6, kl_reduction="mean")
    assert value(mean, attention) == pytest.approx(expected / 3, rel=1e-5)


def test_gradients_reach_projection_and_new_key_alone() -> None:
    reflection, attention = remembered(2)
    term = reflection.term(attention, FIRST)
    assert term is not None
    term.backward()  # type: ignore[no-untyped-call]
    assert {name for name, parameter in attention.named_parameters() if parameter.grad is not None} == {
        *("down", "up", "norm_weight", "norm_bias", "key")
    }
    assert all(parameter.grad is None or parameter.grad.any() for parameter in attention.parameters())


def test_the_first_task_has_nothing_to_reflect_on() -> None:
    """The term is absent."""
    assert remembered(0)[0].term(remembered(0)[1], FIRST) is None
    reflection, attention = remembered(2, weight=0.0)
    assert reflection.term(attention, FIRST) is None, "and with lambda = 0 there is none either"


def test_a_draw_depends_on_the_step_alone() -> None:
    reflection, attention = remembered(2, batch=4)
    collected = []
    for seed, micro_batches in ((1, 1), (2, 1), (1, 4)):
        step = Step(0, seed, micro_batches)
        collected.append((value(reflection, attention, step), value(reflection, attention, step)))
    assert collected[0] == collected[2] and collected[0][0] == collected[0][1], (
        "every micro-batch of every worker adds the same"
    )
    assert collected[0] != collected[1], "another step draws others"
    drawn = reflection.draw(FIRST)
    assert all(len(places) == len(set(places.tolist())) == 4 for places in drawn.values())
    assert drawn["t0"].tolist() != drawn["t1"].tolist()


def test_which_steps_reflect() -> None:
    reflection, attention = remembered(1, every=3, skip_steps=1)
    due = []
    for step in range(8):
        due.append(reflection.term(attention, Step(step, step, 1)) is not None)
    assert due == [False, False, False, True, False, False, True, False]


def test_the_released_scale_grows_with_accumulation() -> None:
    """SAPT's code divides the task loss by the accumulation and not the KL."""
    plain, attention = remembered(2)
    scaled, _ = remembered(2, kl_scale_with_accum=True)
    step = Step(0, 7, 4)
    assert value(scaled, attention, step) == pytest.approx(4 * value(plain, attention, step))


def test_the_replay_buffer_is_restored_unchanged() -> None:
    first, _attention = remembered(2)
    first.samples["t1"] = PseudoSamples([[1, 2], [3]], [[4], []], [0, -1])
    second = Reflection(first.config, 0.5)
    second.take(["t0", "t1"], first.tensors())
    assert second.samples == first.samples
    assert all(torch.equal(second.target(task, 3), first.target(task, 3)) for task in ("t0", "t1"))


def rows_of(lab: Lab, phase: int = 0) -> TaskContext:
    parts, _ = build(lab.config("bert"), DistributedContext.alone(torch.device("cpu")))
    return TaskContext(parts.phases[phase], 4, parts.stream, parts.backbone.codec)


def test_real_inputs_are_drawn_by_seed_and_without_answers(lab: Lab) -> None:
    rows = rows_of(lab)
    half = take_real(rows, Volume(0.5), 3)
    known = [ids.tolist() for ids in rows.tables("train")[0].columns(range(14)).source_ids]
    assert len(half) == 7 and all(source in known for source in half.sources)
    assert half.labels == [] and half.targets == []
    assert half == take_real(rows, Volume(0.5), 3) and half.sources != take_real(rows, Volume(0.5), 4).sources
    answered = take_real(rows, Volume(0.5), 3, answers=True)
    assert answered.sources == half.sources and set(answered.labels) == {0, 1}


def test_inputs_from_files(lab: Lab, tmp_path: Path) -> None:
    rows = rows_of(lab)
    file = tmp_path / "colour.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in ("fire is warm", "the sea", "cold sky")))
    result, given = read_file(rows, str(tmp_path), Volume(0.15))
    codec = build(lab.config("bert"), DistributedContext.alone(torch.device("cpu")))[0].backbone.codec
    assert result.sources == codec.encode_source(["fire is warm", "the sea"]), "as many as 15 % of 14 rows"
    assert given == ["", ""]
    file.write_text('{"text": "the\u2028sea"}\r\n\r\n{"text": "cold sky"}\n', encoding="utf-8")
    (colour,) = rows.phase.tasks
    read = [text for text, _ in read_texts(str(tmp_path), colour)]
    assert read == ["the\u2028sea", "cold sky"], "a line ends where JSON lines do"
    for text, said in (
        ("", "holds no pseudo-sample"),
        ('{"text": " "}', "line 1 has no text"),
        ("fire", "line 1 is no pseudo-sample"),
        ("[" * 100_000, "line 1 is no pseudo-sample"),
        ('{"text": "cut \\ud83d"}', "pseudo-sample 1: half a character"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=said):
            read_file(rows, str(tmp_path), Volume(0.15))
    with pytest.raises(DataError, match=r"animal.jsonl' with pseudo-samples is missing"):
        read_file(rows_of(lab, 1), str(tmp_path), Volume(0.15))
    file.write_bytes('{"text": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"colour.jsonl' with pseudo-samples is not UTF-8 \(byte 13\): expected a JSON"):
        read_file(rows, str(tmp_path), Volume(0.15))


def test_inputs_from_the_files_of_sapts_authors(lab: Lab, tmp_path: Path) -> None:
    rows, file = rows_of(lab), tmp_path / "colour" / "train.json"
    file.parent.mkdir()
    instances = [{"input": text, "output": "red"} for text in ("fire is warm", "the sea", "cold sky")]
    file.write_text(json.dumps({"Definition": ["of no use"], "Positive Examples": [], "Instances": instances}))
    result, given = read_file(rows, str(tmp_path), Volume(0.15))
    codec = build(lab.config("bert"), DistributedContext.alone(torch.device("cpu")))[0].backbone.codec
    assert result.sources == codec.encode_source(["fire is warm", "the sea"]) and not result.targets
    assert given == ["red", "red"]
    for content, said in (
        (b'[{"input": "x"}]', "holds no pseudo-samples: expected"),
        (b'{"Instances": [{"text": "x"}]}', "holds no pseudo-samples: expected"),
        (b'{"Instances": [{"input": " "}]}', "holds an empty pseudo-sample, or none"),
        (b'{"Instances": []}', "holds an empty pseudo-sample, or none"),
        (b"\xff\xfe", r"train.json' with pseudo-samples is not UTF-8 \(byte 0\)"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=said):
            read_file(rows, str(tmp_path), Volume(0.15))
    (tmp_path / "colour.jsonl").write_text('{"text": "cold"}')
    assert read_file(rows, str(tmp_path), Volume(0.15))[0].sources == codec.encode_source(["cold"]), "lines come first"


def test_fallback_samples_are_recorded() -> None:
    samples = PseudoSamples([[1, 2], [3]], [], [], 2)
    assert PseudoSamples.of(samples.tensors()) == samples
    assert PseudoSamples.of(PseudoSamples([[1]], [[2]], [0]).tensors()) == PseudoSamples([[1]], [[2]], [0])
    assert counts_of({"a": samples, "b": PseudoSamples([[1]], [], [])}) == {
        "pseudo": {"a": 2, "b": 1},
        "fallback_samples": {"a": 2},
    }
    assert counts_of({}) == {"pseudo": {}}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method.arm.weight=-1"], "config key 'method.arm.weight' is -1: input should be greater than or equal to 0"),
        (["method.arm.source=file"], "method.arm.source=file needs method.arm.files"),
        (["method.arm.files=there"], "and no other source does"),
        (["method.arm.source=none"], "config key 'method.arm.source' is 'none': input should be 'real', 'generated'"),
        (["method.arm.fraction=0"], "config key 'method.arm.fraction' is 0: input should be greater than 0"),
        (["method.attention.tau=0"], "config key 'method.attention.tau' is 0"),
        (["method.attention.pruning_threshold=0.7"], "config key 'method.attention.pruning_threshold' is 0.7"),
        (["method.attention.proj_act=before"], "config key 'method.attention.proj_act' is 'before'"),
        (["method.value=adapter"], "config key 'method.value' is 'adapter'"),
    ],
)
def test_errors_of_settings_use_the_users_names(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["method=sapt", *overrides])
    assert said in str(caught.value)
