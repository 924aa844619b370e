"""Keys of dynamic task-related knowledge retrieval (SLM, section 3.2): initialization, training, measures.

A slot has one sub-key for each of g groups, that is for each slice of the query.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.config import Section, Size
from raycl.errors import RetrievalError
from raycl.progress import report

log: logging.Logger = logging.getLogger("raycl")

EVERY_S = 5.0
"""Seconds between two log lines about the progress."""

UPDATES = "learning keys, updates"
"""The name of their bar."""

DECAY, DECAY_EPOCHS = 0.1, 2
"""The decay of the rate in the authors' scripts."""


class KeyConfig(Section):
    """Settings of learning a task's keys (SLM section 3.2 and its scripts; the paper's defaults unless stated)."""

    groups: int = Field(6, ge=1, description="g, the number of slices of the query; it must divide the query's width")
    slots: int = Field(4, ge=1, description="m, the number of slots per task")
    slots_by_task: dict[str, Size] = Field(default_factory=dict, description="task name -> m, where it differs")
    mask: float = Field(
        0.2, ge=0, lt=1, description="p, the probability that a slot is left out of a choice while keys are learned"
    )
    update: Literal["paper", "official"] = Field(
        "paper",
        description="paper: k += rate * gradient of the cosine, for chosen keys alone; official: AdamW on the same "
        "loss, weight decay 0.01, clip 0.1, and with keys.epochs the rate x0.1 after every 2 epochs",
    )
    rate: float = Field(1e-3, gt=0, description="gamma, or the optimizer's learning rate")
    steps: int = Field(
        4000,
        ge=0,
        description="number of updates; keys start far from the texts, so it matters (the paper: about 20,000)",
    )
    epochs: int | None = Field(None, ge=0, description="passes over the task's texts instead of steps; the paper: 3")
    batch_size: int = Field(16, ge=1, description="texts per update")
    start: Literal["orthogonal", "data"] = Field(
        "orthogonal",
        description="initial keys; data: mean query of a random part of the task's texts (the authors' utility)",
    )
    centrifugal: float = Field(
        0.0,
        ge=0,
        description="weight of the mean cosine between the task's keys and those of earlier tasks, which is added to "
        "minus the mean of the chosen cosines; every key then moves. 0: as in the authors' scripts, whose code has "
        "that loss and never adds it",
    )

    def of(self, task: str) -> KeyConfig:
        """Return the settings of one task, with its own number of slots."""
        return self.model_copy(update={"slots": self.slots_by_task.get(task, self.slots), "slots_by_task": {}})


