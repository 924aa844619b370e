"""Figures for pages in dark mode: the white around a plot becomes dark and its words light; its colours stay."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

PAPER, INK = np.array((0x15, 0x18, 0x1A)), np.array((0xE6, 0xE4, 0xDE))
"""The page's background and text in dark mode (`style.css`)."""

GREY = 24
"""Pixels whose channels differ by less are words and paper; others belong to the plot."""


def darkened(content: bytes) -> bytes:
    """Return a plot on white as one on dark: greys that reach the picture's edge change, those inside cells do not."""
    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGBA").convert("RGB")).astype(int)
    outside = _outside(pixels.max(2) - pixels.min(2) < GREY)
    share = 1 - pixels.mean(2, keepdims=True) / 255
    changed = np.where(outside[..., None], PAPER + share * (INK - PAPER), pixels)
    written = io.BytesIO()
    Image.fromarray(changed.round().astype(np.uint8)).save(written, "png")
    return written.getvalue()


def _outside(grey: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which grey pixels are connected to the first one, the corner."""
    regions, _ = ndimage.label(grey, structure=np.ones((3, 3)))
    found: NDArray[np.bool_] = regions == regions[0, 0]
    return found
