"""A backbone that looks at weights in shared memory learns what one with weights of its own learns, bit for bit.

The memory is mapped read-only, as Ray's object store is: a write there ends this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Complete, Lab, matrix, run, trace

from raycl.pretrained import weight_files
from raycl.run.assembly import build
from raycl.storage import Storage
from raycl.training.distributed import DistributedContext
from raycl.training.stream_loop import StreamLoop

ALONE = DistributedContext.alone(torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "method", "engine", "shared"),
    [
        ("bert", "lora", "torch", True),
        ("t5", "sapt", "torch", True),
        ("llama", "slm", "torch", True),
        ("bert", ("separate", "inclora"), "torch", True),
        ("bert", {"name": "replay", "learner": "finetune"}, "torch", False),
        ("bert", "lora", {"name": "deepspeed", "zero_stage": 2}, False),
    ],
    ids=["lora", "sapt", "slm", "separate", "finetune", "deepspeed"],
)
def test_shared_weights_change_nothing(
    lab: Lab, complete: Complete, tmp_path: Path, kind: str, method: Any, engine: Any, shared: bool
) -> None:
    config = lab.config(kind, method, engine)
    files = [np.memmap(file, np.uint8, "r") for file in weight_files(config.backbone.name)]
    assert files, "the laboratory saves safetensors"
    first, last = files[0].ctypes.data, files[0].ctypes.data + files[0].nbytes

    context, open_engine = build(config, ALONE, files=files)
    inside = [first <= weight.data_ptr() < last for weight in context.backbone.model.parameters()]
    assert any(inside) if shared else not any(inside)
    own, mapped = Storage.at(tmp_path / "own"), Storage.at(tmp_path / "mapped")
    StreamLoop(context, open_engine, mapped, ALONE).run()
    if isinstance(method, str) and engine == "torch":
        own = complete(kind, method, "torch").storage
    else:
        run(config, own)
    assert matrix(mapped) == matrix(own) and trace(mapped) == trace(own)
