"""Replay: a few real samples of every earlier task are learned again, mixed into each later one.

SAPT (appendix C) and MIGU (section 4.1) store 2 % of each task's training data, drawn once per task ("Replay" with
`learner=finetune`, "LoRAReplay" with `learner=lora`). What is stored is which rows: they follow from the seed, and the
rows themselves stay in the stream's files, so a run needs nothing more to go on. Stored samples and the new task's are
one data set, shuffled together in every epoch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raycl.backbone import Backbone
from raycl.errors import ConfigError
from raycl.methods.reference import Reference, ReferenceConfig


class ReplayConfig(ReferenceConfig):
    """Any learner, with stored rows of earlier tasks among the training data."""

    name: Literal["replay"] = "replay"
    share: float = Field(0.02, gt=0, le=1, description="of each task's train rows, one row at least")


class Replay(Reference):
    """Any learner that trains one model for all labels, on old and new data together.

    Its adapters have seen samples of all tasks so far, and are published as such.
    """

    Config = ReplayConfig

    def __init__(self, config: ReplayConfig, backbone: Backbone, seed: int) -> None:
        """Wrap the learner.

        Raises:
            ConfigError: one that lets only a text's own task speak in training, so that old samples teach nothing.
        """
        super().__init__(config, backbone, seed)
        if self.learner.reads_batches:  # to choose who speaks for each text (SAPT has its own ablation +Replay)
            raise ConfigError(
                f"method.learner is {config.learner.name}, which trains each task's adapters on its own texts alone: "
                "expected finetune, lora, inclora or olora"
            )
        self.replay_share = config.share