def split_groups(queries_BC: Tensor, groups: int) -> Tensor:
    """Split `[B, c]` into `[B, g, h]`, neighbouring slices.

    Raises:
        RetrievalError: g does not divide c, or values that are not finite.
    """
    width = queries_BC.shape[1]
    if width % groups:
        fitting = [number for number in range(1, 13) if width % number == 0]
        raise RetrievalError(
            f"{groups} groups do not divide the encoder's {width} dimensions: use one of {', '.join(map(str, fitting))}"
        )
    if not bool(torch.isfinite(queries_BC).all()):
        raise RetrievalError("a query has values that are not finite: the encoder is broken, use another")
    return queries_BC.view(len(queries_BC), groups, width // groups)


def semi_orthogonal(slots: int, groups: int, width: int, seed: int) -> Tensor:
    """Return `[m, g, h]` with orthonormal rows in every group, in chunks of at most h where there are more.

    The released routine fills h rows and leaves the others uninitialized.
    """
    draw = torch.Generator().manual_seed(seed)
    keys = torch.empty(groups, slots, width)
    for group in keys:
        for first in range(0, slots, width):
            chunk = group[first : first + width]
            square, upper = torch.linalg.qr(torch.randn(width, len(chunk), generator=draw))
            chunk.copy_((square * upper.diagonal().sign()).T)
    return keys.transpose(0, 1).contiguous()


def from_data(queries_BgH: Tensor, slots: int, seed: int) -> Tensor:
    """Return `[m, g, h]`, the mean query of each of m random parts of the texts."""
    if len(queries_BgH) < slots:
        raise RetrievalError(f"{len(queries_BgH)} texts cannot start {slots} slots from data: use start=orthogonal")
    order = torch.randperm(len(queries_BgH), generator=torch.Generator().manual_seed(seed))
    return torch.stack([part.mean(0) for part in queries_BgH[order].tensor_split(slots)])


def cosines(queries_BgH: Tensor, keys_NgH: Tensor) -> Tensor:
    """Return cosines `[B, g, N]`; 0 where a side is all zeros."""
    unit_q = nn.functional.normalize(queries_BgH, dim=-1)
    unit_k = nn.functional.normalize(keys_NgH, dim=-1)
    return torch.einsum("bgh,ngh->bgn", unit_q, unit_k)


def learn_keys(
    queries_BC: Tensor,
    config: KeyConfig,
    top_k: int,
    seed: int,
    earlier_NgH: Tensor | None = None,
) -> Tensor:
    """Run the preparation phase of a task: return `[m, g, h]` keys moved towards its queries, without labels.

    Args:
        earlier_NgH: keys of earlier tasks, from which `centrifugal` moves them away; None: there are none.

    Raises:
        RetrievalError: K > m, g does not divide c, no texts.
    """
    check_keys(config, top_k)
    if not len(queries_BC):
        raise RetrievalError("a task without texts has no keys to learn")
    queries_BgH = split_groups(queries_BC, config.groups)
    if config.start == "data":
        keys = from_data(queries_BgH, config.slots, seed)
    else:
        keys = semi_orthogonal(config.slots, config.groups, queries_BgH.shape[2], seed)
    draw = torch.Generator().manual_seed(seed)
    earlier_NgH = earlier_NgH if config.centrifugal else None
    step = None if config.update == "paper" else _OptimizerStep(keys, config)
    began = logged = time.monotonic()
    total = _updates(len(queries_BgH), config)
    for number, (epoch, rows) in enumerate(_batches(len(queries_BgH), config, draw)):
        report(UPDATES, number, total, has_lines=True)
        if number and (now := time.monotonic()) - logged >= EVERY_S:
            logged = now
            log.info(
                "    keys: %d of %d updates, %.0f s left", number, total, (now - began) / number * (total - number)
            )
        chosen = choose(cosines(queries_BgH[rows], keys), top_k, config.mask, draw)
        gradient = _gradient(keys, queries_BgH[rows], chosen, config, earlier_NgH)
        # the paper adds `rate * grad cos(q, k)` to each key that a text chose (SLM, eq. 5)
        keys = keys + config.rate * gradient if step is None else step(gradient, chosen, config, epoch)
    report(UPDATES, total, total, has_lines=True)
    return keys


def _updates(texts: int, config: KeyConfig) -> int:
    """Return how many there are for so many texts."""
    return config.steps if config.epochs is None else config.epochs * -(-texts // config.batch_size)


def _batches(texts: int, config: KeyConfig, draw: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """Yield epoch and rows of each step, every epoch in a new order."""
    a_pass, left = -(-texts // config.batch_size), _updates(texts, config)
    for epoch in range(-(-left // a_pass)):
        for rows in torch.split(torch.randperm(texts, generator=draw), config.batch_size)[: left - epoch * a_pass]:
            yield epoch, rows


def check_keys(config: KeyConfig, top_k: int) -> None:
    """Check that sizes fit each other.

    Raises:
    RetrievalError: they do not fit.
    """
    sizes = {"keys.slots": config.slots} | {f"keys.slots_by_task.{task}": m for task, m in config.slots_by_task.items()}
    for path, slots in sizes.items():
        if top_k > slots:
            raise RetrievalError(f"retrieval.top_k={top_k} is more than {path}={slots}: choose at most all")


def choose(similar_BgN: Tensor, top_k: int, mask: float, draw: torch.Generator | None = None) -> Tensor:
    """Return `[B, g, K]` indices of the largest entries, a share `mask` of the entries left out at random."""
    if mask:
        shown = torch.rand(similar_BgN.shape, generator=draw) >= mask
        similar_BgN = torch.where(shown, similar_BgN, similar_BgN - 1000.0)  # left out, but available if K needs them
    return similar_BgN.topk(top_k, dim=-1).indices


def _gradient(
    keys_MgH: Tensor, queries_BgH: Tensor, chosen_BgK: Tensor, config: KeyConfig, earlier_NgH: Tensor | None
) -> Tensor:
    """Return the sum over texts of the gradient of chosen cosines; exactly 0 for keys that were not chosen.

    With earlier keys also minus `centrifugal` times that of the mean cosine with them, times the number of cosines in
    that sum: divided by it, both are means, as in the authors' code.
    """
    unit_q = nn.functional.normalize(queries_BgH, dim=-1)
    hits_BgM = torch.zeros(*chosen_BgK.shape[:2], len(keys_MgH)).scatter_(2, chosen_BgK, 1.0)
    gradient = _pull(keys_MgH, torch.einsum("bgm,bgh->mgh", hits_BgM, unit_q))
    if earlier_NgH is None:
        return gradient
    towards_gH = nn.functional.normalize(earlier_NgH, dim=-1).mean(0)
    away = _pull(keys_MgH, towards_gH.expand_as(keys_MgH)) / (keys_MgH.shape[0] * keys_MgH.shape[1])
    return gradient - config.centrifugal * chosen_BgK.numel() * away


def _pull(keys_MgH: Tensor, pulled_MgH: Tensor) -> Tensor:
    """Return the gradient of the cosines of each key with the unit vectors whose sum is given."""
    norm = keys_MgH.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    unit_k = keys_MgH / norm
    along = (pulled_MgH * unit_k).sum(-1, keepdim=True)
    gradient: Tensor = (pulled_MgH - along * unit_k) / norm
    return gradient


class _OptimizerStep:
    """Minimises minus the mean of the chosen cosines by AdamW, as the authors' code does."""

    def __init__(self, keys: Tensor, config: KeyConfig) -> None:
        self.parameter = nn.Parameter(keys.clone())
        self.optimizer = torch.optim.AdamW([self.parameter], lr=config.rate, weight_decay=0.01)

    def __call__(self, gradient_MgH: Tensor, chosen_BgK: Tensor, config: KeyConfig, epoch: int) -> Tensor:
        decays = config.epochs is not None  # the authors' code, every second epoch
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate * (DECAY ** (epoch // DECAY_EPOCHS) if decays else 1.0)
        self.parameter.grad = -gradient_MgH / chosen_BgK.numel()
        nn.utils.clip_grad_norm_([self.parameter], 0.1)
        self.optimizer.step()
        return self.parameter.detach().clone()


def key_accuracy(similar_BgN: Tensor, own_N: Tensor, top_k: int) -> Tensor:
    """Return `[B]` bool, whether more than half of the g x K chosen sub-keys are of the text's own task (eq. 13).

    Args:
        own_N: bool, which slots belong to that task.
    """
    chosen = choose(similar_BgN, min(top_k, similar_BgN.shape[2]), 0.0)
    right = own_N[chosen].flatten(1)
    return right.sum(1) * 2 > right.shape[1]
