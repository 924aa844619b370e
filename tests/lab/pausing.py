"""A gradient modifier that waits in each step: a run that a test stops trains for seconds, in few steps."""

import time
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from raycl.config import Tree
from raycl.methods.modifier import GradientModifier, ModifierConfig, Reduce


class PauseConfig(ModifierConfig):
    """Every step takes longer."""

    name: Literal["pause"] = "pause"
    seconds: float = Field(0.05, ge=0, description="how long each step waits")

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return nothing, since it changes nothing."""
        return {}


class Pause(GradientModifier):
    """It changes no gradient."""

    Config = PauseConfig

    def begin_step(self, seed: int, micro_batches: int, reduce: Reduce) -> None:
        """Wait."""
        time.sleep(self.config.seconds)
