"""Sequences that join and leave a continuous batch give the same texts as alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny import Lab, tokenizer
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.errors import BackboneError
from raycl.generation.dynamic_cache import DynamicKVCache, begin, step
from raycl.generation.static_cache import StaticKVCache, captured, supports_static_cache

TEXTS = ("red blue cat", "the sky is very much blue cold warm", "a dog", "fire runs sleeps")


def loaded(kind: str, lab: Lab) -> Backbone:
    config = BackboneConfig(name=str(lab.model_folder(kind)))
    return load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()


def alone(backbone: Backbone, source: list[int], steps: int) -> list[torch.Tensor]:
    """Return logits of every step of one sequence by itself."""
    state, collected = begin(backbone, [source]), []
    for _ in range(steps):
        collected.append(state.logits[0].clone())
        state = step(backbone, state, state.logits.argmax(-1))
    return collected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_sequences_joining_and_leaving_a_batch_change_no_other(kind: str, lab: Lab) -> None:
    backbone = loaded(kind, lab)
    sources = backbone.codec.encode_source(list(TEXTS))
    expected = [alone(backbone, source, 10) for source in sources]
    result: list[list[torch.Tensor]] = [[] for _ in sources]
    state, rows = begin(backbone, sources[:2]), [0, 1]
    for number in range(14):
        if number in (2, 6):  # one joins, later another
            joiner = 2 if number == 2 else 3
            state, rows = state.joined(begin(backbone, [sources[joiner]])), [*rows, joiner]
        if number in (5, 12):  # the first leaves, later all but the last
            kept = [1, 2] if number == 5 else [2]
            state, rows = state.kept(kept), [rows[index] for index in kept]
        for row, logits in zip(rows, state.logits, strict=True):
            result[row].append(logits.clone())
        state = step(backbone, state, state.logits.argmax(-1))
    for mine, other in zip(result, expected, strict=True):
        for item, two in zip(mine[:10], other, strict=False):
            torch.testing.assert_close(item, two, atol=1e-5, rtol=1e-4)
    assert state.mask.shape[1] <= 24, "unused columns are dropped"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_static_cache_changes_no_answer(kind: str, attention: str, lab: Lab) -> None:
    """Joined, left, taken by others and lengthened (8, 16, 32 columns); addresses stay but for that."""
    backbone = loaded(kind, lab)
    backbone.model.set_attn_implementation(attention)
    assert supports_static_cache(backbone)
    sources = backbone.codec.encode_source(list(TEXTS))
    expected = [alone(backbone, source, 12) for source in sources]
    result: list[list[torch.Tensor]] = [[] for _ in sources]
    slots, rows = StaticKVCache(backbone, 3, columns=8).joined(begin(backbone, sources[:2])), [0, 1]
    seen = set()
    for number in range(12):
        if number in (2, 6):  # one takes the last slot, later another the first one's
            joiner = 2 if number == 2 else 3
            slots, rows = slots.joined(begin(backbone, [sources[joiner]])), [*rows, joiner]
        if number == 5:
            slots, rows = slots.kept([1, 2]), [1, 2]
        for row, logits in zip(rows, slots.logits, strict=True):
            result[row].append(logits.clone())
        slots = slots.step(slots.logits.argmax(-1))
        seen.add(tuple(tensor.data_ptr() for layer in slots._layers for tensor in (layer.keys, layer.values)))
    assert sorted(slots.order) == [0, 1, 2] and slots.columns == 32 and len(seen) == 2
    for mine, other in zip(result, expected, strict=True):
        for item, two in zip(mine, other, strict=False):
            torch.testing.assert_close(item, two, atol=1e-5, rtol=1e-4)


def test_a_reused_slot_keeps_no_state(lab: Lab) -> None:
    """Even numbers that are not finite: they are nowhere, and 0 times them is not 0."""
    backbone = loaded("llama", lab)
    sources = backbone.codec.encode_source([TEXTS[1], TEXTS[2]])
    slots = StaticKVCache(backbone, 1).joined(begin(backbone, sources[:1]))
    for layer in slots._layers:
        layer.values.fill_(torch.nan)
    slots = slots.kept([]).joined(begin(backbone, sources[1:]))
    expected = alone(backbone, sources[1], 3)
    for logits in expected:
        torch.testing.assert_close(slots.logits[0], logits, atol=1e-5, rtol=1e-4)
        slots = slots.step(slots.logits.argmax(-1))


def test_models_without_graph_capture_are_decoded(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Models are decoded without graph capture, as here, where there is no GPU to capture on."""
    backbone = loaded("llama", lab)
    source = backbone.codec.encode_source([TEXTS[1]])
    slots = StaticKVCache(backbone, 2).joined(begin(backbone, source))
    slots._captures = True
    for logits in alone(backbone, source[0], 3):
        torch.testing.assert_close(slots.logits[0], logits, atol=1e-5, rtol=1e-4)
        slots = slots.step(slots.logits.argmax(-1))
    assert caplog.text.count("decoding continues without CUDA graphs") == 1 and not slots.captures


