"""The nearest sub-keys of many slots, group by group: exact for small banks, inverted lists above a threshold.

The approximate index keeps the keys themselves, so what it finds is scored exactly; how many of the true ones it finds
is measured when it is built, on the keys' own neighbours, and it looks through more lists until that is enough.
What it does not know: what a slot holds, how cosines become weights.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor, nn

EXACT_UP_TO = 4_000
"""Slots up to which every key is looked at: 0.4 ms for one text and six groups of 64 dimensions on one core."""

RECALL = 0.995
"""Share of the true nearest keys that the approximate index must find when it is built."""

SAMPLE = 256
"""Texts, made from the keys, on which that is measured."""


class KeyIndex:
    """Search over `[N, g, h]` keys.

    Attributes:
        recall: of the approximate index on its sample; 1 where it is exact.
    """

    def __init__(self, keys_NgH: Tensor, top_k: int, exact_up_to: int = EXACT_UP_TO) -> None:
        """Build it.

        Args:
            top_k: K of the searches to come, for which recall is measured.
        """
        self.count, self.groups, width = keys_NgH.shape
        unit = nn.functional.normalize(keys_NgH, dim=-1)
        self._keys = [np.ascontiguousarray(unit[:, group].numpy()) for group in range(self.groups)]
        self.recall = 1.0
        self.exact = self.count <= exact_up_to
        lists = 4 * round(math.sqrt(self.count))
        make = faiss.IndexFlatIP if self.exact else partial(_inverted, lists=lists)
        self._indices: list[Any] = [make(width) for _ in self._keys]
        for index, keys in zip(self._indices, self._keys, strict=True):
            if not self.exact:
                index.train(keys)
            index.add(keys)
        if not self.exact:
            self._tune(unit, top_k)

    def search(self, queries_BgH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Cosines and slots of the nearest keys in each group, both `[B, g, K]`; largest first, ties by number."""
        unit = nn.functional.normalize(queries_BgH, dim=-1).numpy()
        top_k = min(top_k, self.count)
        found = [index.search(np.ascontiguousarray(unit[:, group]), top_k) for group, index in enumerate(self._indices)]
        cosines = torch.from_numpy(np.stack([pair[0] for pair in found], axis=1))
        slots = torch.from_numpy(np.stack([pair[1] for pair in found], axis=1))
        missing = slots < 0  # fewer keys than K in the lists that were looked through
        return cosines.masked_fill(missing, -torch.inf), slots.clamp_min(0)

    def _tune(self, unit_NgH: Tensor, top_k: int) -> None:
        """Look through more lists until the sample finds its true neighbours."""
        draw = torch.Generator().manual_seed(0)
        rows = torch.randperm(self.count, generator=draw)[:SAMPLE]
        near = unit_NgH[rows]
        sample = near + 0.5 * near.norm(dim=-1, keepdim=True) * nn.functional.normalize(
            torch.randn(near.shape, generator=draw), dim=-1
        )
        for group, index in enumerate(self._indices):
            queries = np.ascontiguousarray(nn.functional.normalize(sample[:, group], dim=-1).numpy())
            exact = faiss.knn(queries, self._keys[group], top_k, metric=faiss.METRIC_INNER_PRODUCT)[1]
            for probes in (4, 8, 16, 32, 64, 128, index.nlist):
                index.nprobe = min(probes, index.nlist)
                found = index.search(queries, top_k)[1]
                share = np.mean([len(set(a) & set(b)) / top_k for a, b in zip(found, exact, strict=True)])
                if share >= RECALL:
                    break
            self.recall = min(self.recall, float(share))


def _inverted(width: int, lists: int) -> Any:
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    index.cp.niter = 10
    return index


def search_threads(count: int) -> None:
    """Threads of every search of this process; FAISS takes all cores by default."""
    faiss.omp_set_num_threads(count)
