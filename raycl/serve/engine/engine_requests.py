"""Requests to the serving engine: a generation request, its snapshot, and the adapters that it selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from raycl.data.sources.conversation import has_tool_turns
from raycl.errors import RayclError
from raycl.generation.requests import Event, GenerationRequest, PromptLogprobs, Started, TextDelta
from raycl.generation.task_prompts import PromptReading
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot

CLOSED = "the server is shutting down: retry in a moment"

FAILURES = (
    *(RayclError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of one answer that do not affect others; any other error ends the replica, and Serve starts another."""


@dataclass(frozen=True)
class AdapterSelection:
    """The adapters that a request selects.

    Attributes:
        weights: adapter -> weight, as the request pinned them; {} is the bare backbone; None: the router decides.
        task: its name, where the request gives it.
        hard: only the adapters of the task with the largest weight are active, scaled to a sum of 1.
    """

    weights: Mapping[str, float] | None = None
    task: str | None = None
    hard: bool = False


@dataclass
class EngineRequest(GenerationRequest):
    """One answer from a snapshot: a text, a label, or the mixture alone.

    Attributes:
        loaded: the snapshot that answers, from beginning to end.
        selection: which adapters are active.
        route_only: with `sampling` None, answer with the mixture only, not with a label.
        templated: the text is an input, and gets the prompt that its task was trained with.
        is_chat: the text stands for the messages of a conversation (`raycl.data.sources.conversation`).
        ids: the prompt's tokens, which `text` stands for; None: those of the text.
        is_scored: set when the log probabilities of its prompt have been sent.
        template: set by routing: task whose prompt the text gets; "": not known yet, or none.
    """

    loaded: LoadedSnapshot = field(kw_only=True)
    selection: AdapterSelection = field(kw_only=True)
    route_only: bool = False
    templated: bool = True
    is_chat: bool = False
    ids: tuple[int, ...] | None = None
    is_scored: bool = False
    template: str = ""

    @property
    def is_refused(self) -> bool:
        """Return whether a text of no learned task gets no answer."""
        return self.loaded.rule.policy == "refuse" and not self.route_only

    @cached_property
    def has_tools(self) -> bool:
        """Return whether its conversation offers or used tools: it is never cut."""
        return self.is_chat and has_tool_turns(self.text)

    @cached_property
    def reading(self) -> PromptReading:
        """The text as the snapshot reads it."""
        return self.loaded.reading(self.text, self.is_chat, self.selection.task)


def is_last(event: Event, route_only: bool = False) -> bool:
    """Return whether nothing comes after it.

    Args:
        route_only: the request is answered with its mixture.
    """
    if isinstance(event, Started):
        return route_only
    if isinstance(event, PromptLogprobs):
        return False
    return not isinstance(event, TextDelta) or event.finish is not None
