"""The one formula on real architectures: exact, per example, open until backward ends, under every way of running."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from axes import FULL, sampled
from tiny import tokenizer
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.adapters.rows import StaticRows
from raycl.adapters.state import combine, fold
from raycl.backbone.roles import linear_names
from raycl.errors import AdapterError
from raycl.testing.tiny_models import tiny_model
from raycl.types import Activation, AdapterState, Mixture

KINDS = ("bert", "t5", "llama", "gpt2", "gqa")
ALL = {"gpt2": ("attention.qkv", "attention.out", "ffn"), "gqa": ("attention", "ffn")}
RANKS = {"a": 2, "b": 3, "c": 1}
MEMORY = "self(top_k=3,temperature=0.1,threshold=0.1)"
each_activation = pytest.mark.parametrize("activation", ["", "relu", MEMORY], ids=["none", "relu", "memory"])
each_elementwise = pytest.mark.parametrize("activation", ["", "relu"], ids=["none", "relu"])


def made(kind: str) -> Any:
    """Return a model of its own, in evaluation mode, with the same weights every time."""
    return copy.deepcopy(_made(kind))


@cache
def _made(kind: str) -> Any:
    """`gqa` is a LLaMA whose keys and values are narrower than its states, `shallow` one with a single layer."""
    if kind == "shallow":
        model = made("llama")
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        return model
    words = len(tokenizer("llama" if kind == "gqa" else kind))
    if kind != "gqa":
        return tiny_model(kind, words).eval()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, num_key_value_heads=2, **sizes, **special)).eval()


def state(stack: AdapterStack, rank: int, seed: int, scale: float = 2.0) -> AdapterState:
    """Return a random adapter over all linears of the stack."""
    draw = torch.Generator().manual_seed(seed)
    pairs = {
        path: (
            torch.randn(rank, layer.inputs, generator=draw) * 0.3,
            torch.randn(layer.outputs, rank, generator=draw) * 0.3,
        )
        for path, layer in stack.layers.items()
    }
    return AdapterState(pairs, scale, activation=stack.activation)


def stacked(kind: str, activation: Activation = "") -> tuple[Any, AdapterStack, dict[str, AdapterState]]:
    """Return a model with three adapters of different ranks on all its linears."""
    backbone = made(kind)
    stack = AdapterStack(backbone, linear_names(backbone, ALL.get(kind, ("attention", "ffn"))), activation=activation)
    states = {name: state(stack, rank, seed) for seed, (name, rank) in enumerate(RANKS.items())}
    for name, held in states.items():
        stack.load(name, held)
    return backbone, stack, states


IDS = torch.tensor([[4, 5, 6, 7, 8, 9], [5, 4, 9, 9, 6, 7], [8, 8, 7, 5, 4, 4], [6, 7, 4, 8, 5, 9]])
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-0.4, 0.0, 1.3]])


def logits(backbone: Any, ids: Tensor = IDS) -> Tensor:
    """Return outputs of a forward pass: hidden states of an encoder, logits of others."""
    if backbone.config.is_encoder_decoder:
        return backbone(input_ids=ids, labels=ids).logits  # type: ignore[no-any-return]
    result = backbone(input_ids=ids)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state  # type: ignore[no-any-return]


def mixture(weights: Tensor = WEIGHTS) -> Mixture:
    return Mixture(tuple(RANKS), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_equals_its_merged_model(kind: str) -> None:
    backbone, stack, states = stacked(kind)
    with torch.no_grad(), stack.activate(mixture()):
        result = logits(backbone)
    for row, weights in enumerate(WEIGHTS.tolist()):
        plain = made(kind)
        fold(plain, combine(dict(zip(RANKS, weights, strict=True)), states))
        with torch.no_grad():
            torch.testing.assert_close(result[row : row + 1], logits(plain, IDS[row : row + 1]), atol=1e-4, rtol=1e-4)


@each_activation
@pytest.mark.parametrize("kind", KINDS)
def test_without_active_adapters_the_backbone_is_unchanged(kind: str, activation: Activation) -> None:
    backbone, stack, _ = stacked(kind, activation)
    with torch.no_grad():
        bare = logits(made(kind))
        assert torch.equal(logits(backbone), bare), "no mixture open"
        with stack.activate(None):
            assert torch.equal(logits(backbone), bare)
        with stack.activate(mixture(torch.zeros(4, 3))):
            assert torch.equal(logits(backbone), bare)
        with stack.activate(mixture()):
            assert torch.equal(logits(backbone)[2], bare[2]), "a zero row beside rows that speak"
            assert not torch.allclose(logits(backbone)[0], bare[0], atol=1e-3)
        stack.begin_training({"new": 2}, 1.0, lambda low, outputs: nn.init.normal_(low))
        with stack.activate(Mixture(("new",), torch.ones(4, 1))):
            assert torch.equal(logits(backbone), bare), "fresh adapters say nothing"
        stack.detach()
        assert torch.equal(logits(backbone), bare)


@each_activation
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_a_batch(kind: str, activation: Activation) -> None:
    backbone, stack, _ = stacked(kind, activation)
    with torch.no_grad(), stack.activate(mixture()):
        together = logits(backbone)
    for row in range(4):
        with torch.no_grad(), stack.activate(mixture(WEIGHTS[row : row + 1])):
            torch.testing.assert_close(logits(backbone, IDS[row : row + 1])[0], together[row], atol=1e-5, rtol=1e-4)


@each_activation
def test_both_kernels_give_the_same_result(activation: Activation) -> None:
    """Many adapters of which each example uses one: its own rows; the dense gate must agree."""
    backbone = made("bert")
    stack = AdapterStack(backbone, linear_names(backbone, ["attention"]), activation=activation)
    names = tuple(f"n{number}" for number in range(8))
    for seed, name in enumerate(names):
        stack.load(name, state(stack, 2, seed))
    ids = IDS.repeat(1, 2)
    sparse = torch.eye(8)[[3, 0, 7, 5]]
    with torch.no_grad(), stack.activate(Mixture(names, sparse)):
        assert stack.plan is not None and stack.plan.own is not None
        own = logits(backbone, ids)
        stack.plan.own = None
        torch.testing.assert_close(logits(backbone, ids), own, atol=1e-5, rtol=1e-5)


@each_elementwise
def test_gradients_are_exact(activation: Activation) -> None:
    """Gradients reach live adapters, the weights and x, and no resident adapters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5)).double()
    stack = AdapterStack(net, ["0"], activation=activation)
    stack.load("old", AdapterState({"0": (torch.randn(2, 6), torch.randn(5, 2))}, 0.7, activation=activation))
    stack.begin_training({"x": 1, "y": 2}, 1.5, lambda low, outputs: nn.init.normal_(low))
    layer = stack.layers["0"]
    assert layer.lora_A is not None and layer.lora_B is not None
    nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 4, 6, dtype=torch.double, requires_grad=True)
    weights = torch.rand(3, 3, dtype=torch.double)
    weights[1] = 0.0
    weights.requires_grad_()

    def run(x: Tensor, weights: Tensor, a: Tensor, b: Tensor) -> Tensor:
        layer.lora_A.data, layer.lora_B.data = a, b  # type: ignore[union-attr]
        with stack.activate(Mixture(("old", "x", "y"), weights)):
            return torch.func.functional_call(net, {"0.lora_A": a, "0.lora_B": b}, (x,))

    a, b = layer.lora_A.detach().clone().requires_grad_(), layer.lora_B.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weights, a, b))


