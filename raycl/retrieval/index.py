"""The nearest sub-keys of many slots, group by group: exact for small banks, compressed codes first above a threshold.

Above it every key is a code of four bits for two dimensions (FAISS's fast scan), which are all looked at; the best of
them are scored again by the keys themselves. How many of the true neighbours come out is measured when the index is
built, on texts made from the keys, and more are scored again until that is enough. (Measured at 40,000 keys of 64:
inverted lists need three times as long for a recall of 0.995, HNSW five times and 8 s to build.)
What it does not know: what a slot holds, how cosines become weights.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor, nn

Rows = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

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
        self._scored = 0
        if self.exact:
            self._indices: list[Any] = [faiss.IndexFlatIP(width) for _ in self._keys]
        else:
            parts = width // 2 if width % 2 == 0 else width
            self._indices = [faiss.IndexPQFastScan(width, parts, 4, faiss.METRIC_INNER_PRODUCT) for _ in self._keys]
        for index, keys in zip(self._indices, self._keys, strict=True):
            index.train(keys)
            index.add(keys)
        if not self.exact:
            self._tune(unit, top_k)

    def search(self, queries_BgH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Cosines and slots of the nearest keys in each group, both `[B, g, K]`; largest first, ties by number."""
        unit = nn.functional.normalize(queries_BgH, dim=-1).numpy()
        top_k = min(top_k, self.count)
        found = [self._nearest(group, np.ascontiguousarray(unit[:, group]), top_k) for group in range(self.groups)]
        cosines = torch.from_numpy(np.stack([pair[0] for pair in found], axis=1))
        return cosines, torch.from_numpy(np.stack([pair[1] for pair in found], axis=1))

    def _nearest(self, group: int, queries: Rows, top_k: int) -> tuple[Rows, Any]:
        index, keys = self._indices[group], self._keys[group]
        if self.exact:
            cosines, slots = index.search(queries, top_k)
            return cosines, slots
        slots = index.search(queries, min(max(self._scored, top_k), self.count))[1]
        cosines = np.einsum("bh,bkh->bk", queries, keys[slots])
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :top_k]
        return np.take_along_axis(cosines, best, 1), np.take_along_axis(slots, best, 1)

    def _tune(self, unit_NgH: Tensor, top_k: int) -> None:
        """Score more candidates again until the sample finds its true neighbours."""
        draw = torch.Generator().manual_seed(0)
        near = unit_NgH[torch.randperm(self.count, generator=draw)[:SAMPLE]]
        sample = nn.functional.normalize(
            near + torch.randn(near.shape, generator=draw) / (2 * near.shape[2] ** 0.5), dim=-1
        )
        for self._scored in (16, 32, 64, 128, 256, 512):
            shares = []
            for group in range(self.groups):
                queries = np.ascontiguousarray(sample[:, group].numpy())
                exact = faiss.knn(queries, self._keys[group], top_k, metric=faiss.METRIC_INNER_PRODUCT)[1]
                found = self._nearest(group, queries, top_k)[1]
                shares.append(np.mean([len(set(a) & set(b)) / top_k for a, b in zip(found, exact, strict=True)]))
            self.recall = float(min(shares))
            if self.recall >= RECALL:
                break


def search_threads(count: int) -> None:
    """Threads of every search of this process; FAISS takes all cores by default."""
    faiss.omp_set_num_threads(count)
