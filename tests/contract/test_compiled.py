"""Layers under torch.compile train as they do without, and are evaluated as they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Complete, Lab, matrix, run, trace

from raycl.errors import BackboneError, ConfigError
from raycl.storage import Storage
from raycl.training import assembly
from raycl.training.engines.compilation import compile_layers
from raycl.training.setup.checks import check

COMPILED = {"compile": True}
MIGU = [{"name": "migu", "threshold": 0.5}]


def test_losses_and_scores_are_those_without(
    lab: Lab, complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Graphs are captured and differentiated, and not compiled as C++, which takes half a minute.
    monkeypatch.setattr(assembly, "compile_layers", partial(compile_layers, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = complete("llama", "lora", "torch").storage, Storage.at(tmp_path)
    run(lab.config("llama", train=COMPILED), compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, (
        "layers, without and with gradients at their inputs, alike in both tasks"
    )
    mine, other = trace(compiled), trace(plain)
    assert [step[2] for step in mine] == pytest.approx([step[2] for step in other], rel=1e-4)
    assert matrix(compiled) == matrix(plain)


@pytest.mark.parametrize(
    ("kind", "method", "sections", "why"),
    [
        ("t5", "lora", {}, "is not decoder-only"),
        ("llama", "slm", {}, "method 'slm' changes what layers compute"),
        ("llama", "lora", {"modifiers": MIGU}, "modifier 'migu' observes the outputs"),
        ("llama", "lora", {"engine": "fsdp"}, "engine=fsdp gathers"),
        ("llama", "lora", {"backbone": {"gradient_checkpointing": True}}, "gradient_checkpointing runs layers twice"),
    ],
)
def test_what_is_not_compiled_is_refused(lab: Lab, kind: str, method: str, sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"train.compile is true, but .*{why}.*: set train.compile to false"):
        check(lab.config(kind, method, **sections, train=COMPILED))


def test_a_compiler_that_is_missing_is_named(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackboneError, match="'no-such-compiler' is not there"):
        run(lab.config("llama", train=COMPILED), Storage.at(tmp_path))
