"""Generation requests, and the events that answer them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """Settings of drawing tokens (the usual terms).

    Attributes:
        as_trained: `max_tokens` is not the request's, so an answer is no longer than those of the task that it is from.
        temperature: 0 takes the most likely token. top_p: nucleus.
        seed: seed of this answer's draws, which depend on nothing else.
        stop: the answer ends before any of these.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    as_trained: bool = False


@dataclass(frozen=True)
class ResponseMetadata:
    """Details of an answer.

    Attributes:
        snapshot: number of the snapshot. weights: active adapter -> weight.
        template: task whose prompt was put around the text, "" for none.
        cut_tokens: tokens cut from the prompt to fit the snapshot's limits in training.
        ood_score: score from 0 to 1, near 1 for a text unlike all learned tasks; None: not computed.
        queue_ms, retrieval_ms: time in the queue, and of routing (encoder, search, weights; shared by a routed batch).
    """

    snapshot: int
    weights: Mapping[str, float]
    template: str = ""
    prompt_tokens: int = 0
    cut_tokens: int = 0
    ood_score: float | None = None
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
    """

    text: str
    tokens: int
    finish: str | None = None


@dataclass(frozen=True)
class LabelScores:
    """Label -> probability, the best first."""

    scores: Mapping[str, float]


@dataclass(frozen=True)
class Failed:
    """The request failed."""

    error: Exception


Event = Started | TextDelta | LabelScores | Failed


@dataclass
class GenerationRequest:
    """One answer to be generated.

    Attributes:
        send: takes events, from the thread that generates.
        sampling: how tokens are drawn; None: no text is generated.
        cancelled: set when the answer is no longer wanted.
        over: set with the last event.
        began: time of creation, by `time.perf_counter`.
    """

    text: str
    send: Callable[[Event], None]
    sampling: Sampling | None = None
    cancelled: bool = False
    over: bool = False
    began: float = field(default_factory=time.perf_counter)
