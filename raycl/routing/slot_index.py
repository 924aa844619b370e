"""The nearest sub-keys of many slots, group by group: exact where that is fast, else through codes (on a CPU).

On an accelerator every cosine is computed, however many keys there are: 40,000 keys are one small matrix product. A CPU
without FAISS does the same, only slower.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raycl.routing.code_index import SAMPLE, CodeIndex, codes_pay


class KeyIndex:
    """Search over `[N, g, h]` keys, on the device where they are.

    Attributes:
        exact: whether every key is compared. recall: of the approximate index on its sample; 1 where it is exact.
    """

    def __init__(self, keys_NgH: Tensor, top_k: int) -> None:
        """Build the index.

        Args:
            top_k: K of the searches to come, for which recall is measured.
        """
        self.count, self.groups, _ = keys_NgH.shape
        self.exact: bool = not codes_pay(self.count, keys_NgH.device)
        self.recall: float = 1.0
        unit_gNH = nn.functional.normalize(keys_NgH, dim=-1).transpose(0, 1)
        self._unit_gHN = unit_gNH.transpose(1, 2).contiguous() if self.exact else None
        if not self.exact:
            texts_gBH = torch.stack([_texts_near(unit_NH) for unit_NH in unit_gNH])
            self._codes = CodeIndex(unit_gNH, texts_gBH, top_k)
            self.recall = self._codes.recall

    def search(self, queries_BgH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return cosines and slots of the nearest keys in each group, both `[B, g, K]`; largest first, ties by
        number."""
        unit_gBH = nn.functional.normalize(queries_BgH, dim=-1).transpose(0, 1)
        top_k = min(top_k, self.count)
        if self._unit_gHN is None:
            cosines_gBK, slots_gBK = self._codes.search(unit_gBH, top_k)
            return cosines_gBK.transpose(0, 1), slots_gBK.transpose(0, 1)
        cosines_gBN = torch.bmm(unit_gBH, self._unit_gHN)
        best = cosines_gBN.topk(top_k, dim=-1)
        slots, by_number = best.indices.sort(dim=-1)
        cosines, by_cosine = best.values.gather(-1, by_number).sort(dim=-1, descending=True, stable=True)
        return cosines.transpose(0, 1), slots.gather(-1, by_cosine).transpose(0, 1)


def _texts_near(unit_NH: Tensor) -> Tensor:
    """Return `[B, h]` queries of a sample, each one of the keys and noise half as long."""
    draw = torch.Generator().manual_seed(0)
    near = unit_NH[torch.randperm(len(unit_NH), generator=draw)[:SAMPLE]]
    apart = torch.randn(near.shape, generator=draw) / (2 * near.shape[1] ** 0.5)
    return nn.functional.normalize(near + apart, dim=-1)
