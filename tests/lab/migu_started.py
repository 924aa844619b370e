"""A tiny run at the beginning of its first task, with MIGU on it, for the tests of MIGU."""

from __future__ import annotations

from typing import Any

import torch
from phases import begin_phase
from tiny import ENGINES, Lab
from torch import Tensor, nn

from raycl.data.loader import Collate
from raycl.methods.base import activate_batch
from raycl.methods.migu.migu import Migu
from raycl.training.assembly import build
from raycl.training.engines.engine import Engine
from raycl.training.phase.step import train_step
from raycl.training.records.progress import StepResult
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

WORLD = DistributedContext.alone(torch.device("cpu"))


class Started:
    """A run at the beginning of its first task, with MIGU on it."""

    def __init__(self, lab: Lab, kind: str = "bert", method: Any = "finetune", **settings: Any) -> None:
        train = {"learning_rate": 0.1, "max_grad_norm": 0, **settings.pop("train", {})}
        backbone = settings.pop("backbone", {})
        migu = {"name": "migu", "threshold": 0.5, "skip_first_task": False, **settings}
        config = lab.config(kind, method, ENGINES["torch"], modifiers=[migu], train=train, backbone=backbone)
        self.parts, self.open_engine = build(config, WORLD)
        self.phase = self.parts.phases[0]
        begin_phase(self.parts)
        self.parts.modifiers.begin_task(self.phase, only=True, resumed=False)
        self.parts.backbone.train()
        head = self.parts.backbone.head
        if isinstance(head, nn.Module):  # it starts at zero, and then nothing below it has a gradient
            nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]
        self.engine: Engine = self.open_engine(1, 10)

    @property
    def migu(self) -> Migu:
        result = self.parts.modifiers.members["migu"]
        assert isinstance(result, Migu)
        return result

    def batch(self, rows: list[int], size: int | None = None) -> Batch:
        codec = self.parts.backbone.codec
        table = self.parts.stream.table(self.phase.tasks[0], "train", codec)
        labels = self.parts.backbone.label_ids() if codec.needs_labels else None
        texts = self.parts.method.encoder is not None
        collate = Collate([table], codec.pad_id, labels, texts=texts)
        return collate(torch.tensor(rows).numpy(), size or len(rows))

    def step(self, *batches: Batch) -> StepResult:
        return train_step(self.engine, self.parts.method, batches, WORLD, 1, self.parts.modifiers)

    def magnitudes(self, *batches: Batch) -> Tensor:
        """Return what the step sees, without taking it."""
        migu = self.migu
        migu.begin_step(1, len(batches), lambda tensor: tensor)
        for batch in batches:
            with activate_batch(self.parts.method, batch):
                migu.observe_forward(self.parts.backbone, batch)
        return migu._magnitudes.sums.clone()

    def mask(self) -> Tensor:
        return self.migu._mask.clone()

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parts.backbone.named_parameters()}


def sgd(engine: Any) -> None:
    """Plain gradient descent in the place of the engine's Adam."""
    engine.optimizer = torch.optim.SGD(engine.trained.values(), lr=0.1)
    engine.schedule = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=1.0)
