"""The kinds of backbone and what each can do: the one table that a new kind is added to."""

from __future__ import annotations

from typing import Literal

from raycl.errors import BackboneError
from raycl.types import Capabilities

Kind = Literal["encoder", "encoder-decoder", "decoder"]

KINDS: dict[str, Capabilities] = {
    "encoder": Capabilities("label", False, "mlm", "FEATURE_EXTRACTION"),
    "encoder-decoder": Capabilities("text", True, None, "SEQ_2_SEQ_LM"),
    "decoder": Capabilities("text", False, "clm", "CAUSAL_LM"),
}
"""Capabilities of each kind, by its name in records and settings."""


def capabilities_of(kind: str) -> Capabilities:
    """Return the capabilities of backbones of this kind.

    Raises:
        BackboneError: there is no such kind.
    """
    if kind not in KINDS:
        raise BackboneError(f"unknown kind of backbone '{kind}': expected one of {', '.join(KINDS)}")
    return KINDS[kind]
