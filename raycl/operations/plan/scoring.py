"""Bytes that the process holds which scores rows beside training (`eval.mode=overlap`).

It has the backbone and all adapters once more, keys and values of the rows that it decodes together, and what one layer
computes of the prompts that it reads together. It is there from the run's beginning to its end, so where it shares a
GPU or a node with a worker, both add up. The same arithmetic as for a worker: `raycl.operations.plan.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from raycl.generation.answer_batch import rows_read_together
from raycl.operations.plan.memory import CONTEXT, PROCESS
from raycl.operations.plan.opening import Opened
from raycl.operations.plan.workload import MASTER, Model, Step

Device = Literal["a GPU of its own", "a worker's GPU", "CPUs"]


@dataclass(frozen=True)
class Scorer:
    """Where rows are scored, and how many at a time.

    Attributes:
        decodes: rows that are decoded together; 0: answers are labels. reads: prompts of one pass.
        longest: side -> positions that a row has there at most.
        compute_bytes: of an activation. weight_bytes: of a parameter of the backbone, on average.
    """

    device: Device
    decodes: int
    reads: int
    longest: Mapping[str, int]
    compute_bytes: int
    weight_bytes: float


def scorer_of(opened: Opened, model: Model, step: Step) -> Scorer | None:
    """None: evaluation is inline, or there is one task, whose row the workers score."""
    config = opened.config
    if config.eval.mode == "inline" or len(opened.context.phases) == 1:
        return None
    capabilities, rows = opened.context.backbone.capabilities, config.eval.batch_size
    generates = capabilities.answers == "text" and not opened.context.stream.learns_texts
    answer = (config.eval.max_new_tokens or config.stream.token_limits[1]) if generates else 0
    longest = {"source": step.longest["source"], "target": answer}
    if capabilities.one_sequence:
        longest["source"] += answer - step.longest["target"]
    device = _device(config.launch.gpus_per_worker, config.eval.overlap_gpus)
    in_float32 = device == "CPUs" and config.backbone.dtype == "auto"  # what a CPU computes in
    computed = MASTER if in_float32 else model.compute_bytes
    stored = float(computed) if config.backbone.quantization == "none" else model.weight_bytes
    reads = rows_read_together(rows) if generates and config.eval.decoding == "auto" else rows
    return Scorer(device, rows if generates else 0, reads, longest, computed, stored)


def _device(of_a_worker: float | None, its: float | None) -> Device:
    """A plan has a worker on each GPU, which has all of it unless the config says less."""
    worker = 1.0 if of_a_worker is None else of_a_worker
    mine = worker if its is None else its
    if not mine:
        return "CPUs"
    return "a worker's GPU" if worker + mine <= 1 else "a GPU of its own"


def scoring_memory(model: Model, scorer: Scorer) -> dict[str, float]:
    """What the process holds where it computes, by name."""
    found = {
        "weights": model.parameters * scorer.weight_bytes,
        "adapters": float(model.adapters * scorer.compute_bytes),
        "caches": float(scorer.decodes * cached_width(model, scorer.longest) * scorer.compute_bytes),
        "reading": float(scorer.reads * scorer.longest["source"] * _of_a_layer(model) * scorer.compute_bytes),
        "logits": float(scorer.decodes * model.vocabulary * scorer.compute_bytes),
    }
    return {
        **found,
        "process" if scorer.device == "CPUs" else "context": PROCESS if scorer.device == "CPUs" else CONTEXT,
    }


def cached_width(model: Model, longest: Mapping[str, int]) -> int:
    """Numbers in the keys and values of one row with so many positions on each side."""
    decoder = "target" if any(one.side == "target" for one in model.linears) else "source"
    return sum(width * longest[side] for side, width in _caches(model, decoder))


def _caches(model: Model, decoder: str) -> Iterator[tuple[str, int]]:
    for one in model.linears:
        if one.side == decoder and one.role in ("attention.key", "attention.value"):
            yield decoder, one.outputs
        elif one.side == decoder and one.role == "attention.qkv":
            yield decoder, one.outputs * 2 // 3
        elif one.side == decoder and one.keys not in ("", decoder):  # what it reads of the encoder
            yield one.keys, 2 * one.outputs


def _of_a_layer(model: Model) -> int:
    """Numbers at one position: the residual stream and its norm in float32, the block's inner width three times."""
    inner = [one for one in model.linears if one.role == "ffn.in"]
    if not inner:
        return 0
    width, wide = max(one.inputs for one in inner), max(one.outputs for one in inner)
    return 4 * width + 3 * wide


def with_scoring(
    gpu: dict[str, float], host: dict[str, float], scorer: Scorer, found: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """A worker's GPU and a node's memory with the process beside them; on a GPU of its own only the process counts."""
    total = sum(found.values())
    if scorer.device == "a worker's GPU":
        gpu = {**gpu, "scoring": total, "peak": gpu["peak"] + total}
    beside = total if scorer.device == "CPUs" else PROCESS
    return gpu, {**host, **{name: host[name] + beside for name in ("loading", "training")}, "scoring": beside}
