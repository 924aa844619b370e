"""Objectives for texts without answers: hidden words to guess, or each next word.

Which words are hidden must differ from epoch to epoch and yet follow from (seed, epoch, row) alone, so that a run can
stop and continue anywhere and N workers equal one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycl.errors import ConfigError
from raycl.types import IGNORE, Objective, TextCodec

Ids = NDArray[np.int32]

TextObjective = Callable[[Ids, int, int], tuple[Ids, Ids]]
"""(ids of a text, its row, epoch) -> what the model reads and what it must predict, as `Batch` holds them."""

TOKEN_ACCURACY = "token_accuracy"
"""Percent of the tokens to be guessed that the model's first choice gets right, given all that it may read."""

MASKED, REPLACED = 0.8, 0.1
"""Shares of the tokens to be guessed that are shown as the mask and as another word; the rest stay as they are (Devlin
et al. 2019, section 3.1)."""


@dataclass(frozen=True)
class HiddenWords:
    """Masked language modelling; the released BERT code's count: `max(1, round(share * tokens))` of each text.

    Attributes:
        words: ids that a replacement is drawn from.
    """

    share: float
    mask_id: int
    special_ids: frozenset[int]
    words: NDArray[np.int64] = field(repr=False)
    seed: int

    def __call__(self, ids: Ids, row: int, epoch: int) -> tuple[Ids, Ids]:
        """Return a source with hidden words, and a target of the same length that is IGNORE elsewhere."""
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch, row]))
        places = np.flatnonzero(~np.isin(ids, list(self.special_ids)))
        count = min(len(places), max(1, round(self.share * len(places))))
        hidden = draw.permutation(places)[:count]
        kind, words = draw.random(count), draw.choice(self.words, count)
        source, target = ids.copy(), np.full_like(ids, IGNORE)
        target[hidden] = ids[hidden]
        source[hidden[kind < MASKED]] = self.mask_id
        other = (kind >= MASKED) & (kind < MASKED + REPLACED)
        source[hidden[other]] = words[other]
        return source, target


def next_words(ids: Ids, row: int, epoch: int) -> tuple[Ids, Ids]:
    """Causal language modelling: the first token is read, every other one is predicted."""
    return ids[:1], ids[1:]


def text_objective(objective: Objective, codec: TextCodec, share: float, seed: int) -> TextObjective | None:
    """Return the objective that turns texts into batches; None where answers are learned."""
    if objective == "answer":
        return None
    if objective == "clm":
        return next_words
    words = np.setdiff1d(np.arange(codec.vocabulary), list(codec.special_ids))
    return HiddenWords(share, codec.mask_id, codec.special_ids, words, seed)


def check_objective(objective: Objective, codec: TextCodec) -> None:
    """Refuse an objective that the backbone cannot learn.

    Raises:
        ConfigError: the backbone is of another kind, or has no mask token.
    """
    if objective == "answer":
        return
    if codec.capabilities.text_objective != objective:
        raise ConfigError(
            f"stream.objective is {objective}, but the backbone is of kind {codec.kind}: expected mlm for encoder-only "
            "and clm for decoder-only backbones (texts themselves are not learned with encoder-decoder ones)"
        )
    if objective == "mlm" and codec.mask_id < 0:
        raise ConfigError("stream.objective is mlm, but the tokenizer has no mask token: choose another backbone")


def whole_texts(texts: Sequence[str], codec: TextCodec, limit: int) -> tuple[list[list[int]], list[int]]:
    """Return ids of texts to continue from, a first token ahead and end-of-sequence behind, at most `limit` each, and
    the tokens above it of each text that was cut.

    The first is what the tokenizer puts in front of a text; where that is nothing, end-of-sequence (as GPT-2 was
    trained). A text that is cut has no end.
    """
    (end,) = codec.encode_target([""])
    (start,) = codec.encode_source([""])
    ids = [[*(start or end), *text] for text in codec.encode_target(texts)]
    return [text_ids[:limit] for text_ids in ids], [len(text_ids) - limit for text_ids in ids if len(text_ids) > limit]