@pytest.mark.parametrize(
    ("kind", "reentrant", "activation"),
    sampled(
        [
            (kind, reentrant, activation)
            for activation in ("", "relu", MEMORY)
            for reentrant in (True, False)
            for kind in ("bert", "t5", "llama")
        ],
        needed=lambda case: (case[0], case[1:]),
    ),
)
def test_recomputation_gives_the_same_gradients(kind: str, reentrant: bool, activation: Activation) -> None:
    def gradients(checkpointing: bool) -> list[Tensor]:
        backbone, stack, _ = stacked(kind, activation)
        backbone.requires_grad_(False)
        torch.manual_seed(0)
        stack.begin_training({"new": 2}, 1.0, lambda low, outputs: nn.init.normal_(low))
        trainable = [p for layer in stack.layers.values() for p in (layer.lora_A, layer.lora_B) if p is not None]
        backbone.train()
        for module in backbone.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            older = backbone.gradient_checkpointing_enable  # its name in older transformers
            getattr(backbone, "activation_checkpointing_enable", older)({"use_reentrant": reentrant})
            backbone.enable_input_require_grads()
        with stack.activate(Mixture(("a", "new"), torch.rand(4, 2))):
            logits(backbone).square().mean().backward()
        return [p.grad for p in trainable if p.grad is not None]

    torch.manual_seed(1)
    plain = gradients(False)
    torch.manual_seed(1)
    again = gradients(True)
    assert len(plain) == len(again) > 0
    for mine, other in zip(again, plain, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", ["t5", "llama", "gpt2", "gqa"])
def test_generation_follows_the_mixture_of_each_prompt(kind: str, cache: bool) -> None:
    """Each prompt's tokens equal those of the model into which its mixture was merged."""
    backbone, stack, states = stacked(kind)
    how: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "use_cache": cache, "pad_token_id": 0}
    with stack.activate(mixture()):
        generated = backbone.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **how)
    for row, weights in enumerate(WEIGHTS.tolist()):
        plain = made(kind)
        fold(plain, combine(dict(zip(RANKS, weights, strict=True)), states))
        alone = plain.generate(input_ids=IDS[row : row + 1], attention_mask=torch.ones(1, 6), **how)
        assert torch.equal(generated[row : row + 1, : alone.shape[1]], alone)


