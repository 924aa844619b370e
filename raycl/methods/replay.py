"""Replay: a few training rows of every earlier task are trained on again in each later one.

SAPT (appendix C) and MIGU (section 4.1) store 2 % of each task's training data, drawn once per task ("Replay" with
`learner=finetune`, "LoRAReplay" with `learner=lora`). Stored rows and those of the new task are one data set, shuffled
together in every epoch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raycl.backbone import Backbone
from raycl.methods.context import TaskContext
from raycl.methods.replay_buffer import RowBuffer
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.types import Phase


class ReplayConfig(WrapperConfig):
    """Any learner, with stored rows of earlier tasks among the training data."""

    name: Literal["replay"] = "replay"
    share: float = Field(
        0.02, gt=0, le=1, description="share of each task's train rows that is stored, at least one row"
    )


class Replay(Wrapper):
    """Any learner that trains one model for all labels, on old and new rows together.

    Its adapters have seen rows of all tasks so far, and are published as such.
    """

    Config = ReplayConfig

    def __init__(self, config: ReplayConfig, backbone: Backbone, seed: int) -> None:
        """Wrap the learner.

        Raises:
            ConfigError: see `_require_shared_adapters`.
        """
        super().__init__(config, backbone, seed)
        self._require_shared_adapters()
        self.buffer = RowBuffer(config.share)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Stored rows of all earlier tasks join the phase's rows."""
        self.buffer.fill(context)
        for name, rows in self.buffer:
            context.add_rows(self.buffer.tasks[name], rows)
        self.learner.begin_task(phase, context)
