"""SAPT's router: every learned task has a key, and a text attends to all of them (SAPT, section 4.2).

Query of a text: elementwise maximum over its tokens' raw embeddings, projected down to p dimensions and up again, SiLU,
LayerNorm. Weights: softmax over the products of query and keys, divided by tau. They depend only on the text's tokens,
not on padding, labels or neighbours. Computed in float32 whatever the model is in.

A selector apart from the adapters, for the ablations -Alignment and -SA (section 6.3), is the same network. It is
trained after a task on the weights that every task's texts had when it was learned, with pseudo-samples of all tasks;
shared attention makes this unnecessary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, log_softmax, pad, silu

from raycl.backbone.base import mean_pooled
from raycl.config import Section
from raycl.errors import RetrievalError
from raycl.routing.router import KeyedRouting, Need, Owners, PromptRouter, uniform
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.types import Mixture, RouterState

SHARED = ("down", "up", "norm_weight", "norm_bias")
"""Parameters that all tasks share, by name."""

LEAST_WEIGHT = 1e-30
"""Weight of an adapter whose labels must count: the smallest that the label head distinguishes from zero."""

STANDARD = ("center", "spread")
"""Statistics that standardize the pooled embeddings, by name; computed once, never learned."""


class AttentionConfig(Section):
    """Settings of the attention (SAPT, appendix C, and the authors' scripts)."""

    width: int = Field(100, ge=1, description="p, the width of the bottleneck projection; SAPT-Prompt: 150 to 200")
    proj_act: Literal["after_up", "between"] = Field(
        "after_up",
        description="position of SiLU. after_up: as released; between: between down and up projection, as in ATTEMPT",
    )
    tau: float | None = Field(
        None,
        gt=0,
        description="temperature; null: sqrt(d); the scripts also use sqrt(2d) on T5 and sqrt(d/2) on LLaMA",
    )
    pool_pads: bool = Field(
        False, description="include padding in the maximum, as released: a text's weights then depend on its batch"
    )
    standardize: bool = Field(
        True,
        description="centre and scale each dimension of the pooled embeddings by the first task's texts, so that "
        "what all prompts have in common does not hide the task; false: as in the paper",
    )
    pruning_threshold: float = Field(
        1e-3,
        ge=0,
        lt=0.5,
        description="adapters whose weight for a text is less than this divided by the number of tasks are not "
        "evaluated, so that these weights sum to less than this; 0: all are",
    )

    def settled(self, encoder: bool, scores: bool) -> AttentionConfig:
        """Return the settings without pruning where all adapters must be evaluated.

        Args:
            encoder: the backbone is encoder-only.
            scores: label heads' scores are mixed, where a pruned adapter's labels would get minus infinity.
        """
        return self.model_copy(update={"pruning_threshold": 0.0}) if encoder and scores else self


class Attention(KeyedRouting):
    """Projection and keys.

    Attributes:
        down: `[p, d]`. up: `[d, p]`. norm_weight, norm_bias: `[d]`.
        center, spread: `[d]` statistics of the first pooled embeddings, where they are standardized; else None.
    """

    def __init__(self, dimensions: int, config: AttentionConfig, seed: int, device: torch.device | str = "cpu") -> None:
        """Draw the projection as torch draws linears (the released code's way)."""
        super().__init__(dimensions)
        self.config = config
        draw = torch.Generator().manual_seed(seed)
        self.down: nn.Parameter = nn.Parameter(uniform((config.width, dimensions), dimensions**-0.5, draw).to(device))
        self.up: nn.Parameter = nn.Parameter(uniform((dimensions, config.width), config.width**-0.5, draw).to(device))
        self.norm_weight: nn.Parameter = nn.Parameter(torch.ones(dimensions, device=device))
        self.norm_bias: nn.Parameter = nn.Parameter(torch.zeros(dimensions, device=device))
        self.register_parameter("key", None)
        self.center: Tensor | None = None
        self.spread: Tensor | None = None
        self._frozen: Tensor | None = None

    @property
    def tau(self) -> float:
        """The temperature."""
        return float(self.config.tau or self.dimensions**0.5)

    # ---- a task ----------------------------------------------------------------------------------------------

    def look_at(self, pooled_ND: Tensor) -> None:
        """Compute center and spread from the first texts, if they are wanted and not known yet.

        A dimension that hardly varies in them counts as if it varied like the median one of those that do at all (in
        few texts most may be the same in all). The center lies one spread
        below their mean: around the mean itself these texts would be noise, which the layer norm makes as large as the
        direction of any later task, and no key could separate their task.
        """
        if not self.config.standardize or self.center is not None:
            return
        found_ND = pooled_ND.detach().float().cpu()
        spread_D = found_ND.std(0, correction=0)
        varied = spread_D[spread_D > 1e-6]
        self.spread = spread_D.clamp(min=float(varied.median()) if len(varied) else 1.0)
        self.center = found_ND.mean(0) - self.spread

    def begin(self, task: str, seed: int) -> None:
        """Draw a key for a new task from U(-1, 1) (the released code)."""
        drawn = uniform((self.dimensions,), 1.0, torch.Generator().manual_seed(seed))
        self.begin_key(task, drawn.to(self.down))

    def end(self, values: Mapping[str, Tensor]) -> None:
        """Freeze the key of the task in training; it and the projection become exactly `values`."""
        self.end_key(values["key"])
        self._frozen = None
        self.fill(values)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Set the projection, in float32 whatever an engine has made of it."""
        for name in SHARED:
            parameter = getattr(self, name)
            parameter.data = values[name].detach().to(parameter.device, torch.float32, copy=True)

    # ---- weights ---------------------------------------------------------------------------------------------

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return the log of the weights `[B, T]` over `names`, float32.

        Args:
            pooled_BD: see `max_pooled`.

        Raises:
            RetrievalError: no task was learned yet.
        """
        if not self.names:
            raise RetrievalError("no task has been learned yet: there are no keys to attend to")
        with torch.autocast(pooled_BD.device.type, enabled=False):
            scores_BT = linear(self.query(pooled_BD), self._matrix(pooled_BD.device)) / self.tau
            return log_softmax(scores_BT, dim=-1)

    def query(self, pooled_BD: Tensor) -> Tensor:
        """Return queries `[B, d]`."""
        pooled_BD = pooled_BD.float()
        if self.center is not None and self.spread is not None:
            self.center, self.spread = self.center.to(pooled_BD.device), self.spread.to(pooled_BD.device)
            pooled_BD = (pooled_BD - self.center) / self.spread
        low_BP = linear(pooled_BD, self.down.float())
        between = self.config.proj_act == "between"
        high_BD = linear(silu(low_BP) if between else low_BP, self.up.float())
        inner_BD = high_BD if between else silu(high_BD)
        return layer_norm(inner_BD, (self.dimensions,), self.norm_weight.float(), self.norm_bias.float())

    def _matrix(self, device: torch.device) -> Tensor:
        """Return `[T, d]` keys in the order of `names`."""
        rows = [] if self.key is None else [self.key.float()[None]]
        if self.keys:
            if self._frozen is None or self._frozen.device != device:
                self._frozen = torch.stack(list(self.keys.values())).to(device)
            rows = [self._frozen, *rows]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    # ---- keeping ---------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return `key/<task>` of earlier tasks, and the projection by `SHARED` (names without a slash: no task's)."""
        held = {name: getattr(self, name) for name in (*SHARED, *STANDARD)}
        return super().tensors() | {
            name: tensor.detach().float().cpu().clone() for name, tensor in held.items() if tensor is not None
        }

    def settings(self) -> dict[str, Any]:
        """Return the JSON-able settings, everything but the tensors."""
        shape = {"dimensions": self.dimensions, "tasks": list(self.keys)}
        return {"attention": self.config.model_dump(mode="json"), **shape}

    def take(self, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of `settings` and `tensors`; tasks whose keys were removed are left out."""
        self.take_keys(settings["tasks"], tensors)
        self.center, self.spread = (tensors[name].float() if name in tensors else None for name in STANDARD)
        self._frozen = None
        self.fill(tensors)


class AttentionRouter(PromptRouter):
    """The attention of a snapshot, over the backbone's token embeddings of whole prompts.

    Attributes:
        hard: only the task with the largest weight is active, with weight 1 (the ablation without shared attention).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"embeddings"})
    kind: ClassVar[str] = "attention"

    def __init__(self, attention: Attention, hard: bool = False) -> None:
        self.attention = attention
        self.hard = hard
        self.dimensions = attention.dimensions

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        attention = self.attention.to(embeddings_BLD.device)
        pooled_BD = max_pooled(embeddings_BLD, mask_BL, attention.config.pool_pads)
        alpha_BT = attention(pooled_BD).exp().cpu()
        mixture = mixture_of(attention.names, alpha_BT, attention.config.pruning_threshold, self.hard)
        whole_BT = hard_weights(alpha_BT) if self.hard else alpha_BT.clamp(min=LEAST_WEIGHT)
        by_text = self.bare.weights(attention.names, mean_pooled(embeddings_BLD.float(), mask_BL))
        return replace(mixture, unpruned=Mixture(attention.names, whole_BT), by_text=by_text)

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> AttentionRouter:
        settings = state.settings
        attention = Attention(settings["dimensions"], AttentionConfig(**settings["attention"]), 0)
        attention.take(settings, state.tensors)
        return AttentionRouter(attention.requires_grad_(False), bool(settings.get("hard")))