def test_the_mixture_belongs_to_the_encoder_output() -> None:
    """Two requests encoded in turn, then decoded in turn: each under its own mixture (not so in SAPT's code)."""
    backbone, stack, _ = stacked("t5")
    first, second = mixture(WEIGHTS[:1]), mixture(WEIGHTS[1:2])
    encoded = []
    with torch.no_grad():
        for row, mine in enumerate((first, second)):
            with stack.activate(mine):
                encoded.append(backbone.encoder(input_ids=IDS[row : row + 1]))
        for row, mine in enumerate((first, second)):
            with stack.activate(mine):
                split = backbone(encoder_outputs=encoded[row], labels=IDS[row : row + 1]).logits
                whole = backbone(input_ids=IDS[row : row + 1], labels=IDS[row : row + 1]).logits
            torch.testing.assert_close(split, whole)


def test_adapters_that_are_loaded_later_give_the_same_bits_in_any_order_of_use() -> None:
    """As in a run that was resumed, rows are given out in the order of use, and sums are in the order of loading."""
    model, stack, states = stacked("bert")
    other, later, _ = stacked("bert")
    for name, held in states.items():
        later.drop(name)
        later.load(name, held, later=True)
    assert not later.table.rows
    ids = torch.arange(4, 12)[None]
    for names in (["c"], ["b"], ["c", "b"], ["a", "b", "c"]):
        mixture = Mixture.same(dict.fromkeys(names, 0.7), 1)
        with torch.no_grad(), stack.activate(mixture), later.activate(mixture):
            assert torch.equal(model(ids).last_hidden_state, other(ids).last_hidden_state), names
        assert {"c", *names} <= later.table.rows.keys()
    assert [later.table.rows[name][0] for name in "cba"] == sorted(rows[0] for rows in later.table.rows.values())
    later.load("d", states["a"], later=True)
    later.drop("d")
    later.load("d", AdapterState({"nowhere": (torch.ones(1, 2), torch.ones(2, 1))}), later=True)
    for _ in range(2):
        with pytest.raises(AdapterError, match="adapter 'd' adapts 'nowhere'"):
            later.need(["d"])


