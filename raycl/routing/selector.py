"""A selector learned apart from the adapters, for SAPT's ablations -Alignment and -SA (SAPT, section 6.3).

The network is that of the attention. It is trained after a task on the weights that every task's texts had when it was
learned, with pseudo-samples of all tasks; shared attention makes this unnecessary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, log_softmax, pad

from raycl.config import Section
from raycl.routing.attention import Attention, AttentionConfig, divergence


class SelectorConfig(Section):
    """Settings of training the separate selector of two ablations (not in the paper)."""

    steps: int = Field(500, ge=1, description="optimizer steps")
    rate: float = Field(1e-3, gt=0, description="learning rate of Adam")
    batch: int = Field(16, ge=1, description="pseudo-samples of each task per step")


def learn_selector(
    pooled: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    attention: AttentionConfig,
    config: SelectorConfig,
    seed: int,
) -> Attention:
    """Return a fresh attention over all tasks, by Adam on `sum_i mean KL(target_i || alpha)`, on the CPU.

    Args:
        pooled: task -> `[n, d]` pseudo-samples (`max_pooled`), in the order of learning.
        targets: task -> `[i]` target weights of its texts over the first i tasks.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = {task: selector.float().cpu() for task, selector in pooled.items()}
    dimensions = next(iter(rows.values())).shape[1]
    selector = Attention(dimensions, attention, seed)
    selector.look_at(torch.cat(list(rows.values())))
    keys_TD = (torch.rand(len(rows), dimensions, generator=draw) * 2 - 1).requires_grad_()
    wanted = {task: pad(target, (0, len(rows) - len(target))) for task, target in targets.items()}
    optimizer = torch.optim.Adam([*selector.parameters(), keys_TD], lr=config.rate)
    for _ in range(config.steps):
        drawn = [rows[task][torch.randperm(len(rows[task]), generator=draw)[: config.batch]] for task in rows]
        log_alpha = log_softmax(linear(selector.query(torch.cat(drawn)), keys_TD) / selector.tau, dim=-1)
        target = torch.cat(
            [wanted[task].expand(len(drawn_rows), -1) for task, drawn_rows in zip(rows, drawn, strict=True)]
        )
        share = torch.cat([torch.full((len(drawn_rows),), 1.0 / len(drawn_rows)) for drawn_rows in drawn])
        optimizer.zero_grad()
        (divergence(target, log_alpha) * share).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    selector.keys = dict(zip(rows, keys_TD.detach(), strict=True))
    return selector.requires_grad_(False)
