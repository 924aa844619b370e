"""A training step of a LLaMA with LoRA at 1B and 7B, with and without gradient checkpointing; SLM and SAPT over it.

All train adapters of one rank on query and value projections, in bfloat16 over the same frozen weights: LoRA one; SLM a
task's slots, each example its own mixture; SAPT one beside those of earlier tasks, under attention and its reflection.
MFU is the model's floating-point operations (recomputation left out) over those of the measured product.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.figures import Figure
from benchmarks.gpu.models import batch_to_learn, decoder, sizes_of, twin
from benchmarks.gpu.parts.limits import limits_of
from benchmarks.gpu.setup import DENSE, RANK, TOLERANCE, Case, Setup, check_close, ratio
from benchmarks.gpu.timing import Times, quartiles
from benchmarks.phases import bare_context
from raycl.backbone import Backbone
from raycl.backbone.base import checkpoint_activations
from raycl.backbone.roles import is_linear
from raycl.data.tokens import Split
from raycl.methods.base import Method
from raycl.methods.context import Step
from raycl.methods.pseudo_samples.samples import PseudoSamples
from raycl.methods.sapt.sapt import Sapt
from raycl.methods.sapt.settings import SaptConfig
from raycl.methods.single_adapter import Lora, LoraConfig
from raycl.methods.slm.slm import Slm, SlmConfig
from raycl.routing.sentence_encoder import EncoderConfig
from raycl.routing.slot_keys import KeyConfig
from raycl.training.engines.engine import TorchEngine
from raycl.training.engines.fsdp import FSDPEngine, Root
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.phase.step import train_step
from raycl.training.records.progress import StepResult
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Batch, Phase, Task

SLM_LIMIT = 1.10
"""Step time of SLM over plain LoRA's."""

BATCHES = {"1B": (16, 512), "7B": (8, 512)}
"""Rows and tokens of a batch, a quarter of which are answers."""
TINY_BATCH = (4, 12)
EARLIER = 4
"""Tasks that SAPT has learned before."""
PSEUDO_SAMPLES = 20
QUERY_WIDTH = 384
STAGE = Phase(0, "bench", (Task("bench", None, "exact_match"),))
SAME_LOSS = 2e-4
"""Tolerance of first losses: drawn weights lose about ln V whatever is added, so only equality is meaningful."""
CHECKPOINTED = "lora, gradient checkpointing"


def cases(setup: Setup) -> Iterator[Case]:
    """Yield a case for each size."""
    for size in BATCHES:
        yield Case(size, partial(_figures, setup, size))


class Learner:
    """A method in training on one batch."""

    def __init__(self, setup: Setup, method: Method, batch: Batch, root: Root | None = None) -> None:
        """Begin a task.

        Args:
            root: root of a backbone whose layers are partitioned (`raycl.training.engines.fsdp.shard`).
        """
        self.method, self.batch, self.world = method, batch, DistributedContext.alone(setup.device)
        self.context = bare_context(STAGE, drawn_queries(batch) if isinstance(method, Slm) else None)
        method.begin_task(STAGE, self.context)
        train = TrainConfig(learning_rate=1e-5)
        if root is None:
            self.engine = TorchEngine(method.backbone, train, 1000, self.world)
        else:
            self.engine = FSDPEngine(method.backbone, train, 1000, self.world, root=root)
        method.backbone.train()
        self.number = 0

    def step(self) -> StepResult:
        """Take an optimizer step."""
        self.context.step = Step(self.number, self.number, 1)
        self.number += 1
        return train_step(self.engine, self.method, [self.batch], self.world, self.number)