@pytest.mark.parametrize("activation", ["", MEMORY, *(["relu"] if FULL else [])])
def test_compiled_once_for_all_mixtures_and_for_adapters_learned_later(activation: Activation) -> None:
    """All layers are alike to the compiler, which takes long for each: one is enough."""
    backbone, stack, _states = stacked("shallow", activation)
    room = StaticRows(stack.pool, rows=8, sequences=4)
    torch.compiler.reset()
    compiled = torch.compile(backbone, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        with stack.activate(mixture(), static=room):
            first = compiled(input_ids=IDS).logits
        with torch.compiler.set_stance("fail_on_recompile"):
            with stack.activate(Mixture(("b",), torch.ones(4, 1)), static=room):
                second = compiled(input_ids=IDS).logits
            stack.drop("a")
            stack.load("later", state(stack, 4, 9))
            with stack.activate(Mixture(("later", "c"), torch.rand(4, 2)), static=room):
                third = compiled(input_ids=IDS).logits
            with stack.activate(None, static=room):
                bare = compiled(input_ids=IDS).logits
    plain, twin, _ = stacked("shallow", activation)
    with torch.no_grad(), twin.activate(mixture()):
        torch.testing.assert_close(first, logits(plain), atol=1e-5, rtol=1e-4)
    assert torch.equal(bare, logits(made("shallow")))
    assert not torch.allclose(second, third)
    with pytest.raises(AdapterError, match="room is 8 rows for 4"):
        stack.load("wide", state(stack, 9, 5))
        with stack.activate(Mixture(("wide",), torch.ones(4, 1)), static=room):
            pass


def test_a_bank_larger_than_the_device() -> None:
    """Least recently used adapters make room, pinned ones and those of the batch stay, memory does not grow."""
    backbone = made("bert")
    asked: list[str] = []
    stack = AdapterStack(backbone, linear_names(backbone, ["attention.query"]), rows=6)

    def source(name: str) -> AdapterState:
        asked.append(name)
        return state(stack, 2, int(name))

    stack.source = source
    held = stack.pool.bytes
    for number in range(50):
        with stack.activate(Mixture((str(number),), torch.ones(1, 1))):
            pass
    assert list(stack.states) == ["47", "48", "49"] and stack.pool.bytes == held and stack.table.evicted == 47
    stack.table.pin("47")
    with stack.activate(Mixture(("0", "49"), torch.ones(1, 2))):
        pass
    assert set(stack.states) == {"47", "49", "0"}, "48 was the only one that was neither held nor used"
    assert asked.count("49") == 1
    three = Mixture(("49", "0", "1"), torch.ones(1, 3))
    with pytest.raises(AdapterError, match=r"needs 2 rows.*leave 0 of 6"), stack.activate(three):
        pass


@pytest.mark.parametrize(
    ("weights", "names", "said"),
    [
        (torch.tensor([[float("nan")]]), ("a",), "not finite"),
        (torch.ones(1, 1), ("who",), "adapter 'who' is not loaded: expected some of a, b, c"),
    ],
)
def test_bad_mixtures_are_refused(weights: Tensor, names: tuple[str, ...], said: str) -> None:
    _, stack, _ = stacked("bert")
    with pytest.raises(AdapterError, match=said), stack.activate(Mixture(names, weights)):
        pass
    with stack.activate(None):
        pass


def test_adapters_that_do_not_fit_are_refused_by_name() -> None:
    _, stack, states = stacked("bert")
    path = next(iter(stack.layers))
    a, b = states["a"].linears[path]
    with pytest.raises(AdapterError, match=r"'wrong', .* maps 31 to 32 features"):
        stack.load("wrong", AdapterState({path: (a[:, 1:], b)}))
    with pytest.raises(AdapterError, match="adapts 'nowhere', which is not among"):
        stack.load("wrong", AdapterState({"nowhere": (a, b)}))
    with pytest.raises(AdapterError, match="not finite"):
        stack.load("wrong", AdapterState({path: (a * float("inf"), b)}))
    with pytest.raises(AdapterError, match="'wrong' has activation 'relu', but the adapters of this stack have 'none'"):
        stack.load("wrong", replace(states["a"], activation="relu"))
    with pytest.raises(AdapterError, match="on the device already"):
        stack.load("a", states["a"])
    assert set(stack.states) == set(RANKS)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("form", ["shared", "own", "trainable", "static"])
@each_elementwise
def test_every_kernel_equals_the_plain_sum(activation: Activation, form: str, recorded: bool) -> None:
    """`W h + sum_i w_i s B_i f(A_i h)` (SLM, eqs. 3 and 4; adapters have an f), whether or not autograd records it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5)).double()
    stack = AdapterStack(net, ["0"], activation=activation)
    layer = stack.layers["0"]
    blocks = {f"n{number}": (torch.randn(2, 6).double(), torch.randn(5, 2).double()) for number in range(8)}
    if form == "trainable":
        stack.begin_training(dict.fromkeys(blocks, 2), 1.5, lambda low, outputs: None)
        layer.lora_A = nn.Parameter(torch.cat([low for low, _ in blocks.values()]))
        layer.lora_B = nn.Parameter(torch.cat([high for _, high in blocks.values()], dim=1))
    else:
        for name, block in blocks.items():
            stack.load(name, AdapterState({"0": block}, 1.5, activation=activation))
    room = StaticRows(stack.pool, rows=18, sequences=4) if form == "static" else None
    x, weights = torch.randn(4, 8, 6).double(), torch.zeros(4, 8)
    for row, pair in enumerate(((0.7, -0.4), (0.5, 0.2), (0.0, 1.3), (0.3, 0.1))):
        weights[row, 2 * row : 2 * row + 2] = torch.tensor(pair)
    with torch.set_grad_enabled(recorded), stack.activate(Mixture(tuple(blocks), weights), static=room):
        assert stack.plan is not None and (stack.plan.own is not None) is (form in ("shared", "own"))
        stack.plan.own = stack.plan.own if form == "own" else None
        result = net(x)
    expected = layer.base(x)
    for (low, high), weight_B in zip(blocks.values(), weights.T, strict=True):
        inner = x @ low.T if not activation else torch.relu(x @ low.T)
        expected = expected + weight_B[:, None, None] * 1.5 * inner @ high.T
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


def test_sums_are_of_adapter_outputs_not_of_weights() -> None:
    """SLM, eqs. 3 and 4: W h + sum w B (A h) = (W + sum w B A) h, and not (sum w B)(sum w A) h."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5)).double()
    stack = AdapterStack(net, ["0"])
    blocks = {name: (torch.randn(2, 6).double(), torch.randn(5, 2).double()) for name in "ab"}
    for name, block in blocks.items():
        stack.load(name, AdapterState({"0": block}))
    weights = {"a": 0.3, "b": 0.7}
    x = torch.randn(4, 6).double()
    with torch.no_grad(), stack.activate(Mixture.same(weights, 4)):
        result = net(x)
    linear: Any = stack.layers["0"].base
    update = sum(weights[name] * high @ low for name, (low, high) in blocks.items())
    torch.testing.assert_close(result, x @ (linear.weight + update).T + linear.bias, atol=1e-6, rtol=1e-6)
    summed_a = sum(weights[name] * low for name, (low, _) in blocks.items())
    summed_b = sum(weights[name] * high for name, (_, high) in blocks.items())
    averaged = linear(x) + x @ (summed_b @ summed_a).T
    assert not torch.allclose(result, averaged, atol=1e-2), "blocks were averaged before they were multiplied"


def test_a_mixture_names_the_active_adapters_of_each_example() -> None:
    mixture = Mixture(("a", "b", "c"), torch.tensor([[0, 0.1, 0.9], [1, 0, 0], [0, 0, 0], [0, -0.5, 0]]))
    rows = mixture.active()
    assert [[column for column, _ in row] for row in rows] == [[1, 2], [0], [], [1]]
    again = [torch.tensor([weight for _, weight in row]) for row in rows]
    assert all(torch.equal(weights, row[row != 0]) for weights, row in zip(again, mixture.weights, strict=True))
