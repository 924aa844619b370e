"""What the engine is asked, and what it says: one request for one answer, and the events of that answer.

What it does not know: HTTP, models, snapshots' contents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raycl.errors import RayclError
from raycl.serve.engine.model_host import Hosted

CLOSED = "the server is shutting down: ask again in a moment"

FAILURES = (
    *(RayclError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""What one answer may fail with while others go on; anything else ends the replica, and Serve starts another."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn (the usual terms).

    Attributes:
        temperature: 0 takes the most likely token. top_p: nucleus.
        seed: of this answer's draws, which depend on nothing else.
        stop: the answer ends before any of these.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Who should speak.

    Attributes:
        weights: adapter -> weight, as the request pinned them; {} is the bare backbone; None: the router decides.
        task: where the request knows it.
        hard: only the loudest task's adapters speak, at the weights among them.
    """

    weights: Mapping[str, float] | None = None
    task: str | None = None
    hard: bool = False


@dataclass(frozen=True)
class Made:
    """How an answer was made.

    Attributes:
        snapshot: number. weights: adapter -> weight of those that spoke.
        template: task whose prompt was put around the text, "" for none.
        cut_tokens: of the prompt, to fit what the snapshot was trained on.
        unfamiliar: from 0 to 1, near 1 for a text like none that was learned; None: not asked, or not known.
        queue_ms, retrieval_ms: waiting, and choosing (encoder, search, weights; shared by those chosen for together).
    """

    snapshot: int
    weights: Mapping[str, float]
    template: str = ""
    prompt_tokens: int = 0
    cut_tokens: int = 0
    unfamiliar: float | None = None
    queue_ms: float = 0.0
    retrieval_ms: float = 0.0
    batch: int = 1


@dataclass(frozen=True)
class Started:
    """The mixture is known."""

    made: Made


@dataclass(frozen=True)
class Piece:
    """More text.

    Attributes:
        tokens: generated so far.
        finish: `stop` or `length` with the last piece, else None.
    """

    text: str
    tokens: int
    finish: str | None = None


@dataclass(frozen=True)
class Labelled:
    """Label -> probability, the best first."""

    scores: Mapping[str, float]


@dataclass(frozen=True)
class Failed:
    """Nothing came of it."""

    error: Exception


Event = Started | Piece | Labelled | Failed


@dataclass
class Ask:
    """One answer to be made.

    Attributes:
        hosted: the snapshot that answers, from beginning to end.
        sampling: None: a label, or with `route_only` nothing but the mixture.
        templated: the text is an input, and gets the prompt that its task was trained with.
        send: takes events, from the engine's thread.
        cancelled: set by whoever does not want it any more.
        over: set by the engine with the last event.
        template: set by the engine: task whose template routing has read the text with; "" for none.
    """

    text: str
    hosted: Hosted
    choice: Choice
    send: Callable[[Event], None]
    sampling: Sampling | None = None
    route_only: bool = False
    templated: bool = True
    cancelled: bool = False
    over: bool = False
    template: str = ""
    began: float = field(default_factory=time.perf_counter)


def is_last(ask: Ask, event: Event) -> bool:
    """Whether nothing comes after it."""
    if isinstance(event, Started):
        return ask.route_only
    return not isinstance(event, Piece) or event.finish is not None