def _figures(setup: Setup, size: str, seconds: float) -> Iterator[Figure]:
    rows, tokens = TINY_BATCH if setup.tiny else BATCHES[size]
    base = decoder(setup, size)
    batch = batch_to_learn(setup, rows, tokens, tokens // 4, sizes_of(setup, size).vocabulary).to(setup.device)
    factories: dict[str, Callable[[Backbone], Method]] = {
        "lora": plain_lora,
        CHECKPOINTED: _checkpointed,
        "slm": partial(_slm, batch=batch),
        "sapt": partial(_sapt, batch=batch),
    }
    learners = {name: Learner(setup, make(twin(base)), batch) for name, make in factories.items()}
    _check_first_steps(setup, size, {name: learner.step() for name, learner in learners.items()})
    times = setup.turns({name: learner.step for name, learner in learners.items()}, seconds)
    for name in ("lora", CHECKPOINTED):
        yield from _speed(setup, f"{size}, {name}", base, times[name], rows, tokens)
    yield ratio(f"{size}: gradient checkpointing over none", times[CHECKPOINTED], times["lora"])
    slots = KeyConfig().slots
    yield ratio(f"{size}: slm over lora", times["slm"], times["lora"], SLM_LIMIT, f"{slots} slots of rank {RANK}")
    yield ratio(f"{size}: sapt over lora", times["sapt"], times["lora"], None, f"{EARLIER} earlier tasks, reflection")


def _speed(setup: Setup, what: str, base: Backbone, times: Times, rows: int, tokens: int) -> Iterator[Figure]:
    spread = quartiles(tuple(rows * tokens / spent for spent in times.seconds))
    detail = f"{rows} x {tokens} tokens in {times.median * 1e3:.3g} ms"
    rate = rows * tokens / times.median
    yield Figure(f"{what}: speed", rate, "tokens/s", detail=detail, spread=spread, peak_gib=times.peak_gib)
    flops, limit = _flops_per_token(base.model, tokens), limits_of(setup).flops
    detail = f"{rate * flops / 1e12:.3g} of {limit / 1e12:.3g} TFLOP/s"
    yield Figure(f"{what}: MFU", 100 * rate * flops / limit, "%", detail=detail)


def _flops_per_token(model: nn.Module, tokens: int) -> float:
    """Forward, and backward to the activations: frozen weights have no gradients, and adapters hardly count.

    2 for each weight of a linear and direction, and causal attention over half of the tokens on average.
    """
    weights = float(sum(linear.weight.numel() for linear in _linears(model)))
    config: Any = model.config
    attention = float(2 * config.num_hidden_layers * config.hidden_size * tokens)
    return 4 * weights + 3 * attention


def _linears(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if is_linear(module))


def _check_first_steps(setup: Setup, size: str, first: dict[str, StepResult]) -> None:
    """New adapters add nothing yet, so every loss is the bare model's; recomputation changes no gradient."""
    losses = torch.tensor([result.loss for result in first.values()])
    check_close(f"{size}, first losses of {', '.join(first)}", losses, losses[:1], SAME_LOSS)
    norms = torch.tensor([first[name].grad_norm for name in ("lora", CHECKPOINTED)])
    check_close(f"{size}, gradient norm with checkpointing", norms[1:], norms[:1], TOLERANCE[setup.dtype])


# ---- methods ---------------------------------------------------------------------------------------------------------


def plain_lora(backbone: Backbone) -> Lora:
    """Return a LoRA on query and value projections."""
    return Lora(LoraConfig(r=RANK), backbone, 0)


def _checkpointed(backbone: Backbone) -> Lora:
    checkpoint_activations(backbone.model)
    return plain_lora(backbone)


def _slm(backbone: Backbone, batch: Batch) -> Slm:
    """Queries are drawn, so its sentence encoder is known by its width alone."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"hidden_size": QUERY_WIDTH}))
        config = SlmConfig(
            r=RANK,
            target_modules=LoraConfig().target_modules,
            router="keys",
            keys=KeyConfig(start="data", steps=0),
            encoder=EncoderConfig(name=folder),
        )
        method = Slm(config, backbone, 0)
    method.encoder.remember(batch.texts, drawn_queries(batch)["train"][: len(batch)])
    return method


def drawn_queries(batch: Batch) -> dict[Split, Tensor]:
    """Return queries of a task's training texts, of which the batch's are the first."""
    queries = torch.randn(DENSE + len(batch), QUERY_WIDTH, generator=torch.Generator().manual_seed(0))
    return {"train": queries, "dev": queries[:0]}


def _sapt(backbone: Backbone, batch: Batch) -> Sapt:
    """Earlier tasks' adapters add nothing (B is zero), which takes as long as if they did."""
    method = Sapt(SaptConfig(r=RANK), backbone, 0)
    draw = torch.Generator().manual_seed(0)
    attention, sources = method.attention, batch.source_ids.tolist()
    adapters: dict[str, AdapterState] = {}
    for number in range(EARLIER):
        name = f"earlier{number}"
        attention.begin(name, number)
        attention.end({**attention.tensors(), "key": torch.rand(attention.dimensions, generator=draw) * 2 - 1})
        pairs = {
            path: (torch.randn(RANK, layer.inputs, generator=draw), torch.zeros(layer.outputs, RANK))
            for path, layer in method.stack.layers.items()
        }
        adapters[name] = AdapterState(pairs, method.config.lora_alpha / RANK)
        kept = [sources[index % len(sources)] for index in range(PSEUDO_SAMPLES)]
        method.reflection.samples[name] = PseudoSamples(kept, [], [])
        method.reflection.abar[name] = torch.full((number + 1,), 1 / (number + 1))
    method._load(adapters)
    return method
