"""MoRAM: one memory over all tasks, whose keys choose themselves by a token alone, in training and when served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import Lab, exported, matrix, run, trace

from raycl.adapters.formula import SelfActivation
from raycl.config import validate
from raycl.errors import ConfigError
from raycl.methods.lora.moram import Moram, MoramConfig
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Mixture

WORLD = DistributedContext.alone(torch.device("cpu"))


def second_task(lab: Lab, kind: str) -> tuple[Moram, Any]:
    """Return the beginning of a second task, after a first one whose values are random."""
    context, _ = build(lab.config(kind, {"name": "moram", "r": 3, "top_k": 2, "threshold": 0.3}), WORLD)
    assert isinstance(context.method, Moram)
    torch.manual_seed(1)
    begun = begin_phase(context, 0)
    for name, parameter in context.backbone.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    end_phase(context, begun)
    begin_phase(context, 1)
    return context.method, context


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_a_tasks_first_step_begins_with_what_the_memory_holds(lab: Lab, kind: str) -> None:
    """New keys take part at once: their values are zero, and the share that they take is missing from the others."""
    method, context = second_task(lab, kind)
    names = [*context.method._learned]
    layer = next(iter(method.stack.layers.values()))
    assert method.stack.activation == "self(top_k=2,temperature=0.03,threshold=0.3)"
    assert len(names) == 1 and layer.lora_A is not None
    x = torch.randn(4, 5, layer.inputs, generator=torch.Generator().manual_seed(0))
    context.backbone.train()
    low, high = method._learned[names[0]].linears[layer.path]
    z = x @ torch.cat([low, layer.lora_A.detach()]).T
    memory = SelfActivation(2, 0.03, 0.3)
    weights = memory.weights(z, torch.ones_like(z), training=True)
    mixture = {**dict.fromkeys(names, 1.0), method._task: 1.0}
    with torch.no_grad(), method.stack.activate(Mixture.same(mixture, 4)):
        found = layer(x) - layer.base(x)
    torch.testing.assert_close(found, method.scale * (weights * z)[..., :3] @ high.T, atol=1e-5, rtol=1e-4)
    assert float(weights[..., 3:].sum()) > 0, "some tokens choose new keys"


def test_another_threshold_trains_the_same_and_answers_otherwise(lab: Lab, tmp_path: Path) -> None:
    """The threshold is for evaluation and serving: it is in the bank with each adapter."""
    done = {}
    for threshold in (0.0, 1.0):
        storage = Storage.at(tmp_path / str(threshold))
        method = {"name": "moram", "threshold": threshold}
        run(lab.config("bert", method, train={"learning_rate": 0.05, "epochs": 3}), storage)
        done[threshold] = trace(storage), exported(storage), matrix(storage)
    assert done[0.0][0] == done[1.0][0]
    assert done[0.0][1] != done[1.0][1] or done[0.0][2] != done[1.0][2]


def test_linears_have_one_rank() -> None:
    with pytest.raises(ConfigError, match="rank_pattern is not supported by this method"):
        validate(MoramConfig, {"name": "moram", "rank_pattern": {"attention.query": 3}})
