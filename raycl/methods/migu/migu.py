"""MIGU: only the rows of a weight whose outputs are large are updated (sections 3.2 and 3.3 of its paper).

"Unlocking Continual Learning Abilities in Language Models", Findings of EMNLP 2024. After the forward passes of an
optimizer step, every layer has the summed magnitude of each of its outputs over all real tokens on all workers. The
share T of rows with the smallest ones gets no gradient in this step. Nothing is kept between steps, and no task id is
needed. LoRA's A is masked by the magnitudes of `A x`, gated as they enter the output, each adapter separately; its B by
those of the full output of the layer. A fused projection is one layer. Where the authors' code differs (quantile, all
linears, no mask on the first task), there is a setting; but not for its counting of padding, with which a mask would
depend on how texts were put into batches. Forward passes outside a training step (evaluation, generation) do not count,
nor does recomputation.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.config import Tree
from raycl.errors import ConfigError, RunError
from raycl.methods.base import Method
from raycl.methods.migu.clusters import CoMagnitude, sequential_clusters, weight_clusters
from raycl.methods.migu.magnitudes import OutputMagnitudes
from raycl.methods.migu.observed_layers import Layout, layout_of, observed_layers
from raycl.methods.migu.row_selection import Groups, RowCounts, Rule, SparseLayers, by_size, masked_count
from raycl.methods.modifier import GradientModifier, ModifierConfig, Reduce
from raycl.types import Batch, Phase

MEASURED, FIRST = 50, 2
"""One step in so many is measured for the report (share of gradient norm kept, and rows where masking is off), and the
first ones of a task; a new label head is zero in the very first, and so are the gradients below it."""

T = TypeVar("T")


CLUSTER_EXAMPLES = 500
"""Training examples of a task that are measured for clusters of rows that are large together."""


class MiguConfig(ModifierConfig):
    """MIGU: only the weight rows with the largest outputs are updated (section 5.1, figure 4; authors' T5 scripts)."""

    name: Literal["migu"] = "migu"
    threshold: float = Field(
        0.7,
        ge=0,
        le=1,
        description="T, the share of rows that is masked; the paper's best: 0.7 for finetune, lora and inclora, 0.4 "
        "with replay, 0.1 for olora",
    )
    rule: Rule = Field(
        "floor", description="how many rows are masked. floor: floor(T rows); quantile: as in the authors' code"
    )
    layers: tuple[str, ...] = Field(
        ("attention", "ffn"), min_length=1, description="roles or regular expressions of linear paths"
    )
    include_lm_head: bool = Field(
        False, description="also mask the language-model head, as the authors' code does, and tied embeddings with it"
    )
    bias: bool = Field(False, description="also mask the bias of a masked row")
    skip_first_task: bool | None = Field(
        None,
        description="do not mask the run's first task, as in the authors' T5 runs; null: skip it if there are others, "
        "except in continual pre-training, where every domain is masked",
    )
    count_pads: bool = Field(
        False, description="also add up the magnitudes of padding, as in the authors' code: results depend on the batch"
    )
    mask_scope: Literal["step", "micro_batch"] = Field(
        "step",
        description="forward passes that decide the mask. step: all of the optimizer step; micro_batch (a "
        "deviation): the first on every worker, so that the mask is known before any backward pass",
    )
    mask_update: bool = Field(False, description="masked rows do not move at all, by momentum and weight decay neither")
    clusters: int | None = Field(
        None, ge=1, description="number of clusters of a layer's rows that share one mask bit; null: no clusters"
    )
    cluster_by: Literal["weight", "lora_b", "co_magnitude", "sequential"] = Field(
        "weight",
        description="weight: rows with similar weights; lora_b: similar rows of a LoRA's B alone (those of a new one "
        "are all zero, and stand in their order); co_magnitude: rows that are large together (over the "
        "task's first 500 examples); sequential: neighbouring rows",
    )
    row_sparse: bool = Field(
        True,
        description="do not compute masked rows of a gradient where the mask is known in time, and the method does "
        "not read whole gradients before (as those that project them do)",
    )
    random_update: bool = Field(False, description="control: mask as many rows, drawn at random in every step")

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield how clusters are made, where there are none."""
        if self.clusters is None:
            yield "cluster_by", "clusters=null"

    def masks(self, index: int, only: bool, learns_texts: bool) -> bool:
        """Return whether a phase is masked at all.

        Args:
            only: the run has no other. learns_texts: texts themselves are learned, not their answers.
        """
        skip = self.skip_first_task if self.skip_first_task is not None else not (only or learns_texts)
        return not (skip and index == 0)

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings without those of the mask while nothing is masked."""
        settings = super().cache_key(index, tasks, learns_texts)
        if self.masks(index, len(tasks) == 1, learns_texts):
            return settings | {"skip_first_task": False}
        without = ("threshold", "mask_update", "random_update")
        return {key: value for key, value in settings.items() if key not in without} | {"skip_first_task": True}


class Migu(GradientModifier):
    """The mask of an optimizer step."""

    Config = MiguConfig

    def __init__(self, config: MiguConfig, method: Method) -> None:
        """Check that the named layers exist.

        Raises:
            ConfigError: `layers` names none, there is no language-model head to include, or padding is to count where
                there is none.
        """
        super().__init__(config, method)
        self.config: MiguConfig
        if config.count_pads and method.backbone.packs:
            raise ConfigError(
                "modifiers.migu.count_pads is true, but train.packing leaves no padding behind each example to count: "
                "set one of them to false"
            )
        observed_layers(method.backbone, config.layers, config.include_lm_head)
        self.record: RowCounts = RowCounts()
        self._active = self._measured = self._sparse_only = False
        self._passes_left, self._seed = 0, 0
        self._reduce: Reduce = lambda tensor: tensor  # over one worker
        self._reset()

    def _reset(self) -> None:
        self.parameter_names, self.names = (), ()
        self._layout = Layout({}, {}, 0)
        self._sparse = SparseLayers({}, self.method.backbone.device)
        self._sole: set[str] = set()
        self._groups: list[Groups] = []
        self._clusters: Tensor | None = None
        self._magnitudes = OutputMagnitudes(self.method.backbone, self._layout, {})
        self._mask = self._masked_rows = torch.zeros(0)
        self._masked: dict[str, Tensor] = {}

    def begin_task(self, phase: Phase, only: bool, resumed: bool) -> None:
        """Observe every chosen layer that trains a weight.

        Raises:
            RunError: there is none.
        """
        config, backbone = self.config, self.method.backbone
        self._active = config.masks(phase.index, only, phase.tasks[0].objective != "answer")
        layers = observed_layers(backbone, config.layers, config.include_lm_head)
        self._layout = layout_of(backbone, layers, config.bias)
        if not self._layout.rows:
            raise RunError(
                f"modifiers.migu finds no trained weight in the layers {', '.join(config.layers)} at task "
                f"'{phase.name}': expected a method that trains some of them; drop the modifier, or name them in "
                "modifiers.migu.layers"
            )
        self.parameter_names = self._layout.rows.keys()
        if not resumed:
            self._clusters = self._first_clusters(phase, layers)
        self._group()
        self._magnitudes = OutputMagnitudes(backbone, self._layout, layers, config.count_pads)
        self._mask = torch.ones(self._layout.size, device=backbone.device, dtype=torch.bool)
        self._masked_rows = ~self._mask
        self._masked = {name: rows.on(self._masked_rows) for name, rows in self._layout.rows.items()}
        self.record.begin(self._layout, backbone.device, resumed)
        self._sparse = SparseLayers(self._sparse_layers(layers), backbone.device)

    def _first_clusters(self, phase: Phase, layers: Mapping[str, nn.Module]) -> Tensor | None:
        """Return those that need no data; they stay for the whole task."""
        count, how = self.config.clusters, self.config.cluster_by
        self.examples = CLUSTER_EXAMPLES if count is not None and how == "co_magnitude" else 0
        if count is None or how == "co_magnitude":
            return None
        if how == "sequential":
            return sequential_clusters(self._layout, count)
        seed = self.method.seed + phase.index
        return weight_clusters(self._layout, layers, count, seed, alone=how == "lora_b")

    def _group(self) -> None:
        sizes = [size for units in self._layout.units.values() for size in units.groups]
        device = self.method.backbone.device
        clusters = None if self._clusters is None else self._clusters.to(device)
        self._groups = by_size(sizes, device, clusters)

    def observe_rows(self, run_examples: Callable[[], None], reduce: Reduce) -> None:
        """Compute co-magnitude clusters."""
        assert self.config.clusters is not None, "nothing to study"
        self._magnitudes.co_magnitude = observed = CoMagnitude(self._layout, self.method.backbone.device)
        run_examples()
        self._clusters = observed.clusters(reduce, self.config.clusters, self.method.seed)
        self._magnitudes.co_magnitude = None
        self._group()

    def _sparse_layers(self, layers: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Linear, slice]]:
        """Return layers whose backward can form some rows of their weights' gradients only, by the names of these.

        None where the method reads whole gradients before they are masked.
        """
        if not (self._active and self.config.row_sparse and self.config.threshold) or self.method.mixes_gradients:
            return {}
        result = {}
        for (path, part), units in self._layout.units.items():
            layer, name = layers[path], f"model.{path}.weight"
            own = self._layout.rows.get(name)
            owned = own is not None and own.span == units.span  # not by a layer that it is tied to
            if part == "output" and isinstance(layer, nn.Linear) and owned:
                result[name] = layer, units.span
        modules = self.method.backbone.modules()
        uses = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
        self._sole = {name for name, (layer, _) in result.items() if uses[id(layer.weight)] == 1}
        return result

    def end_task(self) -> None:
        """Remove the hooks; the summary stays."""
        self._sparse.close()
        self._magnitudes.close()
        self.record.end(self._layout)
        self._reset()

    def begin_step(self, seed: int, micro_batches: int, reduce: Reduce) -> None:
        """Forget the magnitudes of the step before."""
        self._measured = self.record.steps < FIRST or seed % MEASURED == 0
        passes = 1 if self.config.mask_scope == "micro_batch" else micro_batches
        before_backward = passes == 1
        self._sparse_only = before_backward and not self._measured and not self.method.adds_penalty
        self._passes_left = passes * self._makes_mask
        self._seed, self._reduce = seed, reduce
        self._magnitudes.clear()
        self._sparse.reset()
        self.names = self.parameter_names if self._makes_mask else ()

    @property
    def _makes_mask(self) -> bool:
        """Return whether this step makes masks; where masking is off, measured steps do for the report."""
        return self._active or self._measured

    def observe_forward(self, forward: Callable[[Batch], T], batch: Batch) -> T:
        """Add up magnitudes while `forward` runs; the mask is known when the last pass that decides has ended."""
        clusters_are_made = self._magnitudes.co_magnitude is not None
        if not self._passes_left and not clusters_are_made:
            return forward(batch)
        output = self._magnitudes.observe(forward, batch)
        self._passes_left -= not clusters_are_made
        if not self._passes_left and not clusters_are_made:
            self._choose()
        return output

    def _choose(self) -> None:
        """Sum over workers once for all layers, then choose every group's rows."""
        if self.config.random_update:
            draw = torch.Generator().manual_seed(self._seed)
            self._magnitudes.sums.copy_(torch.rand(self._layout.size, generator=draw))
        else:
            self._reduce(self._magnitudes.sums)
        for groups in self._groups:
            groups.choose(self._magnitudes.sums, self.config.threshold, self.config.rule, self._mask)
        torch.logical_not(self._mask, out=self._masked_rows)
        self.record.count(self._mask)
        if not self._measured:  # what is measured must be whole
            self._sparse.choose(self._mask, self._kept_count)

    @property
    def _kept_count(self) -> Callable[[int], int] | None:
        """The number of rows that are kept of each group size; None where the magnitudes decide it."""
        if self.config.rule != "floor" or self._clusters is not None:
            return None
        return lambda rows: rows - masked_count(self.config.threshold, rows)

    def __call__(self, name: str, gradient: Tensor) -> Tensor:
        """Set a gradient to exactly zero where it is masked. What has kept rows only is returned as it is."""
        if self._sparse_only and name in self._sole and self._sparse.formed(name):
            return gradient
        masked = self._masked[name]
        if self._measured:
            self.record.measure(gradient, masked)
        return gradient.masked_fill_(masked, 0) if self._active else gradient

    def masked(self, name: str) -> Tensor | None:
        """Return the rows (columns, where a weight is kept the other way round) that are not updated in this step."""
        return self._masked[name] if self._active and name in self.names else None

    @property
    def holds(self) -> bool:
        return self.config.mask_update

    def held(self, name: str) -> Tensor | None:
        return self.masked(name) if self.config.mask_update else None

    def summary(self) -> dict[str, Any]:
        """Return rows kept most often and the share of gradient norm kept, of the phase that has just ended."""
        return {"masked": self._active, **self.record.summary}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return counts for the report, and the task's clusters: nothing else outlives a step."""
        clusters = {} if self._clusters is None else {"clusters": self._clusters.cpu()}
        return {"summary": self.record.summary, "active": self._active}, self.record.tensors() | clusters

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on counting."""
        self._active = bool(state.get("active", False))
        self._clusters = tensors.get("clusters")
        self.record.load(state.get("summary", {}), tensors)
