"""Tokenisation: chosen rows of a split become a memory-mapped table of ids, once per node.

A prompt that is too long must lose the end of its *input*, never its instruction or its answer cue, and how often that
happened must be known.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from raycl.data.prompts import Prompt
from raycl.data.sources.cache import Indices, Info, entry, key_of
from raycl.data.sources.conversation import remarked
from raycl.data.sources.ingest import RawRows
from raycl.data.text_objectives import check_objective, whole_texts
from raycl.data.tokens import Cut, Split, TokenTable
from raycl.errors import ConfigError, ConversationError, DataError
from raycl.types import Task, TextCodec

MIN_TEXT_TOKENS = 4
"""A prompt must leave at least this many tokens for the input text."""

_VERSION = 4
_BATCH = 512
_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    [
        ("source_ids", _IDS),
        ("target_ids", _IDS),
        ("label", pa.int32()),
        ("references", pa.list_(pa.string())),
        ("row", pa.int64()),
        ("text", pa.string()),
    ]
)


@dataclass(frozen=True)
class TokenLimits:
    """Token limits, special tokens included."""

    source: int
    target: int


@dataclass(frozen=True)
class Chosen:
    """Rows of a split that are used.

    Attributes:
        rows: ascending positions in `raw`.
        picks: for each row the one reference to keep, or None to keep all.
    """

    raw: RawRows
    rows: Indices
    picks: Indices | None = None


def check_codec(task: Task, prompt: Prompt, codec: TextCodec, lengths: TokenLimits) -> None:
    """Refuse what could not be tokenised sensibly.

    Raises:
        DataError: a free-text task for an encoder-only backbone.
        ConfigError: the prompt alone fills the source, or the backbone cannot learn this way.
    """
    check_objective(task.objective, codec)
    if codec.needs_labels and task.labels is None and task.objective == "answer":
        raise DataError(
            f"task '{task.name}' has free-text answers: an encoder-only backbone needs a closed label set, "
            "choose a text-to-text backbone or give the task labels"
        )
    try:
        template = len(prompt.encode([""], codec)[0])
    except ConversationError as error:
        advice = ", or put the instruction into the user's turn (stream.instruction_turn=user)" if prompt.system else ""
        raise ConfigError(f"task '{task.name}': {error}{advice}") from error
    if template + MIN_TEXT_TOKENS > lengths.source:
        raise ConfigError(
            f"the prompt of task '{task.name}' takes {template} tokens before any input text, but sources hold "
            f"{lengths.source}: set max_source_tokens to at least {template + MIN_TEXT_TOKENS} (and better to twice "
            "that), or prompt: plain"
        )


def prepare(
    task: Task, split: Split, chosen: Chosen, prompt: Prompt, codec: TextCodec, lengths: TokenLimits, cache: Path
) -> TokenTable:
    """Return the token table of `chosen`; another process of this node with the same request gets the same file.

    Raises:
        DataError, ConfigError: see `check_codec`.
    """
    check_codec(task, prompt, codec, lengths)
    picks = None if chosen.picks is None else chosen.picks.tolist()
    key = key_of(
        *(_VERSION, chosen.raw.key, task.name, task.labels, split, chosen.rows.tolist(), picks),
        *(asdict(prompt), codec.fingerprint, codec.needs_labels, asdict(lengths), task.objective),
    )

    def build(writer: pa.RecordBatchFileWriter) -> Info:
        return _tokenise(task, chosen, prompt, codec, lengths, writer)

    return TokenTable(task, split, entry(cache / "tokens", key, _SCHEMA, build))


def leaves_room(prompt: Prompt, codec: TextCodec, limit: int) -> bool:
    """Return whether a prompt leaves room for text in this many tokens."""
    return len(prompt.encode([""], codec)[0]) + MIN_TEXT_TOKENS <= limit


def _tokenise(
    task: Task, chosen: Chosen, prompt: Prompt, codec: TextCodec, lengths: TokenLimits, writer: pa.RecordBatchFileWriter
) -> Info:
    raw = chosen.raw.open()
    cut_sources: list[int] = []
    cut_targets: list[int] = []
    codes = {label: code for code, label in enumerate(task.labels or ())}
    for start in range(0, len(chosen.rows), _BATCH):
        part = slice(start, start + _BATCH)
        rows = chosen.rows[part]
        texts = raw.values("text", rows)
        references: list[list[str]] = raw.values("references", rows)
        if chosen.picks is not None:
            references = [[names[n]] for names, n in zip(references, chosen.picks[part].tolist(), strict=True)]
        numbers = raw.values("row", rows)
        targets: list[list[int]] = [[]] * len(texts)
        with naming_rows(chosen.raw, numbers):
            if task.objective == "clm":
                sources, cut = whole_texts(texts, codec, lengths.source)
            else:
                sources, cut, _ = fit_sources(texts, prompt, codec, lengths.source)
            cut_sources += cut
            if task.objective == "answer":
                targets, cut = fit_targets(texts, [names[0] for names in references], prompt, codec, lengths.target)
                cut_targets += cut
                references = prompt.as_generated(texts, references, codec)
        labels = [codes.get(names[0], -1) for names in references]
        columns = [sources, targets, labels, references, numbers, texts]
        writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    return {
        "count": len(chosen.rows),
        "sources": asdict(Cut(lengths.source, len(cut_sources), sum(cut_sources), max(cut_sources, default=0))),
        "targets": asdict(Cut(lengths.target, len(cut_targets), sum(cut_targets), max(cut_targets, default=0))),
        "has_targets": not codec.needs_labels or task.objective != "answer",
    }


@contextmanager
def naming_rows(raw: RawRows, numbers: Sequence[int]) -> Iterator[None]:
    """Add the file and row to errors about a conversation.

    Args:
        numbers: numbers of the rows whose texts are encoded inside.

    Raises:
        DataError: the chat template cannot render one.
    """
    try:
        yield
    except ConversationError as error:
        raise DataError(f"{raw.where}, row {numbers[error.index]}: {error}") from error


def fit_remarked(
    texts: Sequence[str], remarks: Sequence[str], prompt: Prompt, codec: TextCodec, limit: int
) -> list[list[int]]:
    """Return the prompt ids of texts with a remark each behind what the user said last.

    Texts are cut as `fit_sources` cuts them without remarks, and remarks are not cut.
    """
    shorter = fit_sources(texts, prompt, codec, limit)[2]
    return prompt.encode([remarked(text, remark) for text, remark in zip(shorter, remarks, strict=True)], codec)


def fit_sources(
    texts: Sequence[str], prompt: Prompt, codec: TextCodec, limit: int
) -> tuple[list[list[int]], list[int], list[str]]:
    """Return prompt ids of at most `limit` tokens, the tokens above it of each text that was cut, and the texts left.

    Only the input text is shortened (`Prompt.shortened`), by what its prompt has too much: a tokenizer may split the
    joint of text and suffix otherwise than it splits the parts.
    """
    ids, left = prompt.encode(texts, codec), list(texts)
    room = limit - len(prompt.encode([""], codec)[0])
    long = [row for row, row_ids in enumerate(ids) if len(row_ids) > limit]
    cut = [len(ids[row]) - limit for row in long]
    shortened = {row: prompt.shortened(texts[row], limit, room, codec) for row in long}
    tried = {row: next(shorter) for row, shorter in shortened.items()}
    tried_ids: dict[tuple[int, str], list[int]] = {}
    while tried:
        rows = list(tried)
        try:
            encoded = prompt.encode(list(tried.values()), codec)
        except ConversationError as error:
            raise ConversationError(error.problem, rows[error.index]) from error
        for row, row_ids in zip(rows, encoded, strict=True):
            tried_ids[row, tried[row]] = row_ids
            try:
                tried[row] = shortened[row].send(len(row_ids))
            except StopIteration as end:
                ids[row], left[row] = tried_ids[row, end.value], end.value
                del tried[row]
            except ConversationError as error:
                raise ConversationError(error.problem, row) from error
    return ids, cut, left


def fit_prompts(
    texts: Sequence[str], prompts: Sequence[Prompt], codec: TextCodec, limits: Sequence[int]
) -> list[list[int]]:
    """Return ids of texts in prompts and with limits of their own, as `fit_sources` gives them."""
    ids: dict[int, list[int]] = {}
    for prompt, limit in dict.fromkeys(zip(prompts, limits, strict=True)):
        rows = [row for row, row_prompt in enumerate(prompts) if row_prompt == prompt and limits[row] == limit]
        ids |= zip(rows, fit_sources([texts[row] for row in rows], prompt, codec, limit)[0], strict=True)
    return [ids[row] for row in range(len(texts))]


def fit_targets(
    texts: Sequence[str], answers: Sequence[str], prompt: Prompt, codec: TextCodec, limit: int
) -> tuple[list[list[int]], list[int]]:
    """Return ids of the answers to `texts`, cut to `limit` with end-of-sequence id, and how many tokens each lost."""
    ids = prompt.encode_answers(texts, answers, codec)
    cut = [len(answer_ids) - limit for answer_ids in ids if len(answer_ids) > limit]
    return [
        answer_ids if len(answer_ids) <= limit else [*answer_ids[: limit - 1], answer_ids[-1]] for answer_ids in ids
    ], cut
