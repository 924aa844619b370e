"""SAPT's ablations as strategies (SAPT, section 6.3): what each leaves out of the method, or puts in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["none", "arm", "replay", "alignment", "shared_attention"]


@dataclass(frozen=True)
class Ablation:
    """The components that an ablation keeps.

    Attributes:
        reflects: attentive reflection (ARM) adds its penalty.
        reads_samples: pseudo-samples are used, so generators are trained for them.
        replays: pseudo-samples are trained on as ordinary data.
        selects: a separate selector is trained on recorded weights and used at test.
        shares: all adapters of a text are trained and active together, by attention; else each alone.
    """

    reflects: bool = False
    reads_samples: bool = True
    replays: bool = False
    selects: bool = False
    shares: bool = True


ABLATIONS: dict[str, Ablation] = {
    "none": Ablation(reflects=True),
    "arm": Ablation(reads_samples=False),
    "replay": Ablation(replays=True),
    "alignment": Ablation(selects=True),
    "shared_attention": Ablation(selects=True, shares=False),
}
"""Name of `method.ablation` -> what is done."""
