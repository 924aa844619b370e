"""Token lengths that fit the data, where a stream's config leaves them to it (`auto`), and what is cut nevertheless."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from raycl.data.prepare import TokenLimits, leaves_room
from raycl.data.settings import MOST_LENGTHS, USUAL_LENGTHS
from raycl.data.stream import Stream
from raycl.data.tokens import SPLITS, TokenTable
from raycl.errors import counted
from raycl.types import Task, TextCodec

STEP = 8
"""Lengths that follow the data are multiples of this, unless the backbone's positions end before."""


@dataclass(frozen=True)
class Positions:
    """A backbone's positions for texts; infinite without a limit.

    Attributes:
        prompt: those of a prompt, with its answer where both are one sequence.
        answer: those of an answer, with its prompt where both are one sequence.
    """

    prompt: float
    answer: float


def fit_lengths(stream: Stream, codec: TextCodec, positions: Positions) -> Stream:
    """Return the stream with a number for every length that is `auto`, recorded by task in its config.

    A task's lengths are those of its own rows of all splits, so they do not depend on the other tasks of the stream.
    """
    (source, sources), (target, targets) = stream.config.token_settings
    tasks = [task for task in (*stream.tasks, *stream.unseen) if stream.has_data(task)]
    long = {task.name for task in tasks if sources.get(task.name, source) == "auto"}
    wordy = {task.name for task in tasks if targets.get(task.name, target) == "auto" and not codec.needs_labels}
    if not long and not wordy:
        return stream
    shared = codec.capabilities.one_sequence
    prompts = max(_numbers(source, sources), default=min(USUAL_LENGTHS[0], positions.prompt // 2)) if shared else 0
    most_target = max(2, min(MOST_LENGTHS[1], positions.answer - prompts))
    answers = max(_numbers(target, targets), default=min(USUAL_LENGTHS[1], most_target))
    most_source = min(MOST_LENGTHS[0], positions.prompt - (answers if shared else 0))
    found = {}
    for task in tasks:
        if task.name in long | wordy:
            own, answer = stream.config.limits_of(task.name)
            if task.name in long:
                own = int(min(own, most_source))
                fits = not stream.is_chat(task) and leaves_room(stream.prompt(task, codec), codec, own)
                own = own if fits else int(most_source)  # tools of conversations are not cut
            answer = int(min(answer, most_target)) if task.name in wordy else answer
            found[task.name] = _longest(_tables(stream, task, codec, TokenLimits(own, answer)))
    fitting = {name: int(min(most_target, max(USUAL_LENGTHS[1], found[name].target))) for name in wordy}
    targets = {**targets, **fitting}
    if shared:
        most_source = min(MOST_LENGTHS[0], positions.prompt - max(_numbers(target, targets), default=answers))
    fitting = {name: int(min(most_source, max(USUAL_LENGTHS[0], found[name].source))) for name in long}
    sources = {**sources, **fitting}
    changed = {"max_source_tokens_by_task": sources, "max_target_tokens_by_task": targets}
    return replace(stream, config=stream.config.model_copy(update=changed))


def _numbers(every: int | str, by_task: Mapping[str, int | str]) -> list[int]:
    return [limit for limit in (every, *by_task.values()) if isinstance(limit, int)]


def _tables(stream: Stream, task: Task, codec: TextCodec, limits: TokenLimits) -> list[TokenTable]:
    return [stream.table(task, split, codec, limits) for split in SPLITS if len(stream.rows(task, split))]


def _longest(tables: Iterable[TokenTable]) -> TokenLimits:
    """Return the tokens of the longest source and of the longest target before they were cut, rounded up."""
    source = target = 0
    for table in tables:
        sources, targets = table.cuts
        source = max(source, sources.limit + sources.most if sources.rows else int(table.source_lengths.max()))
        target = max(target, targets.limit + targets.most if targets.rows else 0)
    return TokenLimits(-(-source // STEP) * STEP, -(-target // STEP) * STEP)


def measure_cuts(stream: Stream, codec: TextCodec, positions: Positions) -> dict[str, dict[str, Any]]:
    """Return what is cut of each task's rows: task -> split -> side -> the numbers of `Cut`, the split's rows (`of`),
    and the most tokens for which the backbone has positions (`room`; None: no limit).

    Sides are `sources` and `targets`; what is whole is left out.
    """
    measured: dict[str, dict[str, Any]] = {}
    for task in (*stream.tasks, *stream.unseen):
        if not stream.has_data(task):
            continue
        limits = stream.limits(task, codec)
        shared = codec.capabilities.one_sequence
        room = {
            "sources": positions.prompt - (limits.target if shared else 0),
            "targets": positions.answer - (limits.source if shared else 0),
        }
        for table in _tables(stream, task, codec, limits):
            for side, cut in zip(room, table.cuts, strict=True):
                if cut.rows:
                    numbers = {"of": len(table), **asdict(cut), "room": _finite(room[side])}
                    measured.setdefault(task.name, {}).setdefault(table.split, {})[side] = numbers
    return measured


def _finite(positions: float) -> int | None:
    return None if positions == math.inf else int(positions)


def lines_of_cuts(stream: Stream, task: Task) -> Iterator[str]:
    """Yield a sentence for each side of a task's splits of which rows are cut."""
    where = {
        "sources": ("prompt", "they lose their oldest turns" if stream.is_chat(task) else "their inputs lose the end"),
        "targets": ("answer", "they lose the end"),
    }
    settings = {"sources": "stream.max_source_tokens_by_task", "targets": "stream.max_target_tokens_by_task"}
    for split, sides in stream.cuts.get(task.name, {}).items():
        for side, cut in sides.items():
            name, lost = where[side]
            longest, room = cut["limit"] + cut["most"], cut["room"]
            advice = f"to keep them whole set {settings[side]}.{task.name}={longest}"
            if room is not None and longest > room:
                advice = "choose a backbone with more positions or shorten the texts"
                if cut["limit"] < room:
                    advice = f"to keep more of them set {settings[side]}.{task.name}={room}, or {advice}"
            mean = counted(round(cut["tokens"] / cut["rows"]), "token")
            be = "is" if cut["rows"] == 1 else "are"
            yield (
                f"{cut['rows']:,} of {counted(cut['of'], name)} of {split} {be} cut to {cut['limit']} tokens: {lost}, "
                f"{mean} on average and {cut['most']:,} at most; {advice}"
            )
