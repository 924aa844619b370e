"""Sequences that join and leave a running batch say what they would say alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_model

from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.backbone.running import Running, begin, step
from raycl.errors import BackboneError

TEXTS = ("red blue cat", "the sky is very much blue cold warm", "a dog", "fire runs sleeps")


def loaded(kind: str, folder: Path) -> Backbone:
    config = BackboneConfig(name=str(save_model(kind, folder)))
    return load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()


def alone(backbone: Backbone, source: list[int], steps: int) -> list[torch.Tensor]:
    """Logits of every step of one sequence by itself."""
    state, found = begin(backbone, [source]), []
    for _ in range(steps):
        found.append(state.logits[0].clone())
        state = step(backbone, state, state.logits.argmax(-1))
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_joining_and_leaving_change_nothing(kind: str, tmp_path: Path) -> None:
    backbone = loaded(kind, tmp_path)
    sources = backbone.codec.encode_source(list(TEXTS))
    expected = [alone(backbone, source, 10) for source in sources]
    found: list[list[torch.Tensor]] = [[] for _ in sources]
    state, rows = begin(backbone, sources[:2]), [0, 1]
    for number in range(14):
        if number in (2, 6):  # one joins, later another
            joiner = 2 if number == 2 else 3
            state, rows = state.joined(begin(backbone, [sources[joiner]])), [*rows, joiner]
        if number in (5, 12):  # the first leaves, later all but the last
            kept = [1, 2] if number == 5 else [2]
            state, rows = state.kept(kept), [rows[place] for place in kept]
        for row, logits in zip(rows, state.logits, strict=True):
            found[row].append(logits.clone())
        state = step(backbone, state, state.logits.argmax(-1))
    for mine, other in zip(found, expected, strict=True):
        for one, two in zip(mine[:10], other, strict=False):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    assert state.mask.shape[1] <= 24, "columns that nobody needs are dropped"


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_librarys_own_generation_says_the_same(kind: str, tmp_path: Path) -> None:
    backbone = loaded(kind, tmp_path)
    source = backbone.codec.encode_source([TEXTS[1]])
    ids = torch.tensor(source)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    whole = backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()[-8:]
    state: Running = begin(backbone, source)
    tokens = []
    for number in range(8):
        logits = state.logits.clone()
        if number < 7:
            logits[:, backbone.codec.eos_id] = -torch.inf  # as min_new_tokens does
        tokens.append(int(logits.argmax()))
        state = step(backbone, state, torch.tensor(tokens[-1:]))
    assert tokens[:7] == whole[:7]


def test_caches_that_cannot_be_joined_are_said(tmp_path: Path) -> None:
    from transformers import DynamicCache, LlamaConfig

    from raycl.backbone.running import _layers

    cache = DynamicCache(config=LlamaConfig(sliding_window=4, layer_types=["sliding_attention"], num_hidden_layers=1))
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(BackboneError, match="sequences cannot join a running batch"):
        _layers(cache)


def test_a_masked_prefix_is_no_reason_to_cut_the_source() -> None:
    def state(rows: int, mask: list[list[int]]) -> Running:
        layers = [(torch.arange(6.0).expand(rows, 1, 1, 6).transpose(2, 3),) * 2]
        sources = torch.tensor(mask)
        return Running(torch.zeros(rows, 3), torch.ones(rows, 1).long(), layers, sources, sources[..., None], layers)

    both = state(2, [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]])  # the second row has no prompt of its own
    kept = both.kept([1])
    assert kept.source_mask is not None and kept.hidden is not None and kept.cross is not None
    assert kept.source_mask.tolist() == [[0, 0, 1, 1, 1]] and kept.hidden.shape[1] == 5
    assert kept.cross[0][0].flatten().tolist() == [0, 1, 2, 3, 4]
