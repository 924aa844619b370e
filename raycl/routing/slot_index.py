"""The nearest sub-keys of many slots, group by group: exact where that is fast, else compressed codes (on a CPU).

On an accelerator every cosine is computed, however many keys there are: 40,000 keys are one small matrix product. A CPU
without FAISS does the same, only slower.

Codes are compared first, and the best keys are scored again. A key's code has four bits for two dimensions (FAISS's
fast scan). Recall is measured when the index is built, on texts made from the keys, and more candidates are scored
again until it is high enough. (Measured at 40,000 keys of 64 dimensions: inverted lists take three times as long for a
recall of 0.995, HNSW five times, and 8 s to build.)
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

Rows = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

RECALL = 0.995
"""Share of the true nearest keys that the index must find when it is built."""

SAMPLE = 256
"""The number of texts, generated from the keys, on which recall is measured."""


class CodeIndex:
    """Search over the keys of one group.

    Attributes:
        recall: recall on the sample.
    """

    def __init__(self, unit_NH: Tensor, top_k: int) -> None:
        """Build the index.

        Args:
            unit_NH: normalised keys, on the CPU. top_k: K of the searches to come, for which recall is measured.
        """
        import faiss  # only large banks on a CPU need it

        self._keys = np.ascontiguousarray(unit_NH.numpy())
        count, width = self._keys.shape
        parts = width // 2 if width % 2 == 0 else width
        self._index = faiss.IndexPQFastScan(width, parts, 4, faiss.METRIC_INNER_PRODUCT)
        self._index.train(self._keys)
        self._index.add(self._keys)
        self._count, self._scored = count, 0
        self.recall: float = 0.0
        self._tune(unit_NH, top_k)

    def search(self, unit_BH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return cosines and numbers of the nearest keys, both `[B, K]`; largest first."""
        cosines, rows = self._nearest(np.ascontiguousarray(unit_BH.numpy()), top_k)
        return torch.from_numpy(cosines), torch.from_numpy(rows)

    def _nearest(self, queries: Rows, top_k: int) -> tuple[Rows, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        candidates = self._index.search(queries, min(max(self._scored, top_k), self._count))[1]
        cosines = np.einsum("bh,bkh->bk", queries, self._keys[candidates])
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :top_k]
        return np.take_along_axis(cosines, best, 1), np.take_along_axis(candidates, best, 1)

    def _tune(self, unit_NH: Tensor, top_k: int) -> None:
        """Increase the number of candidates until the sample finds its true neighbours."""
        import faiss

        draw = torch.Generator().manual_seed(0)
        near = unit_NH[torch.randperm(self._count, generator=draw)[:SAMPLE]]
        apart = torch.randn(near.shape, generator=draw) / (2 * near.shape[1] ** 0.5)
        queries = np.ascontiguousarray(nn.functional.normalize(near + apart, dim=-1).numpy())
        exact = faiss.knn(queries, self._keys, top_k, metric=faiss.METRIC_INNER_PRODUCT)[1]
        for self._scored in (16, 32, 64, 128, 256, 512):
            neighbours = self._nearest(queries, top_k)[1]
            self.recall = float(np.mean([len(set(a) & set(b)) / top_k for a, b in zip(neighbours, exact, strict=True)]))
            if self.recall >= RECALL:
                break


def search_threads(count: int) -> None:
    """Set the threads of every search of this process; FAISS uses all cores by default."""
    import faiss

    faiss.omp_set_num_threads(count)


EXACT_UP_TO = 4_000
"""A CPU compares every key up to this many slots: 0.4 ms for a text and six groups of 64 dimensions on one core."""


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
        self.exact: bool = self.count <= EXACT_UP_TO or keys_NgH.device.type != "cpu" or find_spec("faiss") is None
        self.recall: float = 1.0
        unit_NgH = nn.functional.normalize(keys_NgH, dim=-1)
        self._unit_gHN = unit_NgH.permute(1, 2, 0).contiguous() if self.exact else None
        if not self.exact:
            self._codes = [CodeIndex(unit_NgH[:, group], top_k) for group in range(self.groups)]
            self.recall = min(codes.recall for codes in self._codes)

    def search(self, queries_BgH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return cosines and slots of the nearest keys in each group, both `[B, g, K]`; largest first, ties by
        number."""
        unit_BgH = nn.functional.normalize(queries_BgH, dim=-1)
        top_k = min(top_k, self.count)
        if self._unit_gHN is None:
            by_group = [codes.search(unit_BgH[:, group], top_k) for group, codes in enumerate(self._codes)]
            return torch.stack([pair[0] for pair in by_group], 1), torch.stack([pair[1] for pair in by_group], 1)
        cosines_gBN = torch.bmm(unit_BgH.transpose(0, 1), self._unit_gHN)
        best = cosines_gBN.topk(top_k, dim=-1)
        slots, by_number = best.indices.sort(dim=-1)
        cosines, by_cosine = best.values.gather(-1, by_number).sort(dim=-1, descending=True, stable=True)
        return cosines.transpose(0, 1), slots.gather(-1, by_cosine).transpose(0, 1)