def test_a_step_that_fails_before_capture_is_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, work of its stream would run beside the uncaptured step that follows, on the same caches."""
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            waits.append((self.name, other.name))

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr("raycl.generation.static_cache._side_stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def step() -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        captured(step)
    assert waits == [("side", "main"), ("main", "side")]


def test_too_little_memory_changes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = loaded("llama", lab)
    source = backbone.codec.encode_source([TEXTS[1]])
    slots = StaticKVCache(backbone, 2, columns=len(source[0])).joined(begin(backbone, source))
    expected, made = alone(backbone, source[0], 3), []

    def none_left(tensor: torch.Tensor, gap: list[int]) -> torch.Tensor:
        if len(made) == 3:
            raise torch.OutOfMemoryError("out of memory")
        made.append(gap)
        return pad(tensor, gap)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr("raycl.generation.static_cache.pad", none_left)
        slots.step(slots.logits.argmax(-1))
    for logits in expected:
        torch.testing.assert_close(slots.logits[0], logits, atol=1e-5, rtol=1e-4)
        slots = slots.step(slots.logits.argmax(-1))


SMALL = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("model_type", ["gpt_neox", "mistral", "opt", "qwen2", "qwen3"])
def test_other_decoders_use_the_static_cache(model_type: str, tmp_path: Path) -> None:
    extra = {"opt": {"word_embed_proj_dim": 32, "ffn_dim": 64}, "mistral": {"sliding_window": None}}
    sizes = {**SMALL, "max_position_embeddings": 64, **extra.get(model_type, {})}
    if model_type in ("mistral", "qwen2", "qwen3"):
        sizes["num_key_value_heads"] = 2
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).save_pretrained(tmp_path)
    tokenizer("llama").save_pretrained(tmp_path)
    config = BackboneConfig(name=str(tmp_path))
    backbone = load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()
    assert supports_static_cache(backbone)
    sources = backbone.codec.encode_source(list(TEXTS))
    slots = StaticKVCache(backbone, 4, columns=8).joined(begin(backbone, sources))
    expected = [alone(backbone, source, 6) for source in sources]
    for number in range(6):
        for row, logits in enumerate(slots.logits):
            torch.testing.assert_close(logits, expected[row][number], atol=1e-5, rtol=1e-4)
        slots = slots.step(slots.logits.argmax(-1))
    backbone.model.config.sliding_window = 4
    backbone.model.config.use_sliding_window = True
    assert not supports_static_cache(backbone)


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_the_static_cache_is_for_decoders_only(kind: str, lab: Lab) -> None:
    assert not supports_static_cache(loaded(kind, lab))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_answers_equal_transformers_generate(kind: str, lab: Lab) -> None:
    backbone = loaded(kind, lab)
    source = backbone.codec.encode_source([TEXTS[1]])
    ids = torch.tensor(source)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    whole = backbone.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()[-8:]
    state: DynamicKVCache = begin(backbone, source)
    tokens = []
    for number in range(8):
        logits = state.logits.clone()
        if number < 7:
            logits[:, backbone.codec.eos_id] = -torch.inf  # as min_new_tokens does
        tokens.append(int(logits.argmax()))
        state = step(backbone, state, torch.tensor(tokens[-1:]))
    assert tokens[:7] == whole[:7]


def test_caches_that_cannot_be_batched_are_an_error(tmp_path: Path) -> None:
    from transformers import DynamicCache, LlamaConfig

    from raycl.generation.dynamic_cache import _layers

    cache = DynamicCache(config=LlamaConfig(sliding_window=4, layer_types=["sliding_attention"], num_hidden_layers=1))
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(BackboneError, match="sequences cannot join a running batch"):
        _layers(cache)


def test_a_masked_prefix_does_not_truncate_the_source() -> None:
    def state(rows: int, mask: list[list[int]]) -> DynamicKVCache:
        layers = [(torch.arange(6.0).expand(rows, 1, 1, 6).transpose(2, 3),) * 2]
        sources = torch.tensor(mask)
        return DynamicKVCache(
            torch.zeros(rows, 3), torch.ones(rows, 1).long(), layers, sources, sources[..., None], layers
        )

    both = state(2, [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]])  # the second row has no prompt of its own
    kept = both.kept([1])
    assert kept.source_mask is not None and kept.hidden is not None and kept.cross is not None
    assert kept.source_mask.tolist() == [[0, 0, 1, 1, 1]] and kept.hidden.shape[1] == 5
    assert kept.cross[0][0].flatten().tolist() == [0, 1, 2, 3, 4]
