"""Does the device give the CPU's results? Kernels, mixtures, decoding behind the serving engine, routing.

Every figure is the largest difference as a share of its tolerance, so 1 is the target of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import Figure
from benchmarks.gpu.adapters import SCALE, dense, drawn_adapters, loaded, one_each
from benchmarks.gpu.battery import KINDS
from benchmarks.gpu.parts.serving import Request, answered
from benchmarks.gpu.setup import Case, Setup, check_equal
from benchmarks.serving.banks import drawn_router
from raycl.adapters import AdapterStack
from raycl.adapters.rows import StaticRows
from raycl.backbone import Backbone
from raycl.backbone.load import wrap_model
from raycl.kernels.magnitude import summed_magnitude
from raycl.kernels.row_gradient import WeightRows, adamw_rows, rows_of, weight_gradient, widens
from raycl.routing.attention import Attention, AttentionConfig, AttentionRouter
from raycl.routing.slots import KINDS as ROUTERS
from raycl.serve.engine.multi_snapshot_model import MultiSnapshotModel
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.testing.tiny_models import tiny_model, word_tokenizer
from raycl.types import Mixture

CPU = torch.device("cpu")
TARGETS = ("attention", "ffn")
WORDS = tuple(f"w{number}" for number in range(60))
ROWS, TOKENS, ADAPTERS, RANK, TASKS, SPECIAL = 6, 12, 5, 4, 12, 3
EXACT, ROUGH, ROUTING = 1e-4, 0.15, 1e-3
"""Tolerances of values and gradients of a model, as shares of the largest: in float32, and in bfloat16 (whose rounding
alone makes 0.06 in a T5, measured on a CPU); and of routing weights."""

Results = dict[str, Tensor]


def cases(setup: Setup) -> Iterator[Case]:
    """Yield the cases from the smallest to the largest."""
    yield Case("kernels", partial(_same, setup, "kernels", _kernels, EXACT))
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            work = partial(_mixtures, kind=kind, dtype=dtype)
            name = f"mixtures, {str(dtype).removeprefix('torch.')}, {kind}"
            yield Case(name, partial(_same, setup, name, work, EXACT if dtype == torch.float32 else ROUGH))
    for kind, static_cache in (("llama", True), ("llama", False), ("t5", False)):
        caches = "static caches, graphs" if static_cache else "dynamic caches"
        yield Case(f"decoding, {kind}, {caches}", partial(_decoding, setup, kind, static_cache, caches))
    yield Case("routing", partial(_same, setup, "routing", _routing, ROUTING))


def _same(
    setup: Setup, name: str, work: Callable[[torch.device], Results], tolerance: float, seconds: float
) -> Iterator[Figure]:
    """Yield the same work on both devices."""
    expected, result = work(CPU), work(setup.device)
    shares = {what: _difference(value, expected[what]) for what, value in result.items()}
    worst = max(shares, key=lambda what: shares[what])
    detail = f"the worst of {len(shares)} is {worst}: {shares[worst]:.2g} of {tolerance:g}"
    yield Figure(f"{name}: difference to the CPU", shares[worst] / tolerance, "x", 1.0, "<=", detail)


def _difference(result: Tensor, expected: Tensor) -> float:
    """Return the largest one, as a share of the largest value; infinite where shapes or values make none."""
    if result.shape != expected.shape or not bool(torch.isfinite(result).all()):
        return float("inf")
    apart = (result.detach().float().cpu() - expected.detach().float()).abs().max()
    return float(apart / expected.detach().float().abs().max().clamp(min=1e-6))


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _kernels(device: torch.device) -> Results:
    """Return what has a path of its own on CUDA, or writes rows in place."""
    draw = torch.Generator().manual_seed(0)
    y_NO, g_NO, x_ND = (torch.randn(50, width, generator=draw).to(device) for width in (33, 33, 20))
    weight_N = (torch.rand(50, generator=draw) > 0.3).float().to(device)
    rows = torch.tensor([1, 4, 5, 17, 32], device=device)
    parameter = torch.randn(33, 20, generator=draw).to(device)
    moments = (torch.zeros_like(parameter), torch.zeros_like(parameter))
    kept_2O = torch.zeros(2, 33, dtype=torch.bool, device=device)
    kept_2O[0, rows] = kept_2O[1, :8] = True
    five, eight = rows_of(kept_2O)
    parameter.grad = weight_gradient(g_NO, x_ND, five)
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    adamw_rows(parameter, moments, rows, 0, 1, group)
    return {
        "magnitudes": summed_magnitude(y_NO, weight_N),
        "magnitudes without padding": summed_magnitude(y_NO),
        "gradient of chosen rows": parameter.grad,
        "gradient of eight rows": weight_gradient(g_NO, x_ND, eight),
        "gradient from 16 bits": _gradient_from_16_bits(g_NO, x_ND, eight),
        "AdamW of chosen rows": parameter,
        "its first moment": moments[0],
        "its second moment": moments[1],
    }


def _gradient_from_16_bits(g_NO: Tensor, x_ND: Tensor, rows: WeightRows) -> Tensor:
    """Check gradients in float32, in which they are summed, where the device supports it."""
    g16_NO, x16_ND = g_NO.bfloat16(), x_ND.bfloat16()
    if not widens(x16_ND, torch.float32):
        g16_NO, x16_ND = g16_NO.float(), x16_ND.float()
    return weight_gradient(g16_NO, x16_ND, rows, dtype=torch.float32)


# ---- mixtures --------------------------------------------------------------------------------------------------------


def _model(kind: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model(kind, len(word_tokenizer(kind, WORDS)), positions=2 * TOKENS).to(device, dtype).eval()


def _states(kind: str, model: Any, device: torch.device) -> Tensor:
    """Return the last hidden states or logits for drawn ids."""
    ids_BL = torch.randint(8, 60, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    if kind == "bert":
        states: Tensor = model(input_ids=ids_BL).last_hidden_state
    elif kind == "t5":
        states = model(input_ids=ids_BL, decoder_input_ids=ids_BL[:, :4]).logits
    else:
        states = model(input_ids=ids_BL).logits
    return states


def _mixtures(device: torch.device, kind: str, dtype: torch.dtype) -> Results:
    """Return every form of the mixture layer; and gradients of adapters in training and of weights, beside frozen
    adapters."""
    model = _model(kind, device, dtype)
    adapters = drawn_adapters(model, TARGETS, ADAPTERS, RANK)
    stack = AdapterStack(model, list(next(iter(adapters.values())).linears), rows=(ADAPTERS + 1) * RANK)
    for name, state in adapters.items():
        stack.load(name, state)
    results: Results = {}
    mixtures = {"dense": dense(tuple(adapters), ROWS), "one each": one_each(tuple(adapters), ROWS)}
    with torch.no_grad():
        results["bare"] = _states(kind, model, device)
        for name, mixture in mixtures.items():
            with stack.activate(mixture.on(device)):
                results[name] = _states(kind, model, device)
        room = StaticRows(stack.pool, ADAPTERS * RANK, ROWS)
        for name, mixture in mixtures.items():
            with stack.activate(mixture, static=room):
                results[f"{name}, static"] = _states(kind, model, device)
    return results | _gradients(kind, model, stack, device)


def _gradients(kind: str, model: Any, stack: AdapterStack, device: torch.device) -> Results:
    model.requires_grad_(False)
    torch.manual_seed(0)
    stack.begin_training({"new": RANK}, 1.0, _draw_a)
    draw = torch.Generator().manual_seed(2)
    for layer in stack.layers.values():
        assert layer.lora_B is not None
        layer.lora_B.data = (SCALE * torch.randn(layer.lora_B.shape, generator=draw)).to(layer.lora_B)
    weights_BN = torch.rand(ROWS, 3, generator=draw).to(device).requires_grad_()
    with stack.activate(Mixture(("new", "a0", "a1"), weights_BN)):
        states = _states(kind, model, device).float()
        probe = torch.randn(states.shape, generator=draw).to(device)  # a plain mean of normalised states hardly changes
        (states * probe).mean().backward()  # type: ignore[no-untyped-call]
    gradients: Results = {}
    assert weights_BN.grad is not None
    gradients["gradient of the weights"] = weights_BN.grad
    path, layer = next(iter(stack.layers.items()))
    for what, parameter in (("A", layer.lora_A), ("B", layer.lora_B)):
        assert parameter is not None and parameter.grad is not None
        gradients[f"gradient of {what} of {path}"] = parameter.grad
    return gradients


def _draw_a(low_RD: Tensor, outputs: int) -> None:
    torch.nn.init.normal_(low_RD, std=SCALE)


# ---- decoding --------------------------------------------------------------------------------------------------------


def _backbone(kind: str, device: torch.device) -> Backbone:
    model, words = _model(kind, device), word_tokenizer(kind, WORDS)
    with torch.no_grad():
        model.get_output_embeddings().weight[:SPECIAL] = 0  # else a T5 of drawn weights generates padding only
    return wrap_model(model, words, 32, 16)


def _decoding(setup: Setup, kind: str, static_cache: bool, caches: str, seconds: float) -> Iterator[Figure]:
    """More requests than rows, of unlike lengths, so that they join and leave; each with a mixture of its own."""
    expected = _texts(_backbone(kind, CPU), False)
    texts = _texts(_backbone(kind, setup.device), static_cache)
    unlike = sum(mine != its for mine, its in zip(texts, expected, strict=True))
    detail = f"of {len(expected)} answers, from {min(map(len, expected))} to {max(map(len, expected))} characters"
    yield Figure(
        f"decoding, {kind}, {caches}: answers that differ from the CPU's", float(unlike), "", 0.0, "<=", detail
    )


def _texts(backbone: Backbone, static_cache: bool) -> list[str]:
    snapshot, device = loaded(drawn_adapters(backbone.model, TARGETS, ADAPTERS, RANK)), backbone.device
    mixture = dense(list(snapshot.keys), 3 * ROWS)
    requests = [
        Request(
            " ".join(WORDS[(5 * number + index) % len(WORDS)] for index in range(2 + number % 7)),
            dict(zip(mixture.names, row, strict=True)),
            3 + number % 10,
        )
        for number, row in enumerate(mixture.weights.tolist())
    ]
    with ExitStack() as stack:
        engine = ServingEngine(MultiSnapshotModel(backbone, ADAPTERS * RANK), ROWS, 32, 16, static_cache=static_cache)
        stack.callback(engine.close)
        engine.load_snapshot(snapshot)
        texts = [answer.text for answer in answered(engine, snapshot, requests)]
        check_equal("device of the model", backbone.device, device)
        check_equal("steps were captured", engine.captures > 0, static_cache and device.type == "cuda")
        return texts


# ---- routing ---------------------------------------------------------------------------------------------------------


def _routing(device: torch.device) -> Results:
    """Return keys and discriminant, with and without the task given, and SAPT's attention; `routing` checks many
    tasks."""
    routing: Results = {}
    router, _, texts = drawn_router(TASKS, 4, 6, 2)
    queries = texts[:ROWS].to(device)
    for kind in ROUTERS:
        router.kind = kind
        routing[kind] = _spread(router.route(queries), TASKS, 4)
    routing["task given"] = _spread(router.route(queries, ["t1", "t3"] * (ROWS // 2)), TASKS, 4)
    attention = Attention(32, AttentionConfig(), 0).requires_grad_(False)
    draw = torch.Generator().manual_seed(3)
    attention.keys = {f"t{number}": torch.randn(32, generator=draw) for number in range(20)}
    embeddings = torch.randn(ROWS, TOKENS, 32, generator=draw)
    attention.look_at(embeddings.amax(1))
    mask = (torch.arange(TOKENS) < torch.randint(3, TOKENS, (ROWS, 1), generator=draw)).long()
    read = AttentionRouter(attention).route_embeddings(embeddings.to(device), mask.to(device))
    routing["attention"] = _spread(read, 20, 0)
    return routing


def _spread(mixture: Mixture, tasks: int, slots: int) -> Tensor:
    """Return `[B, N]` over all adapters, since mixtures leave out those with no weight."""
    names = [f"t{task}.{slot}" if slots else f"t{task}" for task in range(tasks) for slot in range(slots or 1)]
    places = {name: index for index, name in enumerate(names)}
    whole = torch.zeros(len(mixture.weights), len(names))
    whole[:, [places[name] for name in mixture.names]] = mixture.weights.detach().float().cpu()
    return whole
