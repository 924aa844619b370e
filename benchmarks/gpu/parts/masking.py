"""MIGU's training step at T5 large and a 1B LLaMA: plain, masked dense and row-sparse, full fine-tuning and LoRA.

The steps are those of `benchmarks.migu`, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Figure
from benchmarks.gpu.models import FIRST_WORD, decoder, encoder_decoder
from benchmarks.gpu.setup import TOLERANCE, Case, Setup, check_close, check_equal, ratio
from benchmarks.migu import CONTENDERS, LIMITS, Twin, text_batch
from raycl.backbone import Backbone
from raycl.methods.migu.migu import FIRST, MEASURED
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Batch

MODELS: dict[str, tuple[Callable[[Setup], Backbone], tuple[int, int, int]]] = {
    "T5 large": (encoder_decoder, (32, 512, 8)),
    "LLaMA 1B": (partial(decoder, name="1B"), (8, 512, 64)),
}
"""Model -> what makes it, and the rows, tokens and answer tokens of a batch."""
TINY_BATCH = (4, 12, 3)
SEED = 1
"""The seed of a step whose gradients are not measured for the report; those of seed `MEASURED` are, in all rows."""


def cases(setup: Setup) -> Iterator[Case]:
    """Full fine-tuning first: there the most can be saved."""
    for method in LIMITS:
        for model in MODELS:
            yield Case(f"{model}, {method}", partial(_figures, setup, model, method))


def _figures(setup: Setup, model: str, method: str, seconds: float) -> Iterator[Figure]:
    make, sizes = MODELS[model]
    rows, tokens, targets = TINY_BATCH if setup.tiny else sizes
    world = DistributedContext.alone(setup.device)
    twins = {name: Twin(make(setup), method, migu, world) for name, migu in CONTENDERS.items()}
    words = (FIRST_WORD, twins["plain"].method.backbone.codec.vocabulary)
    batch = text_batch(rows, tokens, targets, 0, words).to(setup.device)
    for _ in range(FIRST + 1):  # the steps that a task begins with are whole
        for twin in twins.values():
            twin.step(batch, SEED)
    _check_gradients(setup, f"{model}, {method}", twins["row-sparse"], batch)
    times = setup.turns({name: partial(twin.step, batch, SEED) for name, twin in twins.items()}, seconds)
    detail = f"{rows} x {tokens} tokens"
    for name in list(CONTENDERS)[1:]:
        target = LIMITS[method] if name == "row-sparse" else None
        yield ratio(f"{model}, {method}: {name} over plain", times[name], times["plain"], target, detail)


def _check_gradients(setup: Setup, what: str, twin: Twin, batch: Batch) -> None:
    """Row-sparse gradients are those of a step that computes all rows and then masks them; masked rows are zero."""
    gradients = twin.gradients(batch, SEED)
    masks = {name: None if (mask := twin.modifiers.masked(name)) is None else mask.clone() for name in gradients}
    expected = twin.gradients(batch, MEASURED)
    for name, gradient in gradients.items():
        check_close(f"{what}, gradient of {name}", gradient, expected[name], TOLERANCE[setup.dtype])
        mask = masks[name]
        if mask is not None:
            check_equal(f"{what}, gradient in masked rows of {name}", bool((gradient * mask).any()), False)
