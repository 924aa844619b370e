"""Requests to the serving engine: a text, its snapshot, and the adapters that it selects.

A request's mixture is the router's, or the weights that the request pins.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from raycl.data.sources.conversation import has_tool_turns
from raycl.errors import BankError, RayclError
from raycl.generation.requests import Event, PromptLogprobs, Sampling, Started, TextDelta
from raycl.generation.task_prompts import PromptReading
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.errors import InvalidRequestError
from raycl.types import Mixture

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
class EngineRequest:
    """One answer from a snapshot: a text, a label, or the mixture alone.

    Attributes:
        send: takes events, from the engine's thread.
        sampling: how tokens are drawn; None: no text is generated.
        loaded: the snapshot that answers, from beginning to end.
        selection: which adapters are active.
        route_only: with `sampling` None, answer with the mixture only, not with a label.
        templated: the text is an input, and gets the prompt that its task was trained with.
        is_chat: the text stands for the messages of a conversation (`raycl.data.sources.conversation`).
        ids: the prompt's tokens, which `text` stands for; None: those of the text.
        is_scored: set when the log probabilities of its prompt have been sent.
        template: set by routing: task whose prompt the text gets; "": not known yet, or none.
        cancelled: set when the answer is no longer wanted. over: set with the last event.
        began: time of creation, by `time.perf_counter`.
    """

    text: str
    send: Callable[[Event], None]
    sampling: Sampling | None = None
    loaded: LoadedSnapshot = field(kw_only=True)
    selection: AdapterSelection = field(kw_only=True)
    route_only: bool = False
    templated: bool = True
    is_chat: bool = False
    ids: tuple[int, ...] | None = None
    is_scored: bool = False
    template: str = ""
    cancelled: bool = False
    over: bool = False
    began: float = field(default_factory=time.perf_counter)

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


FOUND = ("ood_scores", "ood_distances", "unknown")
"""Parts of a mixture beside its weights, that answers show."""

RoutePrompts = Callable[[LoadedSnapshot, Sequence[EngineRequest], Sequence[str]], Mixture]
"""Mixtures of the requests' prompts, each with the template of a task ("": none), by a router that reads prompts."""


def mixtures_of(
    loaded: LoadedSnapshot, requests: Sequence[EngineRequest], route_prompts: RoutePrompts
) -> list[Mixture]:
    """Return a mixture of one row for each request to a snapshot, over the request's active adapters alone.

    Args:
        route_prompts: routes prompts by the model, for snapshots whose router reads prompts.
    """
    named = cache(lambda pairs: loaded.named(Mixture.same(dict(pairs), 1)))  # many requests pin the same weights
    mixtures = {
        number: named(tuple(request.selection.weights.items()))
        for number, request in enumerate(requests)
        if request.selection.weights is not None
    }
    free = [number for number in range(len(requests)) if number not in mixtures]
    with_task = [number for number in free if requests[number].selection.task is not None]
    for group in (with_task, [number for number in free if requests[number].selection.task is None]):
        mixtures |= _routed(loaded, requests, group, route_prompts)
    return [mixtures[number] for number in range(len(requests))]


def _routed(
    loaded: LoadedSnapshot, requests: Sequence[EngineRequest], group: Sequence[int], route_prompts: RoutePrompts
) -> dict[int, Mixture]:
    """Return the router's mixtures for requests that all give a task id, or none of which does."""
    if not group:
        return {}
    mine = [requests[number] for number in group]
    tasks = [request.selection.task for request in mine if request.selection.task is not None]

    def mixture_of(templates: Sequence[str]) -> Mixture:
        if loaded.by_backbone:
            return route_prompts(loaded, mine, templates)
        pairs = zip(mine, templates, strict=True)
        seen = [loaded.seen(request.reading, task if request.templated else "") for request, task in pairs]
        return loaded.mixture(seen, tasks or None)

    whole, templates = loaded.route([request.reading for request in mine], mixture_of)
    mixtures = {}
    parts = {part: found.split(1) for part in FOUND if (found := getattr(whole, part)) is not None}
    for index, (number, row, template) in enumerate(zip(group, whole.active(), templates, strict=True)):
        requests[number].template = template
        names = tuple(whole.names[column] for column, _ in row)
        weights = whole.weights.new_tensor([[weight for _, weight in row]])
        mixture = Mixture(names, weights, **{part: found[index] for part, found in parts.items()})
        mixtures[number] = _hard(loaded, mixture) if requests[number].selection.hard else mixture
    return mixtures


def _hard(loaded: LoadedSnapshot, mixture: Mixture) -> Mixture:
    """Return the mixture of the task with the largest weight alone, scaled to a sum of 1."""
    task = loaded.largest(_weights(mixture))
    if not task:
        return mixture
    alone = mixture.weights * torch.tensor([[task in loaded.owners[key] for key in mixture.names]])
    return replace(mixture, weights=alone / alone.sum(1, keepdim=True))


def _weights(mixture: Mixture) -> dict[str, float]:
    return dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True))


def template_of(loaded: LoadedSnapshot, request: EngineRequest, mixture: Mixture) -> str:
    """Return the task whose prompt an input gets: that which routing found, else the one with the largest weight; "":
    none.

    Raises:
        InvalidRequestError: the router chooses no task, or the request gives several the same weight, and their prompts
            differ.
    """
    if request.template or request.selection.task:
        return request.template or str(request.selection.task)
    tasks, shares = request.reading.tasks, loaded.shares(_weights(mixture))
    first = loaded.largest(_weights(mixture), tasks) or (tasks[0] if tasks else "")
    equal = list(tasks or loaded.prompts)
    if request.selection.weights is not None:  # the request itself chooses the task that it gives the largest weight
        equal = [task for task in equal if task in shares and shares[task] == shares[first]]
    if not loaded.needs_task or len({loaded.prompts[task] for task in equal}) < 2:
        return first
    if request.route_only:
        return ""
    whole = (
        ", its instruction as the system message, or the whole prompt to /v1/completions" if request.sampling else ""
    )
    raise InvalidRequestError(
        f"snapshot {loaded.snapshot.number} has no router, and its tasks were learned with different prompts: "
        f"give the text's task by raycl.task ({', '.join(equal[:8])}){whole}"
    )


def heads_of(loaded: LoadedSnapshot, tasks: Sequence[str] | None) -> list[str]:
    """Rule `label_count`: whose head answers each example.

    Raises:
        BankError: no tasks are given, or one is unknown.
    """
    unknown = sorted(set(tasks or ()) - loaded.heads.keys())
    if tasks is None or unknown:
        raise BankError(
            f"the snapshot's label heads go by the task of each text (head_rule=label_count): got "
            f"{', '.join(unknown) or 'none'}, expected some of {', '.join(loaded.heads)}"
        )
    return [loaded.heads[task] for task in tasks]
