"""Constraints limit the tokens of an answer, sampling settings say how they are drawn, and events report the answer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol


class TokenConstraint(Protocol):
    """A limit of the tokens of answers."""

    def started(self) -> TokenConstraint:
        """Return the limit of one answer, which has no token yet."""
        ...

    def after(self, ids: Sequence[int]) -> Sequence[int]:
        """Return tokens that may follow these of the answer, which begin with those of the call before."""
        ...


class AllowedTokens:
    """The tokens that may follow each other, so that a generated answer is one of a few."""

    def __init__(self, answers: Iterable[Sequence[int]], end: int) -> None:
        """Sort the answers, so that those with equal beginnings stand together.

        Args:
            answers: ids of the answers, as they are learned. end: id of the end of the sequence.
        """
        self._answers, self._end = sorted({tuple(ids) for ids in answers if len(ids)}), [end]
        self._read = 0  # tokens of one answer, with which those that are left begin

    def started(self) -> AllowedTokens:
        """Return the limit of one answer, which has no token yet."""
        return copy(self)

    def after(self, ids: Sequence[int]) -> Sequence[int]:
        """Return tokens that may follow these, which begin with those of the call before; the end of the sequence where
        nothing else may."""
        for token in ids[self._read :]:
            place = itemgetter(self._read)
            first = bisect_left(self._answers, token, key=place)
            last = bisect_right(self._answers, token, first, key=place)
            self._read += 1
            self._answers = [answer for answer in self._answers[first:last] if len(answer) > self._read]
        return list(dict.fromkeys(answer[self._read] for answer in self._answers)) or self._end


class TokenLogprob(NamedTuple):
    """A token with its log probability."""

    token: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """A token's log probability by the model's own logits, before penalties and temperature.

    Attributes:
        top: the most likely tokens at its place, the most likely first.
    """

    token: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """Settings of drawing tokens (the usual terms).

    Attributes:
        as_trained: `max_tokens` is not the request's, so an answer is no longer than those of the task that it is from.
        temperature: 0 takes the most likely token. top_p: nucleus.
        seed: seed of this answer's draws, which depend on nothing else.
        stop: the answer ends before any of these.
        allowed: the limit of the tokens; None: all.
        keeps_special: special tokens stay in the text, which is parsed for calls of tools.
        choices: the only answers, which are written as the prompt's task writes them; (): all.
        top_k: only this many of the most likely tokens are drawn; 0: all.
        min_p: only tokens are drawn that have at least this share of the most likely one's probability.
        repetition_penalty: divides positive logits of tokens in prompt or answer, and multiplies negative ones.
        frequency_penalty: subtracted from the logit of a token for each time that the answer has it.
        presence_penalty: subtracted once from the logit of a token that the answer has.
        logit_bias: tokens with what is added to their logits.
        logprobs: the number of most likely tokens that are sent with each token's log probability; None: none are sent.
        prompt_logprobs: send those of the prompt's tokens too, before the answer.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    as_trained: bool = False
    allowed: TokenConstraint | None = None
    choices: tuple[str, ...] = ()
    keeps_special: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    @property
    def adjusts(self) -> bool:
        """Return whether logits are changed before a token is chosen."""
        penalties = (self.repetition_penalty - 1, self.frequency_penalty, self.presence_penalty)
        return any(penalties) or bool(self.logit_bias)

    @property
    def truncates(self) -> bool:
        """Return whether only some of the tokens are drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class ResponseMetadata:
    """Details of an answer.

    Attributes:
        snapshot: number of the snapshot. weights: active adapter -> weight.
        template: task whose prompt was put around the text, "" for none.
        cut_tokens: tokens cut from the prompt to fit the snapshot's limits in training.
        ood_score: score from 0 to 1, near 1 for a text unlike all learned tasks; None: not computed.
        ood_distance: the distance behind the score, which has no upper limit. unknown: the text counts as one of no
            learned task; None: not known.
        queue_ms, retrieval_ms: time in the queue, and of routing (encoder, search, weights; shared by a routed batch).
        batch: number of texts that were routed together.
    """

    snapshot: int
    weights: Mapping[str, float]
    template: str = ""
    prompt_tokens: int = 0
    cut_tokens: int = 0
    ood_score: float | None = None
    ood_distance: float | None = None
    unknown: bool | None = None
    queue_ms: float = 0.0
    retrieval_ms: float = 0.0
    batch: int = 1


@dataclass(frozen=True)
class Started:
    """The mixture is known."""

    metadata: ResponseMetadata


@dataclass(frozen=True)
class TextDelta:
    """More text.

    Attributes:
        tokens: generated so far.
        finish: `stop` or `length` with the last piece, else None.
        logprobs: of the tokens since the piece before, the end of the sequence included, where they are wanted.
    """

    text: str
    tokens: int
    finish: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of the prompt's tokens from the second one on, and the first token, which has none."""

    first: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class LabelScores:
    """Label -> probability, the best first."""

    scores: Mapping[str, float]


@dataclass(frozen=True)
class Failed:
    """The request failed."""

    error: Exception


Event = Started | PromptLogprobs | TextDelta | LabelScores | Failed
