"""Logits at the positions that carry loss, and rows that examples share: the same losses and gradients, less work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import WORDS, tokenizer
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MBartConfig,
    MBartForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from raycl.adapters import AdapterStack
from raycl.backbone.load import wrap_model
from raycl.backbone.positions import logits_at, pack
from raycl.errors import BackboneError
from raycl.testing.tiny_models import SIZES, tiny_model
from raycl.types import IGNORE, AdapterState, Batch, Mixture

BART = {
    "d_model": 32,
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 1), ("ffn_dim", 64))},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}
SOURCES, TARGETS = (9, 3, 1), (2, 6, 0)
"""Tokens of each row; the last one fills the batch up."""


def model_of(name: str, vocabulary: int) -> Any:
    """T5 scales states in front of its output layer, BART adds a bias behind it, Gemma caps, Cohere scales."""
    torch.manual_seed(0)
    if name == "bart":
        model = BartForConditionalGeneration(BartConfig(vocab_size=vocabulary, pad_token_id=0, **BART))
        model.final_logits_bias.normal_()
        return model
    if name == "mbart":
        return MBartForConditionalGeneration(MBartConfig(vocab_size=vocabulary, pad_token_id=0, **BART))
    if name == "cohere":
        return CohereForCausalLM(CohereConfig(vocab_size=vocabulary, logit_scale=0.3, **SIZES))
    if name == "gemma2":
        capped = {"head_dim": 16, "num_key_value_heads": 2, "final_logit_softcapping": 0.5}
        return Gemma2ForCausalLM(Gemma2Config(vocab_size=vocabulary, **capped, **SIZES))
    if name == "mistral":
        window = {"num_key_value_heads": 2, "sliding_window": 4}
        return MistralForCausalLM(MistralConfig(vocab_size=vocabulary, **window, **SIZES))
    if name == "opt":
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 32, "ffn_dim": 64}
        return OPTForCausalLM(OPTConfig(vocab_size=vocabulary, hidden_size=32, **sizes))
    if name == "mamba":
        return MambaForCausalLM(MambaConfig(vocab_size=vocabulary, hidden_size=32, num_hidden_layers=1))
    return tiny_model(name, vocabulary)


def unlike_rows() -> Batch:
    draw = torch.Generator().manual_seed(1)
    rows, width, depth = len(SOURCES), max(SOURCES), max(TARGETS)
    mask = (torch.arange(width) < torch.tensor(SOURCES).unsqueeze(1)).long()
    source = torch.randint(5, 20, (rows, width), generator=draw) * mask
    target = torch.randint(5, 20, (rows, depth), generator=draw)
    target[torch.arange(depth) >= torch.tensor(TARGETS).unsqueeze(1)] = IGNORE
    weight = torch.tensor([1.0, 1.0, 0.0])
    return Batch(source, mask, target, torch.full((rows,), IGNORE), weight, torch.arange(rows))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart", "mbart", "gemma2", "cohere"])
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    words = tokenizer("t5" if name in ("t5", "bart", "mbart") else "llama")
    backbone = wrap_model(model_of(name, len(words)), words, 16, 8).eval()
    shapes: list[tuple[int, ...]] = []
    layer = backbone.model.get_output_embeddings()
    layer.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape[:2])))
    collected: list[tuple[float, dict[str, Tensor]]] = []
    for backbone.every_position in (True, False):
        backbone.zero_grad()
        loss = backbone(unlike_rows()).loss_sum
        loss.backward()
        collected.append((loss.item(), {key: p.grad for key, p in backbone.named_parameters() if p.grad is not None}))
    assert (
        collected[0][0] == pytest.approx(collected[1][0], rel=1e-6) and collected[0][1].keys() == collected[1][1].keys()
    )
    for key, gradient in collected[0][1].items():
        torch.testing.assert_close(collected[1][1][key], gradient, atol=1e-6, rtol=1e-5)
    whole = (3, 6) if name in ("t5", "bart", "mbart") else (3, 9 + 2)
    assert shapes == [whole, (1, sum(TARGETS))], "the output layer reads the labelled positions alone"


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_adapters_on_the_output_layer_see_their_own_rows(name: str) -> None:
    """Their mixture is per row, so all positions are computed."""
    model = model_of(name, 3 + len(WORDS)).eval()
    stack = AdapterStack(model, ["lm_head"])
    high = torch.randn(model.lm_head.base.out_features, 2, generator=torch.Generator().manual_seed(3))
    stack.load("a", AdapterState({"lm_head": (torch.ones(2, 32), high)}))
    ids = torch.randint(5, 20, (2, 4), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids, **({} if name == "llama" else {"decoder_input_ids": ids})}
    chosen = torch.tensor([[True, False, False, True], [False, True, False, False]])
    with torch.no_grad(), stack.activate(Mixture(("a",), torch.tensor([[1.0], [0.0]]))):
        logits, whole = logits_at(model, chosen, inputs), model(**inputs).logits
    torch.testing.assert_close(logits, whole[chosen])
    stack.detach()
    with torch.no_grad():
        bare = logits_at(model, chosen, inputs)
    torch.testing.assert_close(logits[2], bare[2])
    assert not torch.allclose(logits[0], bare[0], atol=1e-2)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), in_one_row=st.booleans())
def test_every_example_stands_whole_in_one_row(lengths: list[int], in_one_row: bool) -> None:
    packed = pack(lengths, torch.device("cpu"), in_one_row)
    rows, width = packed.examples.shape
    assert width == (sum(lengths) if in_one_row else max(lengths)) and int(packed.real.sum()) == sum(lengths)
    assert rows == 1 or rows <= len(lengths)
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for example, length in enumerate(lengths):
        tokens[example, :length] = torch.arange(length) + 100 * (example + 1)
    taken = packed.take(tokens, -1)
    for example, length in enumerate(lengths):
        mine = (packed.examples == example) & packed.real
        assert mine.any(1).sum() == 1 and taken[mine].tolist() == tokens[example, :length].tolist()
        assert packed.positions[mine].tolist() == list(range(length))
    assert (taken[~packed.real] == -1).all()
    for row, real in zip(packed.positions, packed.real, strict=True):
        assert row[~real].tolist() == list(range(int((~real).sum()))), "padding is no continuation of an example"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_packed_batch_has_the_loss_and_gradients_of_a_padded_one(name: str, attention: str) -> None:
    model = model_of(name, len(tokenizer("llama")))
    model.set_attn_implementation(attention)
    backbone, batch = wrap_model(model, tokenizer("llama"), 16, 8).train(), unlike_rows()
    for module in backbone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    backbone.check_packing()
    widths: list[tuple[int, ...]] = []
    layer = model.get_input_embeddings()
    layer.register_forward_hook(lambda module, given, states: widths.append(tuple(states.shape[:2])))
    collected: list[tuple[float, dict[str, Tensor]]] = []
    for backbone.packs in (False, True):
        backbone.zero_grad()
        output = backbone(batch)
        output.loss_sum.backward()
        collected.append((output.loss_sum.item(), {key: p.grad for key, p in backbone.named_parameters()}))
        assert backbone.real_tokens(batch)["source"].shape == widths[-1]
    assert widths == [(3, 11), (2, 11)] and collected[0][0] == pytest.approx(collected[1][0], rel=1e-6)
    for key, gradient in collected[0][1].items():
        torch.testing.assert_close(collected[1][1][key], gradient, atol=2e-6, rtol=1e-4)
    guesses = backbone.guesses(batch)
    backbone.eval()
    plain = backbone.guesses(batch)
    assert sorted(guesses.rows.tolist()) == plain.rows.tolist() and widths[-1] == (3, 11), "evaluation packs nothing"


@pytest.mark.parametrize(
    ("name", "why"),
    [("opt", "OPTForCausalLM computes a text in a row"), ("mamba", "MambaForCausalLM (reads no position|computes)")],
)
def test_a_model_that_mixes_the_examples_of_a_row_is_refused(name: str, why: str) -> None:
    backbone = wrap_model(model_of(name, len(tokenizer("llama"))), tokenizer("llama"), 16, 8)
    with pytest.raises(BackboneError, match=f"train.packing is true, but {why}.*: set train.packing to false"):
        backbone.check_packing()
