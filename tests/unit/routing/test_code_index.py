"""Search through codes: groups of vectors are searched apart, and a text's neighbours are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from raycl.routing.code_index import RECALL, CodeIndex


def drawn(groups: int, count: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return unit vectors and queries near some of them, both by group."""
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.nn.functional.normalize(torch.randn(groups, count, width, generator=draw), dim=-1)
    near = vectors[:, torch.randint(0, count, (64,), generator=draw)]
    return vectors, near + 0.05 * torch.randn(near.shape, generator=draw)


def test_each_group_is_searched_among_its_own_vectors() -> None:
    vectors, queries = drawn(3, 2_000, 16)
    index = CodeIndex(vectors, queries, 2)
    products, numbers = index.search(queries, 2)
    every = torch.bmm(queries, vectors.transpose(1, 2))
    exact = every.topk(2)
    assert index.recall >= RECALL and products.shape == numbers.shape == (3, 64, 2)
    assert float((numbers[..., 0] == exact.indices[..., 0]).float().mean()) > 0.98
    torch.testing.assert_close(products, every.gather(-1, numbers))  # products are exact, of those that are found
    assert bool((products[..., 0] >= products[..., 1]).all())
    apart = CodeIndex(vectors[1:2], queries[1:2], 2).search(queries[1:2], 2)
    assert torch.equal(apart[1][0], numbers[1]), "groups beside it do not matter"


def test_a_text_alone_finds_what_it_finds_in_a_batch() -> None:
    vectors, queries = drawn(2, 2_000, 18, seed=1)
    index = CodeIndex(vectors, queries, 3)
    together = index.search(queries, 3)
    for row in range(0, 64, 9):
        alone = index.search(queries[:, row : row + 1], 3)
        assert torch.equal(alone[1][:, 0], together[1][:, row])
        torch.testing.assert_close(alone[0][:, 0], together[0][:, row])


def test_no_more_vectors_are_found_than_there_are() -> None:
    vectors, queries = drawn(1, 40, 8)
    products, numbers = CodeIndex(vectors, queries, 4).search(queries[:, :1], 40)
    assert sorted(numbers.flatten().tolist()) == list(range(40)) and products.shape == (1, 1, 40)
