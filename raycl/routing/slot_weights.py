"""Converts cosines to mixture weights: the rules of SLM (section 3.2, eq. 4), per example unless configured
otherwise."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.config import Section

TEMPERATURE = 0.1
"""The temperature of the softmax over slots (the authors' code)."""

Rule = Literal["group_union", "group_mean", "vote"]


class RetrievalConfig(Section):
    """Settings of selecting and weighting slots."""

    top_k: int = Field(
        2, ge=1, description="K, the number of slots selected in each group (group_mean and vote: in total)"
    )
    rule: Rule = Field(
        "group_union",
        description="how groups are combined. group_union: the paper's text; group_mean: the released forward "
        "pass; vote: most frequent, with even weights",
    )
    scope: Literal["instance", "batch"] = Field(
        "instance", description="batch: one selection for the whole batch, as released; it leaks the task id"
    )
    task_id: bool = Field(
        False, description="the task id is given, and only the task's own slots are selected (SLM-TI)"
    )
    similarity: Literal["cosine", "softmax"] = Field(
        "cosine",
        description="what slots are weighted by. softmax: of the cosines over all slots of a group, divided by 0.1, as "
        "the authors' code has it as an option",
    )
    clamp: bool = Field(True, description="count negative cosines as 0; false: as released, weights may be negative")


def slot_weights(
    similar_BgN: Tensor, config: RetrievalConfig, candidates_BN: Tensor | None = None, per_group: bool = False
) -> Tensor:
    """Return `[B, N]` weights that sum to 1, or `[B, g * N]` with a weight of its own for every group's slot.

    Fewer candidates than K choose all of them; where all weights are 0 the chosen ones share evenly.

    Args:
        similar_BgN: cosines of each group of the query with each slot's sub-key.
        candidates_BN: bool, slots that may be chosen; None: all.
    """
    assert not per_group or config.rule == "group_union", "only group_union weighs every group's slots"
    if candidates_BN is not None:
        similar_BgN = similar_BgN.masked_fill(~candidates_BN[:, None, :], -torch.inf)
    if config.similarity == "softmax":
        chances = (similar_BgN / TEMPERATURE).softmax(dim=2)
        similar_BgN = torch.where(torch.isneginf(similar_BgN), similar_BgN, chances)
    if config.scope == "batch":
        similar_BgN = similar_BgN.mean(0, keepdim=True).expand_as(similar_BgN)
    if config.rule == "vote":
        return _voted(similar_BgN, config)
    scored = similar_BgN if config.rule == "group_union" else similar_BgN.mean(1, keepdim=True)
    chosen = scored.topk(min(config.top_k, scored.shape[2]), dim=-1)
    values = chosen.values.masked_fill(torch.isneginf(chosen.values), 0.0)
    if config.clamp:
        values = values.clamp_min(0.0)
    spread = torch.zeros_like(scored).masked_fill(torch.isneginf(scored), 0.0).scatter(2, chosen.indices, values)
    hits = torch.zeros_like(spread).scatter(2, chosen.indices, (~torch.isneginf(chosen.values)).to(spread.dtype))
    flat = spread.flatten(1) if per_group else spread.sum(1)
    even = hits.flatten(1) if per_group else (hits.sum(1) > 0).to(spread.dtype)
    return _normalised(flat, even)


def sparse_weights(cosines_BgK: Tensor, slots_BgK: Tensor, config: RetrievalConfig) -> tuple[Tensor, Tensor]:
    """Compute `group_union` from chosen slots alone, for banks where not all cosines are computed.

    Returns:
        ids: `[U]` slots that any example chose, ascending. weights: `[B, U]`.
    """
    values = cosines_BgK.masked_fill(torch.isneginf(cosines_BgK), 0.0)
    values = values.clamp_min(0.0) if config.clamp else values
    ids, positions = torch.unique(slots_BgK, return_inverse=True)
    rows = positions.flatten(1)
    empty = values.new_zeros(len(rows), len(ids))
    hits = empty.scatter_add(1, rows, (~torch.isneginf(cosines_BgK)).float().flatten(1))
    return ids, _normalised(empty.scatter_add(1, rows, values.flatten(1)), (hits > 0).float())


def _voted(similar_BgN: Tensor, config: RetrievalConfig) -> Tensor:
    """Weight the K slots that are most often in the top K of the groups (in batch scope, of the batch) equally."""
    top_k = min(config.top_k, similar_BgN.shape[2])
    chosen = similar_BgN.topk(top_k, dim=-1)
    hits = torch.zeros_like(similar_BgN).scatter(2, chosen.indices, (~torch.isneginf(chosen.values)).float())
    counts = hits.sum(1)
    most = counts.topk(top_k, dim=-1)
    even = torch.zeros_like(counts).scatter(1, most.indices, (most.values > 0).to(counts.dtype))
    return _normalised(torch.zeros_like(even), even)


def _normalised(weights_BN: Tensor, even_BN: Tensor) -> Tensor:
    total = weights_BN.sum(1, keepdim=True)
    weights_BN = torch.where(total.abs() > 1e-9, weights_BN, even_BN)
    return weights_BN / weights_BN.sum(1, keepdim=True)
