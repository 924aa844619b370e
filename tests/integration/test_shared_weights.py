"""A backbone whose weights stay in its mapped file learns what one with weights of its own learns, bit for bit.

The file stays as it is where its weights are trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_file import file_at
from tiny import Complete, Lab, matrix, run, trace

from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext

ALONE = DistributedContext.alone(torch.device("cpu"))
READS_MODELS = True
"""Weights stay in the files from which they are read."""


@pytest.mark.parametrize(
    ("kind", "method", "engine"),
    [
        ("bert", "lora", "torch"),
        ("t5", "sapt", "torch"),
        ("llama", "slm", "torch"),
        ("bert", {"name": "replay", "learner": "finetune"}, "torch"),
        ("bert", "lora", {"name": "deepspeed", "zero_stage": 2}),
    ],
    ids=["lora", "sapt", "slm", "finetune", "deepspeed"],
)
def test_mapped_weights_change_nothing(
    lab: Lab, complete: Complete, tmp_path: Path, kind: str, method: Any, engine: Any
) -> None:
    config = lab.config(kind, method, engine)
    file = Path(config.backbone.name, "model.safetensors")
    content = file.read_bytes()
    context, open_engine = build(config, ALONE)
    weights = [*context.backbone.model.parameters(), *context.backbone.model.buffers()]
    assert any(file_at(weight.data_ptr()) == str(file) for weight in weights)
    for weight in weights:
        weight.data = weight.data.clone()
    own, mapped = Storage.at(tmp_path / "own"), Storage.at(tmp_path / "mapped")
    StreamLoop(context, open_engine, own, ALONE).run()
    if isinstance(method, str) and engine == "torch":
        mapped = complete(kind, method, "torch").storage
    else:
        run(config, mapped)
    assert matrix(mapped) == matrix(own) and trace(mapped) == trace(own)
    assert file.read_bytes() == content
