"""A 7B LLaMA with mixtures of 16 adapters, over the bare model: decoding as CUDA graphs, and prefill.

Decoding is what serving does: static key-value caches, one captured step for all rows. Its limit is the time that a
copy of the bytes takes which a step must read: all weights but the input embeddings, and the keys and values so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure
from benchmarks.gpu.adapters import dense, drawn_adapters, loaded
from benchmarks.gpu.models import decoder, sizes_of, token_ids, twin
from benchmarks.gpu.parts.limits import limits_of
from benchmarks.gpu.setup import DENSE, LIMITS, RANK, TARGETS, TOLERANCE, Case, Setup, check_equal, ratio
from benchmarks.gpu.timing import Contender, Times, quartiles
from benchmarks.model_copies import shared_copy
from raycl.adapters.state import combine, fold
from raycl.backbone import Backbone
from raycl.errors import WrongResultError
from raycl.generation import dynamic_cache
from raycl.generation.static_cache import StaticKVCache
from raycl.serve.engine.multi_snapshot_model import MultiSnapshotModel
from raycl.types import AdapterState, Mixture

BANDWIDTH_SHARE = 0.7
"""The least share of the speed that the copy rate allows."""

ROWS, TINY_ROWS = (32, 1, 8), (3, 1)
PROMPT, STEPS, TINY_PROMPT, TINY_STEPS = 64, 64, 5, 4
PREFILL, TINY_PREFILL = (8, 512), (2, 9)
NEARER = 0.2
"""Mixed logits lie at most so far from those of folded weights as from the bare model's (bfloat16 rounds weights: 0.05,
measured on a CPU)."""
ROUNDING = 2.0
"""Captured steps lie at most so many times as far from eager ones as these from a plain pass over the same tokens:
kernels may be chosen otherwise in a capture, and every choice rounds otherwise."""


def cases(setup: Setup) -> Iterator[Case]:
    """Yield one case for each number of rows, then prefill; they share one model."""
    models = Models(setup)
    for rows in TINY_ROWS if setup.tiny else ROWS:
        yield Case(f"{rows} rows", partial(_decoding, models, rows))
    yield Case("prefill", partial(_prefill, models))


class Models:
    """The bare model, and models over the same weights with adapters on each choice of linears; made when needed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @cached_property
    def bare(self) -> Backbone:
        """The backbone without adapters."""
        return decoder(self.setup, "7B")

    @cached_property
    def adapters(self) -> dict[str, dict[str, AdapterState]]:
        """Choice of linears -> adapters."""
        return {name: drawn_adapters(self.bare.model, targets, DENSE, RANK) for name, targets in TARGETS.items()}

    @cached_property
    def mixed(self) -> dict[str, MultiSnapshotModel]:
        """Choice of linears -> a model with all adapters loaded."""
        collected = {}
        for name, adapters in self.adapters.items():
            host = MultiSnapshotModel(twin(self.bare), DENSE * RANK)
            snapshot = loaded(adapters)
            host.add(snapshot)
            host.prefetch(tuple(snapshot.names))
            collected[name] = host
        return collected

    def mixture(self, name: str, rows: int) -> Mixture:
        """Return all adapters for each row."""
        return dense([key for loaded in self.mixed[name].loaded.values() for key in loaded.names], rows)


