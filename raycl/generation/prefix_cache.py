"""Keys and values of the beginnings of prompts, kept for later prompts that begin alike.

Prompts of one application share their beginning: a system message, a task's instruction, the turns before the last.
Keys and values of a token depend on the tokens up to it and on the weights alone, so prompts under one mixture share
them. They are kept in blocks of equally many tokens, each known by its tokens and the block before it, as in vLLM's
automatic prefix caching (Kwon et al., 2023, section 4.4, has the blocks); here the first block is also known by the
snapshot and the mixture. The least recently used blocks are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raycl.backbone import Backbone
from raycl.generation.dynamic_cache import DynamicKVCache, begin, read_on
from raycl.generation.static_cache import MODELS
from raycl.types import Mixture

BLOCK = 16
"""The number of tokens of a block."""

LEAST_TOKENS = 2 * BLOCK
"""Shorter common beginnings are read again: prompts that continue a kept one take a forward pass of their own."""


def shares_prefixes(backbone: Backbone) -> bool:
    """Return whether prompts of equal beginnings and mixtures have equal keys and values there."""
    if backbone.suffix is not None or not backbone.capabilities.one_sequence:
        return False  # a suffix is read together with its text
    return backbone.model.config.model_type in MODELS


class Scope(NamedTuple):
    """The weights that compute a prompt.

    Attributes:
        owner: the loaded snapshot. names, weights: the active adapters, and the exact weight of each.
    """

    owner: object
    names: tuple[str, ...]
    weights: tuple[float, ...]

    @staticmethod
    def of(owner: object, mixture: Mixture) -> Scope:
        """Return the scope of prompts under a mixture of one row."""
        return Scope(owner, tuple(mixture.names), tuple(mixture.weights[0].tolist()))


class ScopedPrompt(NamedTuple):
    """A prompt and the weights that compute it."""

    scope: Scope
    ids: Sequence[int]

    def block(self, number: int) -> tuple[int, ...]:
        """Return the tokens of a block."""
        return tuple(self.ids[number * BLOCK : (number + 1) * BLOCK])

    @property
    def blocks(self) -> int:
        """The number of blocks that may be kept; a token at least is read, since the next one follows from it."""
        return (len(self.ids) - 1) // BLOCK


@dataclass(frozen=True, eq=False)
class _PrefixBlock:
    """Keys and values `[2 * layers, heads, BLOCK, width]`: layer by layer, keys first."""

    number: int
    scope: Scope
    states: Tensor

    @property
    def bytes(self) -> int:
        return self.states.numel() * self.states.element_size()


class PrefixCache:
    """Blocks of prompts that were read.

    Attributes:
        max_bytes: bytes of all blocks at most. bytes: their bytes now.
        reused: tokens of prompts that were not read again so far.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: bytes of all blocks at most; 0: nothing is kept.
        """
        self.max_bytes = max_bytes
        self.bytes: int = 0
        self.reused: int = 0
        self._numbers = count()
        self._blocks: OrderedDict[tuple[Scope | int, tuple[int, ...]], _PrefixBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @torch.no_grad()
    def read(
        self,
        backbone: Backbone,
        prompts: Sequence[ScopedPrompt],
        activate: Callable[[Sequence[int]], AbstractContextManager[Any]],
    ) -> list[tuple[list[int], DynamicKVCache]]:
        """Read prompts, and keep their blocks.

        Of several prompts with a new beginning in common, the first is read before the others.

        Args:
            activate: activates the mixtures of the prompts with these numbers.

        Returns:
            numbers of prompts that were read together, with their state; each prompt once.
        """
        has_front = backbone.prefix is not None  # a soft prompt, in front of the text
        if not self.max_bytes or has_front or not shares_prefixes(backbone):
            everything = list(range(len(prompts)))
            with activate(everything):
                return [(everything, begin(backbone, [prompt.ids for prompt in prompts]))]
        states = []
        new, known = self._parted(prompts)
        for numbers, read in ((new, self._begun), (known, self._continued)):
            if numbers:
                group = [prompts[number] for number in numbers]
                with activate(numbers):
                    state = read(backbone, group)
                for row, prompt in enumerate(group):
                    self._keep(prompt, state, row)
                states.append((numbers, state))
        return states

    def drop(self, owner: object) -> None:
        """Drop the blocks of a snapshot, which is unloaded."""
        for key in [key for key, block in self._blocks.items() if block.scope.owner is owner]:
            self._remove(key)

    def _parted(self, prompts: Sequence[ScopedPrompt]) -> tuple[list[int], list[int]]:
        """Return the numbers of prompts that are read from their beginnings on, and of those that continue others."""
        new: list[int] = []
        known: list[int] = []
        beginnings: set[tuple[Scope, tuple[int, ...]]] = set()
        for number, prompt in enumerate(prompts):
            beginning = (prompt.scope, tuple(prompt.ids[:LEAST_TOKENS]))
            is_kept = beginning in beginnings or len(self._found(prompt)) * BLOCK >= LEAST_TOKENS
            beginnings.add(beginning)
            (known if is_kept and prompt.blocks * BLOCK >= LEAST_TOKENS else new).append(number)
        return new, known

    def _begun(self, backbone: Backbone, prompts: Sequence[ScopedPrompt]) -> DynamicKVCache:
        return begin(backbone, [prompt.ids for prompt in prompts])

    def _continued(self, backbone: Backbone, prompts: Sequence[ScopedPrompt]) -> DynamicKVCache:
        """Read what is new in each prompt.

        As many tokens of each are read, so that no padding is between the kept ones and these.
        """
        found = [self._found(prompt) for prompt in prompts]
        pairs = list(zip(prompts, found, strict=True))
        most = max(len(prompt.ids) - len(blocks) * BLOCK for prompt, blocks in pairs)
        kept = [max(0, len(prompt.ids) - most) for prompt in prompts]
        wide = max(kept)
        if not wide:  # there was no room for the first prompt's blocks
            return self._begun(backbone, prompts)
        self.reused += sum(kept)
        sample = next(blocks[0].states for blocks in found if blocks)
        states = sample.new_zeros(len(sample), len(prompts), sample.shape[1], wide, sample.shape[3])
        for row, (blocks, length) in enumerate(zip(found, kept, strict=True)):
            if length:
                whole = torch.cat([block.states for block in blocks], dim=2)
                states[:, row, :, wide - length :] = whole[:, :, :length]
        layers = list(zip(states[::2], states[1::2], strict=True))
        rests = [prompt.ids[length:] for prompt, length in zip(prompts, kept, strict=True)]
        before = torch.tensor([[0] * (wide - length) + [1] * length for length in kept])
        return read_on(backbone, layers, before.to(backbone.device), rests)

    def _found(self, prompt: ScopedPrompt) -> list[_PrefixBlock]:
        """Return the blocks that the prompt begins with."""
        blocks: list[_PrefixBlock] = []
        before: Scope | int = prompt.scope
        for number in range(prompt.blocks):
            block = self._blocks.get((before, prompt.block(number)))
            if block is None:
                break
            blocks.append(block)
            before = block.number
        return blocks

    def _keep(self, prompt: ScopedPrompt, state: DynamicKVCache, row: int) -> None:
        """Keep the blocks of a prompt that was read as this row; they are now the most recently used ones."""
        blocks = self._found(prompt)
        if len(blocks) < prompt.blocks:
            start = state.mask.shape[1] - len(prompt.ids)
            first, end = start + len(blocks) * BLOCK, start + prompt.blocks * BLOCK
            fresh = torch.stack([states[row, :, first:end] for layer in state.layers for states in layer])
            for part in torch.split(fresh, BLOCK, dim=2):
                block = _PrefixBlock(next(self._numbers), prompt.scope, part.clone())
                self._blocks[self._key(prompt, blocks)] = block
                self.bytes += block.bytes
                blocks.append(block)
        for number in reversed(range(len(blocks))):  # a block is of no use without those before it
            self._blocks.move_to_end(self._key(prompt, blocks[:number]))
        while self.bytes > self.max_bytes:
            self._remove(next(iter(self._blocks)))

    def _key(self, prompt: ScopedPrompt, before: Sequence[_PrefixBlock]) -> tuple[Scope | int, tuple[int, ...]]:
        """Return the key of the block behind these."""
        return before[-1].number if before else prompt.scope, prompt.block(len(before))

    def _remove(self, key: tuple[Scope | int, tuple[int, ...]]) -> None:
        self.bytes -= self._blocks.pop(key).bytes
