"""Decoding is measured on the model it says: tiny, on the CPU, where no graph is captured."""

from __future__ import annotations

import torch

from raycl.adapters import AdapterStack
from raycl.bench.decode import Shape, _Decoder, _model, _state, decode_figures
from raycl.types import Mixture

TINY = Shape(2, 32, 64, 2, 50, batch=2, tokens=4, adapters=2, rank=2, rounds=1, dtype=torch.float32)
CPU = torch.device("cpu")


def test_both_choices_of_linears_are_measured() -> None:
    figures = list(decode_figures(TINY, CPU))
    assert [figure.target for figure in figures] == [1.1, 1.1]
    assert all(figure.value > 0 and "tokens/s" in figure.detail for figure in figures)


def test_the_captured_step_decodes_with_the_mixture() -> None:
    """Greedy steps through the static cache and preallocated rows are those of a plain forward pass over the prefix."""
    model = _model(TINY, CPU)
    stack = AdapterStack(model, ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"], rows=4)
    stack.preallocate(4, TINY.batch)
    for name in ("n0", "n1"):
        state = _state(stack, 2)
        for low, high in state.linears.values():
            low.mul_(50), high.mul_(50)
        stack.load(name, state)
    mixture = Mixture(("n0", "n1"), torch.tensor([[1.0, 0.0], [0.3, 0.7]]))
    decoder = _Decoder(model, TINY, CPU, lambda: stack.mixing(mixture))
    decoder.cache.reset()
    decoder.ids.zero_()
    seen = [decoder.ids.clone()]
    with torch.no_grad(), stack.mixing(mixture):
        for _ in range(TINY.tokens):
            decoder._step()
            seen.append(decoder.ids.clone())
        whole = model(input_ids=torch.cat(seen[:-1], dim=1)).logits.argmax(-1)
    assert torch.equal(whole, torch.cat(seen[1:], dim=1))
