"""Search for the vectors with the largest inner products through compressed codes, for large banks on a CPU.

Codes are compared first, and the best vectors are scored again. A vector's code has four bits for two dimensions
(FAISS's fast scan). Recall is measured when the index is built, and more candidates are scored again until it is high
enough. (Measured at 40,000 keys of 64 dimensions: inverted lists take three times as long for a recall of 0.995, HNSW
five times, and 8 s to build.)
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

Rows = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

RECALL = 0.995
"""Share of the truly best vectors that the index must find when it is built."""

SAMPLE = 256
"""The number of queries on which recall is measured."""

EXACT_UP_TO = 4_000
"""A CPU compares every vector up to this number: 0.4 ms for a text and 384 dimensions on one core."""


def codes_pay(count: int, device: torch.device) -> bool:
    """Return whether so many vectors are searched through codes: never on an accelerator or without FAISS."""
    return count > EXACT_UP_TO and device.type == "cpu" and find_spec("faiss") is not None


def search_threads(count: int) -> None:
    """Set the threads of every search of this process; FAISS uses all cores by default."""
    import faiss

    faiss.omp_set_num_threads(count)


class CodeIndex:
    """Search over one set of vectors.

    Attributes:
        recall: recall on the sample.
    """

    def __init__(self, vectors_NH: Tensor, sample_BH: Tensor, top_k: int) -> None:
        """Build the index.

        Args:
            vectors_NH: the vectors, on the CPU. sample_BH: queries for which recall is measured.
            top_k: K of the searches to come, for which recall is measured.
        """
        import faiss  # only large banks on a CPU need it

        self._vectors = np.ascontiguousarray(vectors_NH.numpy())
        count, width = self._vectors.shape
        parts = width // 2 if width % 2 == 0 else width
        self._index = faiss.IndexPQFastScan(width, parts, 4, faiss.METRIC_INNER_PRODUCT)
        self._index.train(self._vectors)
        self._index.add(self._vectors)
        self._count, self._scored = count, 0
        self.recall: float = 0.0
        self._tune(np.ascontiguousarray(sample_BH.numpy()), top_k)

    def search(self, queries_BH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return inner products and numbers of the best vectors, both `[B, K]`; largest first."""
        products, rows = self._nearest(np.ascontiguousarray(queries_BH.numpy()), top_k)
        return torch.from_numpy(products), torch.from_numpy(rows)

    def _nearest(self, queries: Rows, top_k: int) -> tuple[Rows, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        candidates = self._index.search(queries, min(max(self._scored, top_k), self._count))[1]
        products = np.einsum("bh,bkh->bk", queries, self._vectors[candidates])
        best = np.argsort(-products, axis=1, kind="stable")[:, :top_k]
        rows = np.arange(len(queries))[:, None]
        return products[rows, best], candidates[rows, best]

    def _tune(self, queries: Rows, top_k: int) -> None:
        """Increase the number of candidates until the sample finds its true neighbours."""
        import faiss

        exact = faiss.knn(queries, self._vectors, top_k, metric=faiss.METRIC_INNER_PRODUCT)[1]
        for self._scored in (16, 32, 64, 128, 256, 512):
            neighbours = self._nearest(queries, top_k)[1]
            self.recall = float(np.mean([len(set(a) & set(b)) / top_k for a, b in zip(neighbours, exact, strict=True)]))
            if self.recall >= RECALL:
                break
