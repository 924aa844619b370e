"""Search for the vectors with the largest inner products through compressed codes, for large banks on a CPU.

Codes are compared first, and the best vectors are scored again. A vector's code has four bits for two dimensions
(FAISS's fast scan). Recall is measured when the index is built, and more candidates are scored again until it is high
enough. (Measured at 40,000 keys of 64 dimensions: inverted lists take three times as long for a recall of 0.995, HNSW
five times, and 8 s to build.)

Of the sub-keys of many slots, on an accelerator every cosine is computed, however many keys there are: 40,000 keys are
one small matrix product. A CPU without FAISS does the same, only slower.
"""

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

RECALL = 0.995
"""Share of the truly best vectors that the index must find when it is built."""

SAMPLE = 256
"""The number of queries on which recall is measured."""

QUERIES_AT_ONCE = 0x22
"""The queries that FAISS compares with a block of codes at once (`qbs`): two, and again two. With its default, a text
in a batch of 32 takes 0.64 ms to route at 10,000 tasks in place of 0.39 (one core with AVX2)."""

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
    """Search over groups of equally many vectors; a query has a part for each group.

    Attributes:
        recall: recall on the sample, of the group where it is lowest.
    """

    def __init__(self, vectors_gNH: Tensor, sample_gBH: Tensor, top_k: int) -> None:
        """Build the index.

        Args:
            vectors_gNH: the vectors, on the CPU. sample_gBH: queries for which recall is measured.
            top_k: K of the searches to come, for which recall is measured.
        """
        import faiss  # only large banks on a CPU need it

        vectors_gNH = vectors_gNH.contiguous()
        groups, count, width = vectors_gNH.shape
        self._vectors = vectors_gNH.flatten(0, 1)
        self._starts_g = torch.arange(groups)[:, None, None] * count
        self._count, self._scored, self.recall = count, 0, 0.0
        self._codes = []
        for vectors in vectors_gNH.numpy():
            codes = faiss.IndexPQFastScan(width, width // 2 if width % 2 == 0 else width, 4, faiss.METRIC_INNER_PRODUCT)
            codes.qbs = QUERIES_AT_ONCE
            codes.train(vectors)
            codes.add(vectors)
            self._codes.append(codes)
        self._tune(vectors_gNH, sample_gBH.contiguous(), top_k)

    def search(self, queries_gBH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return inner products and numbers of the best vectors, both `[g, B, K]`; largest first."""
        candidates_gBk = self._candidates(queries_gBH.contiguous(), min(max(self._scored, top_k), self._count))
        vectors_gBkH = nn.functional.embedding(candidates_gBk + self._starts_g, self._vectors)
        # a row times a matrix: MKL takes ten times as long for many matrices times a column
        products_gBk = torch.bmm(queries_gBH.flatten(0, 1)[:, None], vectors_gBkH.flatten(0, 1).transpose(1, 2))
        best = products_gBk.view(candidates_gBk.shape).topk(top_k, dim=-1)
        return best.values, candidates_gBk.gather(-1, best.indices)

    def _candidates(self, queries_gBH: Tensor, count: int) -> Tensor:
        """Return the numbers of the vectors whose codes have the largest inner products, `[g, B, k]`."""
        shape = (*queries_gBH.shape[:2], count)
        products, numbers = np.empty(shape, np.float32), np.empty(shape, np.int64)
        for codes, queries, *found in zip(self._codes, queries_gBH.numpy(), products, numbers, strict=True):
            codes.search(queries, count, D=found[0], I=found[1])
        return torch.from_numpy(numbers)

    def _tune(self, vectors_gNH: Tensor, queries_gBH: Tensor, top_k: int) -> None:
        """Increase the number of candidates until the sample finds its true neighbours."""
        import faiss

        groups = zip(queries_gBH.numpy(), vectors_gNH.numpy(), strict=True)
        exact = [faiss.knn(*group, top_k, metric=faiss.METRIC_INNER_PRODUCT)[1] for group in groups]
        exact_gBK = torch.from_numpy(np.stack(exact))
        for self._scored in (16, 32, 64, 128, 256, 512):
            numbers_gBK = self.search(queries_gBH, top_k)[1]
            found_gBK = (exact_gBK[..., :, None] == numbers_gBK[..., None, :]).any(-1)
            self.recall = float(found_gBK.float().mean((1, 2)).min())
            if self.recall >= RECALL:
                break


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
