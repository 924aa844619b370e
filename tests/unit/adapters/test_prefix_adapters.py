"""Prefixes: learned keys and values at every attention layer, with a softmax of their own (LLaMA-Adapter)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from test_stack import IDS, logits, made
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.adapters.formula import attend
from raycl.adapters.rows import StaticRows
from raycl.adapters.state import combine, fold
from raycl.backbone.roles import linear_names, query_of
from raycl.errors import AdapterError, BackboneError
from raycl.types import AdapterState, Mixture

KINDS = ("bert", "t5", "llama", "gqa")
LENGTHS = {"a": 2, "b": 3, "c": 1}
WEIGHTS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.4, 0.5, 0.0]])


def random_prefix(stack: AdapterStack, length: int, seed: int) -> AdapterState:
    draw = torch.Generator().manual_seed(seed)
    pairs = {
        path: (
            torch.randn(length, layer.inputs, generator=draw) * 0.3,
            torch.randn(layer.inputs, length, generator=draw) * 0.3,
        )
        for path, layer in stack.layers.items()
    }
    return AdapterState(pairs, 1.0, activation="softmax")


def stacked(kind: str) -> tuple[Any, AdapterStack, dict[str, AdapterState]]:
    backbone = made(kind)
    stack = AdapterStack(backbone, linear_names(backbone, ["attention.out"]), activation="softmax", query_of=query_of)
    states = {name: random_prefix(stack, length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}
    for name, held in states.items():
        stack.load(name, held)
    return backbone, stack, states


def head_by_head(q: Tensor, keys: Tensor, values: Tensor, weights: list[float], heads: int, scaling: float) -> Tensor:
    """Return what one example's tokens `[T, D]` add, written out for each head and token (LLaMA-Adapter, eq. 4 to 6; a
    weight w in the softmax is w positions of the same key and value)."""
    width = q.shape[-1] // heads
    zeros = torch.zeros_like(q)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for token in range(len(q)):
            scores = [math.exp(scaling * float(q[token, part] @ key[part])) for key in keys]
            shares = [weight * score for weight, score in zip(weights, scores, strict=True)]
            for share, value in zip(shares, values, strict=True):
                zeros[token, part] += share / sum(shares) * value[part]
    return zeros


def test_the_formula_in_each_head() -> None:
    torch.manual_seed(0)
    q, keys, values = torch.randn(3, 4, 6), torch.randn(5, 6), torch.randn(5, 6)
    gate = torch.tensor([[1.0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0.3, 0, 2.0, 0, 0]])
    result = attend(q, keys, values, gate, heads=2, scaling=0.7)
    for row in (0, 2):
        used = gate[row].nonzero().flatten()
        expected = head_by_head(q[row], keys[used], values[used], gate[row, used].tolist(), 2, 0.7)
        torch.testing.assert_close(result[row], expected)
    assert not result[1].any()
    own = attend(q, keys.expand(3, 5, 6), values.expand(3, 5, 6), gate, heads=2, scaling=0.7)
    torch.testing.assert_close(own, result)


def test_gradients_are_exact_and_finite_for_examples_without_prefixes() -> None:
    torch.manual_seed(0)
    q, keys, values = (torch.randn(*shape, dtype=torch.double) for shape in ((2, 3, 4), (3, 4), (3, 4)))
    gate = torch.tensor([[1.0, 0.5, 0.2], [0.9, 0.3, 0.6]], dtype=torch.double)
    inputs = [item.requires_grad_() for item in (q, keys, values, gate)]
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, heads=2, scaling=0.5), inputs)
    closed = torch.zeros(2, 3, dtype=torch.double)
    attend(q, keys, values, closed, heads=2, scaling=0.5).sum().backward()
    assert all(item.grad is not None and bool(torch.isfinite(item.grad).all()) for item in (q, keys, values))


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_adds_attention_to_what_its_projection_reads(kind: str) -> None:
    """Against hooks that compute the prefixes of one example by the formula from the layer's own queries."""
    backbone, stack, states = stacked(kind)
    with torch.no_grad(), stack.activate(Mixture(tuple(LENGTHS), WEIGHTS)):
        result = logits(backbone)
    for row, weights in enumerate(WEIGHTS.tolist()):
        plain = made(kind)
        heads = plain.config.num_attention_heads
        for path in stack.layers:
            query = query_of(plain, path)
            scaling = plain.get_submodule(query.rpartition(".")[0]).scaling
            assert scaling == (1.0 if kind == "t5" else (stack.layers[path].inputs // heads) ** -0.5)
            kept: list[Tensor] = []
            plain.get_submodule(query).register_forward_hook(lambda m, a, output, kept=kept: kept.append(output))

            used = {name: weight for name, weight in zip(LENGTHS, weights, strict=True) if weight}
            if not used:
                continue
            pairs = [states[name].linears[path] for name in used]
            keys, values = torch.cat([a for a, _ in pairs]), torch.cat([b.T for _, b in pairs])
            each = [weight for name, weight in used.items() for _ in range(LENGTHS[name])]
            expected = partial(head_by_head, keys=keys, values=values, weights=each, heads=heads, scaling=scaling)
            plain.get_submodule(path).register_forward_pre_hook(
                lambda m, args, kept=kept, expected=expected: (args[0] + expected(kept[-1][0])[None],)
            )
        with torch.no_grad():
            torch.testing.assert_close(result[row : row + 1], logits(plain, IDS[row : row + 1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_active_prefixes_the_backbone_is_unchanged(kind: str) -> None:
    backbone, stack, _ = stacked(kind)
    with torch.no_grad():
        bare = logits(made(kind))
        assert torch.equal(logits(backbone), bare)
        with stack.activate(Mixture(tuple(LENGTHS), torch.zeros(4, 3))):
            assert torch.equal(logits(backbone), bare)
        with stack.activate(Mixture(tuple(LENGTHS), WEIGHTS)):
            assert torch.equal(logits(backbone)[2], bare[2]), "a row without prefixes beside others"
        stack.begin_training({"new": 2}, 1.0, lambda low, outputs: nn.init.normal_(low))
        with stack.activate(Mixture(("new",), torch.ones(4, 1))):
            assert torch.equal(logits(backbone), bare), "values are zero at first"
        stack.detach()
        assert torch.equal(logits(backbone), bare)
        assert not backbone.get_submodule(query_of(backbone, next(iter(stack.layers))))._forward_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_running_gives_the_same(kind: str) -> None:
    """Loaded, each example's own, in training, partly in training, at fixed addresses, and recomputed."""
    backbone, stack, states = stacked(kind)
    mixture = Mixture(tuple(LENGTHS), WEIGHTS)
    with torch.no_grad(), stack.activate(mixture):
        expected = logits(backbone)
    for seed, name in enumerate(extra := tuple(f"n{number}" for number in range(6))):
        stack.load(name, random_prefix(stack, 2, 10 + seed))
    wide = Mixture((*LENGTHS, *extra), torch.cat([WEIGHTS, torch.zeros(4, 6)], dim=1))
    one_of_many = Mixture(wide.names, torch.eye(9)[[1, 3, 4, 5]])
    with torch.no_grad(), stack.activate(one_of_many):
        assert stack.plan is not None and stack.plan.own is not None
        own = logits(backbone)
        stack.plan.own = None
        torch.testing.assert_close(logits(backbone), own, atol=1e-5, rtol=1e-5)
    room = StaticRows(stack.pool, rows=8, sequences=4)
    with torch.no_grad(), stack.activate(mixture, static=room):
        torch.testing.assert_close(logits(backbone), expected, atol=1e-5, rtol=1e-5)
    stack.drop("b")
    stack.begin_training({"b": LENGTHS["b"]}, 1.0, lambda low, outputs: None)
    stack.fill({"b": states["b"]})
    with stack.activate(mixture):
        result = logits(backbone)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        result.sum().backward()
    trained = [item for layer in stack.layers.values() for item in (layer.lora_A, layer.lora_B)]
    gradients = [item.grad.clone() for item in trained]  # type: ignore[union-attr]
    assert all(bool(gradient.any()) for gradient in gradients)
    for parameter in backbone.parameters():
        parameter.grad = None
    backbone.train()
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    backbone.gradient_checkpointing_enable({"use_reentrant": False})
    with stack.activate(mixture):
        logits(backbone).sum().backward()
    for item, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(item.grad, gradient, atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_generation_attends_at_every_step(kind: str) -> None:
    """With a cache the new token alone has queries."""
    backbone, stack, _ = stacked(kind)
    collected = []
    for cache in (True, False):
        with stack.activate(Mixture(tuple(LENGTHS), WEIGHTS)):
            collected.append(backbone.generate(input_ids=IDS, max_new_tokens=4, use_cache=cache))
    assert torch.equal(*collected)


def test_compiled_once_for_all_mixtures() -> None:
    """All layers are alike to the compiler, which takes long for each: one is enough."""
    backbone, stack, _ = stacked("shallow")
    room = StaticRows(stack.pool, rows=8, sequences=4)
    torch.compiler.reset()
    compiled = torch.compile(backbone, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        with stack.activate(Mixture(tuple(LENGTHS), WEIGHTS), static=room):
            first = compiled(input_ids=IDS).logits
            torch.testing.assert_close(first, logits(backbone), atol=1e-5, rtol=1e-4)
        mixture = Mixture(("b",), torch.ones(4, 1))
        with torch.compiler.set_stance("fail_on_recompile"), stack.activate(mixture, static=room):
            second = compiled(input_ids=IDS).logits
    assert not torch.allclose(first, second)


def test_a_stack_takes_the_kind_of_the_adapters_that_are_served() -> None:
    backbone, stack, _ = stacked("t5")
    expected = random_prefix(stack, 2, 3)
    twin = made("t5")
    plain = AdapterStack(twin, linear_names(twin, ["attention.out"]), query_of=query_of)
    plain.use("softmax")
    plain.load("x", expected)
    stack.load("x", expected)
    with torch.no_grad(), stack.activate(Mixture.same({"x": 1.0}, 4)), plain.activate(Mixture.same({"x": 1.0}, 4)):
        assert torch.equal(logits(backbone), logits(twin))
    plain.drop("x")
    plain.use("")
    with torch.no_grad():
        assert torch.equal(logits(twin), logits(made("t5")))


def test_what_is_no_weight_is_not_folded_or_combined() -> None:
    backbone, _, states = stacked("bert")
    for call in (lambda: combine({"a": 1.0}, states), lambda: fold(backbone, states["a"])):
        with pytest.raises(AdapterError, match="has activation 'softmax' between A and B"):
            call()


def test_layers_without_queries_of_their_own_are_refused() -> None:
    for kind, role, said in (
        ("gpt2", "attention.out", "transformer.h.0.attn.c_proj"),
        ("bert", "ffn.out", "output.dense"),
    ):
        model = made(kind)
        with pytest.raises(BackboneError, match=f"{said}' is not the output projection .* needs both"):
            AdapterStack(model, linear_names(model, [role])[:1], activation="softmax", query_of=query_of)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "gqa"])
def test_equals_pefts_llama_adapter(kind: str) -> None:
    """Keys are its projected prompt, values are that times its gate. All tokens stand at position 0, where rotating the
    queries changes nothing: the released code attends with rotated queries, which here know no position."""
    from peft import AdaptionPromptConfig, get_peft_model

    peer = get_peft_model(made(kind), AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"))
    backbone = made(kind)
    heads = backbone.config.num_attention_heads
    torch.manual_seed(0)
    linears = {}
    positions = torch.zeros_like(IDS)
    with torch.no_grad():
        for number, path in enumerate(linear_names(backbone, ["attention.out"])):
            attention = peer.get_submodule(f"base_model.model.model.layers.{number}.self_attn")
            attention.adaption_prompt.normal_()
            attention.adaption_gate.fill_(0.4 + number)
            plain = backbone.get_submodule(path.rpartition(".")[0])
            keys, values = (
                item(attention.adaption_prompt[0])
                .view(3, -1, plain.head_dim)
                .repeat_interleave(groups, dim=1)
                .flatten(1)
                for item in (plain.k_proj, plain.v_proj)
                for groups in (heads // (item.out_features // plain.head_dim),)
            )
            linears[path] = (keys, (values * attention.adaption_gate).T)
        expected = peer(input_ids=IDS, position_ids=positions).logits
        stack = AdapterStack(backbone, list(linears), activation="softmax", query_of=query_of)
        stack.load("x", AdapterState(linears, activation="softmax"))
        with stack.activate(Mixture.same({"x": 1.0}, len(IDS))):
            result = backbone(input_ids=IDS, position_ids=positions).logits
    assert not torch.allclose(expected, made(kind)(input_ids=IDS, position_ids=positions).logits, atol=1e-2)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