class Decoder:
    """Rows that are decoded together from the same prompts, again and again."""

    def __init__(
        self,
        backbone: Backbone,
        prompts: Sequence[Sequence[int]],
        steps: int,
        host: MultiSnapshotModel | None = None,
        mixture: Mixture | None = None,
        graphs: bool = True,
    ) -> None:
        """Read the prompts.

        Args:
            graphs: steps are CUDA graphs where there is a GPU.
        """
        self.backbone, self.prompts, self.steps, self.host, self.mixture = backbone, prompts, steps, host, mixture
        columns = 1 << (max(map(len, prompts)) + steps).bit_length()
        self.slots = StaticKVCache(backbone, len(prompts), columns, graphs)
        with self.routed():
            self._begun = dynamic_cache.begin(backbone, prompts)
        self._under: Any = None

    def routed(self) -> AbstractContextManager[Any]:
        """Return the mixture of all rows, for passes of any shape."""
        if self.host is None or self.mixture is None:
            return nullcontext()
        return self.host.activate(self.mixture)

    def open(self, stack: ExitStack) -> None:
        """Activate the mixture at fixed addresses, until the stack is closed."""
        self.slots.joined(self._begun)
        if self.host is not None and self.mixture is not None:
            placed = self.slots.placed(self.mixture.weights)
            self._under = stack.enter_context(self.host.activate_static(self.mixture, placed))

    def prepare(self) -> None:
        """Go back to the end of the prompts."""
        self.slots.kept([])
        self.slots.joined(self._begun)

    def run(self) -> None:
        """Run every step."""
        for _ in range(self.steps):
            self.slots.step(self.slots.logits.argmax(-1), self._under)

    def ids(self) -> Tensor:
        """Return `[rows, steps]`: the tokens that it chooses."""
        self.prepare()
        collected = []
        for _ in range(self.steps):
            collected.append(self.slots.logits.argmax(-1))
            self.slots.step(collected[-1], self._under)
        return torch.stack(collected, 1)

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Return `[steps, rows, V]` before each of these tokens."""
        self.prepare()
        collected = []
        for ids_B in ids_BT.T:
            collected.append(self.slots.logits)
            self.slots.step(ids_B, self._under)
        return torch.stack(collected)


def _decoding(models: Models, rows: int, seconds: float) -> Iterator[Figure]:
    setup, bare = models.setup, models.bare
    length, steps = (TINY_PROMPT, TINY_STEPS) if setup.tiny else (PROMPT, STEPS)
    prompts = token_ids(setup, rows, length, sizes_of(setup, "7B").vocabulary, seed=rows).tolist()
    decoders = {"bare": Decoder(bare, prompts, steps)}
    for name, host in models.mixed.items():
        decoders[name] = Decoder(host.backbone, prompts, steps, host, models.mixture(name, rows))
    with torch.no_grad(), ExitStack() as opened:
        for item in decoders.values():
            item.open(opened)
        times = setup.turns({name: Contender(item.run, item.prepare) for name, item in decoders.items()}, seconds)
        chosen = {name: item.ids() for name, item in decoders.items()}
        graphed = decoders["q, v"].logits(chosen["q, v"])
    for name, item in decoders.items():
        check_equal(f"{rows} rows, {name}, steps captured", item.slots.captures > 0, setup.is_cuda)
    for name, item in decoders.items():
        with item.routed():
            check_chosen(f"decoding {rows} rows, {name}", item.backbone, prompts, chosen[name])
    check_graphs(f"decoding {rows} rows", decoders["q, v"], chosen["q, v"], graphed)
    yield from _decoding_figures(setup, bare, rows, length + steps / 2, steps, times)


def _decoding_figures(
    setup: Setup, bare: Backbone, rows: int, tokens: float, steps: int, times: dict[str, Times]
) -> Iterator[Figure]:
    """Args: `tokens`: in the caches of a row, on average."""
    what, moved = f"{rows} rows", _bytes(setup, bare, rows, tokens)
    limit_s = moved / limits_of(setup).bytes
    rates = {name: tuple(rows * steps / spent for spent in item.seconds) for name, item in times.items()}
    speed = rows * steps / times["bare"].median
    peak = times["bare"].peak_gib
    yield Figure(f"{what}: bare", speed, "tokens/s", spread=quartiles(rates["bare"]), peak_gib=peak)
    detail = f"{moved / 1e9:.3g} GB a step take {limit_s * 1e3:.3g} ms at the copy rate"
    shares = tuple(limit_s * steps / spent for spent in times["bare"].seconds)
    share = limit_s * steps / times["bare"].median
    yield Figure(f"{what}: bare, of the bandwidth limit", share, "x", BANDWIDTH_SHARE, ">=", detail, quartiles(shares))
    for name, target in LIMITS.items():
        detail = f"{rows * steps / times[name].median:,.0f} tokens/s"
        yield ratio(f"{what}: {DENSE} adapters on {name}, dense, over bare", times[name], times["bare"], target, detail)


def _bytes(setup: Setup, backbone: Backbone, rows: int, tokens: float) -> float:
    """Return what one step must read."""
    sizes = sizes_of(setup, "7B")
    embeddings = backbone.model.get_input_embeddings().weight
    weights = sum(int(parameter.nbytes) for parameter in backbone.model.parameters() if parameter is not embeddings)
    head_width = sizes.width // sizes.heads
    values = 2 * sizes.layers * sizes.kv_heads * head_width * rows * tokens
    return weights + values * int(embeddings.element_size())


@torch.no_grad()
def check_chosen(what: str, backbone: Backbone, prompts: Sequence[Sequence[int]], ids_BT: Tensor) -> None:
    """Check that each token is the best one, to rounding, of a plain pass over its prefix; the mixture must be open.

    Args:
        prompts: ids, of equal length.

    Raises:
        WrongResultError: one is not.
    """
    logits_BTV = _plain_logits(backbone, prompts, ids_BT)
    best_BT = logits_BTV.amax(-1)
    behind_BT = best_BT - logits_BTV.gather(-1, ids_BT[..., None])[..., 0]
    worst = float((behind_BT / logits_BTV.abs().amax()).max())
    tolerance = TOLERANCE[backbone.dtype]
    if not worst <= tolerance:
        raise WrongResultError(
            f"{what}: a decoded token is {worst:.2g} of the largest logit behind the best one of a plain pass, "
            f"expected at most {tolerance:g}: the figures of this case are left out"
        )


def _plain_logits(backbone: Backbone, prompts: Sequence[Sequence[int]], ids_BT: Tensor) -> Tensor:
    """Return `[B, T, V]` float32 before each of these tokens, from one pass."""
    prompts_BL = torch.tensor(prompts, device=ids_BT.device)
    whole_BSV: Tensor = backbone.model(input_ids=torch.cat([prompts_BL, ids_BT[:, :-1]], 1)).logits
    return whole_BSV[:, prompts_BL.shape[1] - 1 :].float()


@torch.no_grad()
def check_graphs(what: str, item: Decoder, ids_BT: Tensor, logits_TBV: Tensor) -> None:
    """Check that steps without graphs give the same logits, up to rounding.

    Raises:
        WrongResultError: they do not.
    """
    eager = Decoder(item.backbone, item.prompts, item.steps, item.host, item.mixture, graphs=False)
    with ExitStack() as opened:
        eager.open(opened)
        eager_TBV = eager.logits(ids_BT).float()
    with item.routed():
        plain_TBV = _plain_logits(item.backbone, item.prompts, ids_BT).transpose(0, 1)
    size_TB = eager_TBV.norm(dim=-1)
    apart, rounding = (
        float(((other - eager_TBV).norm(dim=-1) / size_TB).max()) for other in (logits_TBV.float(), plain_TBV)
    )
    half_step = torch.finfo(item.backbone.model.dtype).eps / 2  # kernels of a plain pass may be those of eager steps
    tolerance = max(TOLERANCE[torch.float32], half_step, ROUNDING * rounding)
    if not apart <= tolerance:
        raise WrongResultError(
            f"{what}: captured steps lie {apart:.2g} of the logits' norm from eager ones, expected at most "
            f"{tolerance:.2g}, since these lie {rounding:.2g} from a plain pass: the figures of this case are left out"
        )


def _prefill(models: Models, seconds: float) -> Iterator[Figure]:
    setup, bare = models.setup, models.bare
    rows, length = TINY_PREFILL if setup.tiny else PREFILL
    prompts = token_ids(setup, rows, length, sizes_of(setup, "7B").vocabulary).tolist()
    runs: dict[str, Any] = {"bare": partial(dynamic_cache.begin, bare, prompts)}
    with torch.no_grad(), ExitStack() as opened:
        for name, host in models.mixed.items():
            opened.enter_context(host.activate(models.mixture(name, rows)))
            runs[name] = partial(dynamic_cache.begin, host.backbone, prompts)
        times = setup.turns(runs, seconds)
        logits = {name: run().logits[0].float() for name, run in runs.items()}
    weights = models.mixture("q, v", rows).weights[0]
    _check_folded(models, prompts[0], weights, logits)
    tokens = rows * length
    for name, target in LIMITS.items():
        detail = f"{rows} x {length}; {tokens / times[name].median:,.0f} tokens/s"
        yield ratio(
            f"prefill: {DENSE} adapters on {name}, dense, over bare", times[name], times["bare"], target, detail
        )


@torch.no_grad()
def _check_folded(models: Models, prompt: list[int], weights_N: Tensor, logits: dict[str, Tensor]) -> None:
    """Check that the first row's logits are those of a model whose weights contain its mixture."""
    name = "q, v"
    adapters = models.adapters[name]
    paths = next(iter(adapters.values())).linears
    model = shared_copy(models.bare.model, [models.bare.model.get_submodule(path).weight for path in paths])
    fold(model, combine(dict(zip(adapters, weights_N.tolist(), strict=True)), adapters))
    folded = model(input_ids=torch.tensor([prompt], device=models.setup.device)).logits[0, -1].float()
    apart = float((logits[name] - folded).norm())
    bare = float((logits[name] - logits["bare"]).norm())
    nearer = TOLERANCE[torch.float32] if models.setup.tiny else NEARER
    if not apart <= nearer * bare:
        raise WrongResultError(
            f"prefill: mixed logits are {apart:.3g} from those of folded weights and {bare:.3g} from the bare model's: "
            f"expected at most {nearer:g} times as far: the figures of this case are left out"
        )
