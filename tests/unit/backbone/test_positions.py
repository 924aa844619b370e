"""Logits at the positions that carry loss: the values and gradients of all logits, without computing all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import WORDS, tokenizer
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from raycl.adapters import AdapterStack
from raycl.backbone.load import wrap_model
from raycl.backbone.positions import logits_at
from raycl.bench.gpu.tiny import SIZES, tiny_model
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
    if name == "cohere":
        return CohereForCausalLM(CohereConfig(vocab_size=vocabulary, logit_scale=0.3, **SIZES))
    if name == "gemma2":
        capped = {"head_dim": 16, "num_key_value_heads": 2, "final_logit_softcapping": 0.5}
        return Gemma2ForCausalLM(Gemma2Config(vocab_size=vocabulary, **capped, **SIZES))
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart", "gemma2", "cohere"])
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    words = tokenizer("t5" if name in ("t5", "bart") else "llama")
    backbone = wrap_model(model_of(name, len(words)), words, 16, 8).eval()
    shapes: list[tuple[int, ...]] = []
    layer = backbone.model.get_output_embeddings()
    layer.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape[:2])))
    found: list[tuple[float, dict[str, Tensor]]] = []
    for backbone.every_position in (True, False):
        backbone.zero_grad()
        loss = backbone(unlike_rows()).loss_sum
        loss.backward()
        found.append((loss.item(), {key: p.grad for key, p in backbone.named_parameters() if p.grad is not None}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6) and found[0][1].keys() == found[1][1].keys()
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], gradient, atol=1e-6, rtol=1e-5)
    whole = (3, 6) if name in ("t5", "bart") else (3, 9 + 2)
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
        found, whole = logits_at(model, chosen, inputs), model(**inputs).logits
    torch.testing.assert_close(found, whole[chosen])
    stack.detach()
    with torch.no_grad():
        bare = logits_at(model, chosen, inputs)
    torch.testing.assert_close(found[2], bare[2])
    assert not torch.allclose(found[0], bare[0], atol=1e-2)