def max_pooled(embeddings_BLD: Tensor, mask_BL: Tensor, pads: bool = False) -> Tensor:
    """Return the elementwise maximum over tokens, `[B, d]`; 0 for an example without tokens.

    Args:
        pads: padding takes part, as released.
    """
    if pads:
        return embeddings_BLD.amax(1)
    real_BL1 = (mask_BL > 0)[:, :, None]
    highest_BD = embeddings_BLD.masked_fill(~real_BL1, -torch.inf).amax(1)
    return highest_BD.masked_fill(~real_BL1.any(1), 0.0)


def mixture_of(
    names: tuple[str, ...], alpha_BT: Tensor, pruning_threshold: float = 0.0, hard: bool = False, always: str = ""
) -> Mixture:
    """Return attention weights as a mixture, without columns whose weights are all zero.

    A weight below `pruning_threshold` / T becomes 0. So the weights that a text loses add up to less than
    `pruning_threshold`, however many tasks there are, and its update changes by less than that share of the largest
    adapter's. All other weights stay as they are.

    Args:
        hard: the largest weight becomes 1, all others 0.
        always: a name whose weights are never pruned: the adapter in training, the only one with its labels.
    """
    if hard:
        alpha_BT = hard_weights(alpha_BT)
    kept_BT = alpha_BT >= (0.0 if hard else pruning_threshold / len(names))
    if always:
        kept_BT[:, names.index(always)] = True
    weights_BT = torch.where(kept_BT, alpha_BT, 0.0)
    active = (weights_BT.detach() != 0).any(0).tolist()
    columns = [column for column, name in enumerate(names) if active[column] or name == always]
    if len(columns) == len(names):
        return Mixture(names, weights_BT)
    return Mixture(tuple(names[column] for column in columns), weights_BT[:, columns])


def hard_weights(alpha_BT: Tensor) -> Tensor:
    """Return 1 for the largest weight of each row, else 0."""
    return torch.zeros_like(alpha_BT).scatter(1, alpha_BT.argmax(1, keepdim=True), 1.0)


def divergence(target_BT: Tensor, log_alpha_BT: Tensor) -> Tensor:
    """Return KL(target || alpha) of each row, `[B]`; an entry of weight 0 adds 0 for every alpha (SAPT, eq. 5)."""
    known = target_BT > 0
    terms_BT = torch.xlogy(target_BT, target_BT) - target_BT * log_alpha_BT
    return torch.where(known, terms_BT, 0.0).sum(-1)


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
        torch.autograd.backward((divergence(target, log_alpha) * share).sum())
        optimizer.step()
    selector.keys = dict(zip(rows, keys_TD.detach(), strict=True))
    return selector.requires_grad_(False)
