"""Examples that share rows train as in rows of their own, also where each has a mixture of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_samples import TOOL_TEMPLATES
from crash_copies import copied_after, left_after
from tiny import VARIANTS, Complete, Lab, run, trace

from raycl.backbone import causal
from raycl.backbone.positions import PackedRows, pack
from raycl.errors import ConfigError
from raycl.storage import Storage
from raycl.training.setup.checks import check

PACKED = {"packing": True}
MIGU = {"modifiers": [{"name": "migu", "threshold": 0.5, "skip_first_task": False}]}
CASES = {
    "sapt-sizes": ({}, {"backbone": {"gradient_checkpointing": True}}),
    "slm": ({}, {}),
    "slm-prefix": ({}, {}),
    "inflora": (MIGU, {}),
    "sdft": ({}, {}),
}
"""Method -> sections of both runs, and those of the packed one alone."""


@pytest.mark.parametrize("method", CASES)
def test_losses_are_those_of_padded_rows(
    lab: Lab, complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    settings, (both, more) = VARIANTS.get(method, method), CASES[method]
    plain, packed = Storage.at(tmp_path / "plain"), Storage.at(tmp_path / "packed")
    if both:
        run(lab.config("llama", settings, **both), plain)
    else:
        plain = complete("llama", method, "torch").storage
    shared: list[bool] = []

    def watched(lengths: Sequence[int], *others: Any) -> PackedRows:
        rows = pack(lengths, *others)
        shared.append(len(rows.examples) < len(lengths))
        return rows

    monkeypatch.setattr(causal, "pack", watched)
    run(lab.config("llama", settings, **both, **more, train=PACKED), packed)
    assert any(shared), "no examples have shared a row"
    close(packed, plain)


def test_steps_of_similar_length_resume_bit_for_bit(lab: Lab, tmp_path: Path) -> None:
    plain, whole = (Storage.at(tmp_path / name) for name in ("plain", "whole"))
    grouped = {"group_by_length": True}
    run(lab.config("llama", train=grouped), plain)
    config = lab.config("llama", train=grouped | PACKED)
    with copied_after(whole, 6):
        run(config, whole)
    stopped = left_after(whole, 6, tmp_path)
    run(config, stopped)
    assert trace(stopped) == trace(whole)
    close(whole, plain)


def test_losses_of_conversations_with_tools_are_those_of_padded_rows(lab: Lab, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "sky", "arguments": {"very": "warm"}}}
    for split, count in (("train", 12), ("test", 2)):
        lines = []
        for number in range(count):
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": "the sky is " * (1 + number % 3)},
                {"role": "assistant", "tool_calls": [call], "weight": int(number % 4 > 0)},
                {"role": "tool", "content": "blue"},
                {"role": "assistant", "content": "very blue"},
            ]
            lines.append(json.dumps({"messages": turns, "tools": tools}))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    stream = {"tasks": [{"name": "sky", "path": str(tmp_path)}], "max_source_tokens": 90, "max_target_tokens": 12}
    shared = {"stream": stream, "backbone": {"chat_template": TOOL_TEMPLATES["in-tags"]}}
    plain, packed = Storage.at(tmp_path / "plain"), Storage.at(tmp_path / "packed")
    run(lab.config("llama", "lora", **shared), plain)
    run(lab.config("llama", "lora", **shared, train=PACKED), packed)
    close(packed, plain)


def close(storage: Storage, expected: Storage) -> None:
    """Check that runs have the same steps, with losses and gradient norms that differ by rounding."""
    mine, other = trace(storage), trace(expected)
    assert [step[:2] + step[4:] for step in mine] == [step[:2] + step[4:] for step in other]
    assert [step[2] for step in mine] == pytest.approx([step[2] for step in other], rel=1e-4)
    assert [step[3] for step in mine] == pytest.approx([step[3] for step in other], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "method", "sections", "why"),
    [
        ("t5", "lora", {}, "is not decoder-only.*train.group_by_length pads less"),
        ("llama", "l2p", {}, "method 'l2p' learns soft prompts"),
        ("llama", VARIANTS["sapt-prompt"], {}, "method 'sapt' learns soft prompts"),
        (
            "llama",
            "lora",
            {"modifiers": [{"name": "migu", "count_pads": True}]},
            "count_pads is true, but train.packing",
        ),
    ],
)
def test_what_cannot_pack_is_refused(lab: Lab, kind: str, method: Any, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check(lab.config(kind, method, **sections, train=PACKED))
