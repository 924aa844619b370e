"""The nearest sub-keys of many slots, group by group: every cosine is computed."""

from __future__ import annotations

from torch import Tensor, nn


class KeyIndex:
    """Search over `[N, g, h]` keys, on the device where they are."""

    def __init__(self, keys_NgH: Tensor) -> None:
        self._unit_gHN = nn.functional.normalize(keys_NgH, dim=-1).permute(1, 2, 0).contiguous()

    def search(self, queries_BgH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return cosines and slots of the nearest keys in each group, both `[B, g, K]`; largest first, ties by
        number."""
        cosines_gBN = nn.functional.normalize(queries_BgH, dim=-1).transpose(0, 1) @ self._unit_gHN
        best = cosines_gBN.topk(min(top_k, cosines_gBN.shape[-1]), dim=-1)
        slots, by_number = best.indices.sort(dim=-1)
        cosines, by_cosine = best.values.gather(-1, by_number).sort(dim=-1, descending=True, stable=True)
        return cosines.transpose(0, 1), slots.gather(-1, by_cosine).transpose(0, 1)
