"""The label head: it grows without changing its rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raycl.backbone.encoder import LabelHead

LABELS = st.lists(st.sampled_from(["red", "blue", "cat", "dog", "yes", "no"]), max_size=8)


def drawn(labels: list[str]) -> LabelHead:
    """Return a head whose rows have been trained."""
    head = LabelHead(5)
    head.grow(labels)
    torch.manual_seed(0)
    with torch.no_grad():
        head.weight.normal_()
        head.bias.normal_()
    return head


@given(first=LABELS, more=LABELS)
def test_growth_keeps_rows_bit_for_bit_and_changes_no_old_logit(first: list[str], more: list[str]) -> None:
    head, states = drawn(first), torch.randn(3, 5)
    weight, bias, logits = head.weight.clone(), head.bias.clone(), head(states)
    known = len(head.labels)
    head.grow(more)
    assert head.labels == list(dict.fromkeys([*first, *more]))
    assert torch.equal(head.weight[:known], weight)
    assert torch.equal(head.bias[:known], bias)
    torch.testing.assert_close(head(states)[:, :known], logits, atol=1e-6, rtol=1e-6)  # kernels go by the width
    assert not head.weight[known:].any() and not head.bias[known:].any()


def test_known_labels_change_nothing_not_even_the_parameter() -> None:
    head = drawn(["red", "blue"])
    weight = head.weight
    head.grow(["blue", "red"])
    assert head.weight is weight


def test_growth_and_clearing_keep_what_is_trained() -> None:
    head = drawn(["red"])
    head.requires_grad_(False)
    head.grow(["blue"])
    assert not head.weight.requires_grad
    head.requires_grad_(True)
    head.clear()
    head.grow(["cat"])
    assert head.weight.requires_grad and head.bias.requires_grad
    assert (head.labels, head.weight.shape, head.weight.abs().sum().item()) == (["cat"], (1, 5), 0.0)
