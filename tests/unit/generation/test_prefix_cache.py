"""Prompts whose beginnings were read before have the states that they have alone; blocks stay within their bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from tiny import Lab

from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.generation.dynamic_cache import begin, step
from raycl.generation.prefix_cache import BLOCK, PrefixCache, Scope, ScopedPrompt

OWNER, OTHER = object(), object()
BARE = Scope(OWNER, (), ())


def loaded(kind: str, lab: Lab) -> Backbone:
    config = BackboneConfig(name=str(lab.model_folder(kind)))
    return load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()


def drawn(random_ids: random.Random, length: int) -> list[int]:
    return [random_ids.randrange(5, 20) for _ in range(length)]


def read(cache: PrefixCache, backbone: Backbone, prompts: Sequence[ScopedPrompt]) -> None:
    """Read prompts, and compare the logits of two tokens, and the states, with those of each prompt alone."""
    seen = []
    for numbers, state in cache.read(backbone, prompts, lambda numbers: nullcontext()):
        following = step(backbone, state, state.logits.argmax(-1))
        for row, number in enumerate(numbers):
            ids = prompts[number].ids
            own = begin(backbone, [ids])
            torch.testing.assert_close(state.logits[row], own.logits[0], atol=1e-5, rtol=1e-4)
            after = step(backbone, own, state.logits[row, None].argmax(-1))
            torch.testing.assert_close(following.logits[row], after.logits[0], atol=1e-5, rtol=1e-4)
            mask = state.mask[row].tolist()
            assert mask == [0] * (len(mask) - len(ids)) + [1] * len(ids), "padding is at the left alone"
        seen += numbers
    assert sorted(seen) == list(range(len(prompts)))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_states_are_those_of_each_prompt_alone(kind: str, lab: Lab) -> None:
    backbone, cache, draw = loaded(kind, lab), PrefixCache(2**20), random.Random(0)
    system, other = drawn(draw, 40), drawn(draw, 35)
    read(cache, backbone, [ScopedPrompt(BARE, [*system, *drawn(draw, 3)])])
    assert (cache.reused, len(cache)) == (0, 2)
    read(cache, backbone, [ScopedPrompt(BARE, [*system, *drawn(draw, 5)])])
    assert cache.reused == 2 * BLOCK
    several = [
        [*system, *drawn(draw, 9)],
        [*other, *drawn(draw, 1)],
        [*other, *drawn(draw, 20)],
        drawn(draw, 2),
        system,
    ]
    read(cache, backbone, [ScopedPrompt(BARE, ids) for ids in several])
    before = cache.reused
    read(cache, backbone, [ScopedPrompt(BARE, ids) for ids in several])
    assert cache.reused > before, "and of the second of two prompts with a new beginning"
    read(cache, backbone, [ScopedPrompt(BARE, system[: 2 * BLOCK])])  # its last token must be read


def test_a_new_beginning_of_several_prompts_is_read_once(lab: Lab) -> None:
    backbone, cache, draw = loaded("llama", lab), PrefixCache(2**20), random.Random(1)
    system = drawn(draw, 40)
    read(cache, backbone, [ScopedPrompt(BARE, [*system, number]) for number in (5, 6, 7)])
    assert cache.reused == 2 * (2 * BLOCK)


def test_only_equal_mixtures_of_one_snapshot_share_states(lab: Lab) -> None:
    backbone, cache, draw = loaded("llama", lab), PrefixCache(2**20), random.Random(2)
    system = drawn(draw, 40)
    scopes = [BARE, Scope(OWNER, ("a",), (1.0,)), Scope(OWNER, ("a",), (0.9999999,)), Scope(OTHER, ("a",), (1.0,))]
    for scope in scopes:
        read(cache, backbone, [ScopedPrompt(scope, [*system, 7])])
    assert cache.reused == 0
    read(cache, backbone, [ScopedPrompt(scope, [*system, 8]) for scope in scopes])
    assert cache.reused == 4 * (2 * BLOCK)
    size = cache.bytes
    cache.drop(OTHER)
    assert (len(cache), cache.bytes) == (6, size * 3 // 4)
    read(cache, backbone, [ScopedPrompt(scopes[3], [*system, 9])])
    assert cache.reused == 4 * (2 * BLOCK)


def test_the_least_recently_used_blocks_are_dropped(lab: Lab) -> None:
    backbone, draw = loaded("llama", lab), random.Random(3)
    cache = PrefixCache(2**20)
    read(cache, backbone, [ScopedPrompt(BARE, drawn(draw, BLOCK + 1))])
    block = cache.bytes
    cache = PrefixCache(5 * block)
    used, unused = drawn(draw, 40), drawn(draw, 40)
    for system in (unused, used, used):
        read(cache, backbone, [ScopedPrompt(BARE, [*system, *drawn(draw, 2)])])
    read(cache, backbone, [ScopedPrompt(BARE, drawn(draw, 2 * BLOCK + 1))])  # takes the place of `unused`
    reused = cache.reused
    read(cache, backbone, [ScopedPrompt(BARE, [*unused, 5])])
    assert cache.reused == reused
    for number in range(30):
        lengths = [draw.randrange(1, 60) for _ in range(draw.randrange(1, 4))]
        prompts = [[*draw.choice((used, unused)), *drawn(draw, length)][-55:] for length in lengths]
        read(cache, backbone, [ScopedPrompt(BARE, ids) for ids in prompts])
        assert cache.bytes <= cache.max_bytes, number
        assert cache.bytes == sum(part.states.numel() * 4 for part in cache._blocks.values())


@pytest.mark.parametrize(("kind", "size"), [("llama", 0), ("t5", 2**20)])
def test_nothing_is_kept_without_room_or_of_an_encoder(kind: str, size: int, lab: Lab) -> None:
    backbone, cache, ids = loaded(kind, lab), PrefixCache(size), [5, 6, 7, 8] * 10
    for _ in range(2):
        ((numbers, state),) = cache.read(backbone, [ScopedPrompt(BARE, ids)], lambda numbers: nullcontext())
        assert torch.equal(state.logits, begin(backbone, [ids]).logits) and numbers == [0]
    assert (len(cache), cache.reused) == (0, 0)
