"""Converts items of a file to rows: finds the fields of the text and the answers.

Every format ends in items with named fields, and people name them differently: text and label, instruction with input
and output, prompt and completion, messages of a conversation.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

from raycl.data.sources.conversation import (
    BESIDE,
    CHAT_NAMES,
    HISTORY,
    SYSTEM,
    TOOLS,
    Message,
    RefuseRow,
    Turns,
    earlier_turns,
    is_chat,
    system_of,
    text_of,
    tools_of,
    turns_of,
    with_tools,
)
from raycl.data.sources.reading import BadRow, Findings

TEXT_NAMES = ("text", "input", "sentence", "prompt")
LABEL_NAMES = ("label", "output", "completion", "response")
INSTRUCTION, INSTRUCTION_INPUT = "instruction", "input"
QUESTION, CHOICES, ANSWER, LETTERS = "question", "choices", "answer", "ABCDEFGHIJ"
CHOICES_HEADER = (QUESTION, *LETTERS[:4], ANSWER)
"""Columns of MMLU's CSV files, which have no header line."""
PREFERENCE_NAMES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
"""Fields of pairs of answers, of which the first is preferred: TRL's and OpenAI's."""


class Refuse(Protocol):
    """Raises a DataError about a source, or a BadRow about one row of it (1-based)."""

    def __call__(self, problem: str, row: int | None = None) -> NoReturn: ...


class SourceRow(NamedTuple):
    """One example as it is on disk.

    Attributes:
        number: 1-based position in its file: the line for JSON lines, the row below the header for CSV.
        text: the input.
        references: acceptable answers, at least one; an empty text where no answers are read.
        is_chat: the text stands for the messages of a conversation (`raycl.data.sources.conversation`).
        group: value shared by rows that belong together, by `Columns.group`; "" without one.
        others: the item's other fields, where `Columns.others` keeps them; else None.
    """

    number: int
    text: str
    references: tuple[str, ...]
    is_chat: bool = False
    group: str = ""
    others: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Columns:
    """Names under which text and label are looked for (the first that a row has), and a missing CSV header.

    A name with dots is a field of a field (`answers.text`). No names for the label: texts alone are read.

    Attributes:
        parts: fields that are the text together, one below the other, instead of `text`.
        turns: which turns of conversations are rows.
        group: field whose value is the same in rows that belong together; "": none.
        others: rows keep the fields that are not their text.
        setting: what stands before `text` and `label` where they are named, for messages; "": they cannot be.
    """

    text: tuple[str, ...] = TEXT_NAMES
    label: tuple[str, ...] = LABEL_NAMES
    header: tuple[str, ...] | None = None
    parts: tuple[str, ...] = ()
    turns: Turns = "all"
    group: str = ""
    others: bool = False
    setting: str = "columns."

    @property
    def is_default(self) -> bool:
        """Return whether the text is looked for under the usual names."""
        return self.text == TEXT_NAMES and not self.parts

    def needed(self, names: Sequence[str], refuse: Refuse) -> list[str]:
        """Return those of a table's columns that rows are made of.

        Raises:
            DataError: the text or the label has no column, or the table holds preferences.
        """
        columns = self._needed(names, refuse)
        twice = [name for name in dict.fromkeys(columns) if columns.count(name) > 1]
        if twice:
            refuse(f"several columns have the name '{twice[0]}': expected one, rename or remove the others")
        if self.others:
            return list(names)
        group = _column(self.group, names) if self.group else None
        return columns if group is None or group in columns else [*columns, group]

    def _needed(self, names: Sequence[str], refuse: Refuse) -> list[str]:
        refuse_preferences(names, self, refuse)
        if self.is_default:
            chats = [name for name in CHAT_NAMES if name in names]
            if chats:
                return [name for name in names if name in (chats[0], *BESIDE)]
            if has_choices(names):
                return [name for name in names if name in (*CHOICES_HEADER, CHOICES)]
        texts = self.parts or self.text
        if self.is_default and INSTRUCTION in names:
            texts = (INSTRUCTION, *texts)
        for role, wanted, every in (("text", texts, bool(self.parts)), ("label", self.label, False)):
            there = [name for name in wanted if _column(name, names)]
            if wanted and (not there or (every and len(there) < len(wanted))):
                mend = f"set {self.setting}{role}" if self.setting else "rename a column"
                refuse(
                    f"no {role} column among {', '.join(names) or 'no columns'}: expected "
                    f"{(' and ' if every else ' or ').join(wanted)}, or {mend}"
                )
        beside = () if self.is_default and INSTRUCTION not in names else BESIDE
        columns = {_column(name, names) for name in (*texts, *self.label, *beside)}
        return [name for name in names if name in columns]


def has_choices(names: Collection[str]) -> bool:
    """Return whether rows are questions with choices, in one column of lists or in columns A to D (MMLU)."""
    return {QUESTION, ANSWER} <= set(names) and (CHOICES in names or set(CHOICES_HEADER) <= set(names))


def _column(name: str, names: Sequence[str]) -> str | None:
    """Return the column of a name, which may be a field of a field."""
    return name if name in names else next((first for first in [name.partition(".")[0]] if first in names), None)


def refuse_preferences(names: Sequence[str], columns: Columns, refuse: RefuseRow) -> None:
    """Refuse pairs of a chosen and a rejected answer; they are for preference optimisation, which no method here does.

    Raises:
        DataError: they are such pairs, and the columns that shall be read are not named.
    """
    pair = next((pair for pair in PREFERENCE_NAMES if set(pair) <= set(names)), None)
    if pair is not None and (columns.is_default or columns.label == LABEL_NAMES):
        named = f"{columns.setting or 'columns.'}text=prompt {columns.setting or 'columns.'}label={pair[0]}"
        refuse(
            f"the rows hold preferences ({', '.join(pair)}), from which no method here learns: expected an answer for "
            f"each text; name the columns, for example {named}, to learn the {pair[0]} answers alone"
        )


def usable_rows(
    items: Iterable[tuple[int, Any]], columns: Columns, refuse: Refuse, findings: Findings
) -> Iterator[SourceRow]:
    """Yield the rows of numbered items, without those that cannot be used.

    Raises:
        DataError: a row cannot be used, and such rows are refused.
    """
    for number, item in items:
        try:
            rows = rows_of(item, number, columns, refuse)
        except BadRow as problem:
            problem.item = item
            findings.bad_row(problem)
        else:
            yield from rows


def rows_of(item: Any, number: int, columns: Columns, refuse: Refuse) -> list[SourceRow]:
    """Return the row of an item; of a conversation, one for each of the assistant's turns.

    Raises:
        DataError: the item is no object, or text or answer is missing or of another type.
    """
    refuse_row = partial(refuse, row=number)
    rows = list(_rows_of(item, number, columns, refuse_row))
    for row in rows:
        if row.text.isascii() and all(map(str.isascii, row.references)):
            continue
        if problem := half_character(row.text) or half_character("".join(row.references)):
            refuse_row(problem)
    if columns.group:
        value = _field(item, (columns.group,))
        if value is not None and value != "":
            rows = [row._replace(group=str(value)) for row in rows]
    if columns.others:
        rows = [row._replace(others=other_fields(item, columns)) for row in rows]
    return rows


def other_fields(item: Any, columns: Columns) -> dict[str, Any]:
    """Return the fields of an item that are not its text; an item that is no object has none."""
    if not isinstance(item, Mapping):
        return {}
    names = (*CHAT_NAMES, *columns.text) if columns.is_default else columns.text
    text = next((name for name in names if name in item), None)
    return {name: value for name, value in item.items() if name != text}


def without_nulls(item: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return an item of an Arrow table, whose conversation and tools lack the keys that only other rows have.

    Arrow gives all objects of a column the same keys, and null for those that an object does not have.
    """
    nested = {*CHAT_NAMES, TOOLS, *columns.text}
    return {name: _dense(value) if name in nested else value for name, value in item.items()}


def _dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dense(inner) for key, inner in value.items() if inner is not None}
    return list(map(_dense, value)) if isinstance(value, list) else value


def half_character(text: str) -> str:
    """Describe what is wrong with a text that was cut inside an emoji and ends in half a surrogate pair; or ""."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return (
            f"half a character ({half} at character {error.start + 1}): expected whole ones, repair or remove the row"
        )
    return ""


def _rows_of(item: Any, number: int, columns: Columns, refuse: RefuseRow) -> Iterator[SourceRow]:
    if not isinstance(item, Mapping):
        wanted = " and ".join((columns.text[0], *columns.label[:1]))
        refuse(f"found a {kind_of(item)}: expected an object with {wanted}")
    refuse_preferences(list(item), columns, refuse)
    if columns.is_default and has_choices(item):
        yield _with_choices(item, number, bool(columns.label), refuse)
        return
    messages = _conversation(item, columns, refuse)
    if messages is not None:
        system, tools = system_of(item, refuse), tools_of(item, refuse)
        for text, answer in turns_of(messages, bool(columns.label), refuse, columns.turns, system, tools):
            yield SourceRow(number, text, (answer,), is_chat=True)
        return
    text, has_turns = _text(item, columns, refuse), False
    if _is_instruction(item, columns):  # with a system message, tools and the turns before it
        system, tools = system_of(item, refuse), tools_of(item, refuse)
        earlier = earlier_turns(item.get(HISTORY), refuse)
        if has_turns := bool(tools or {SYSTEM, HISTORY} & set(item)):
            opening = [Message("system", system)] if system else []
            text = text_of(with_tools([*opening, *earlier, Message("user", text)], tools))
    if not columns.label:
        yield SourceRow(number, text, ("",), has_turns)
        return
    yield SourceRow(number, text, _references(_field(item, columns.label), columns.label[0], refuse), has_turns)


def _with_choices(item: Mapping[str, Any], number: int, answered: bool, refuse: RefuseRow) -> SourceRow:
    """Return a question and its choices, as SLM's table 9 writes them; the answer is a letter."""
    choices = item[CHOICES] if CHOICES in item else [item[letter] for letter in CHOICES_HEADER[1:-1]]
    if not isinstance(choices, list) or not 0 < len(choices) <= len(LETTERS):
        refuse(f"the choices are a {kind_of(choices)}: expected a list of 1 to {len(LETTERS)} texts")
    texts = [_string(choice, CHOICES, refuse) for choice in choices]
    text = f"Question: {_string(item[QUESTION], QUESTION, refuse)}\nChoices: [{', '.join(texts)}]"
    if not answered:
        return SourceRow(number, text, ("",))
    letters, answer = LETTERS[: len(texts)], item[ANSWER]
    answer_letter = str(answer).strip()
    if answer_letter.isdigit() and int(answer_letter) < len(letters):
        answer_letter = letters[int(answer_letter)]
    if isinstance(answer, bool) or len(answer_letter) != 1 or answer_letter not in letters:
        refuse(f"the answer is '{answer}': expected a letter from A to {letters[-1]} or a number from 0")
    return SourceRow(number, text, (answer_letter,))


def _conversation(item: Mapping[str, Any], columns: Columns, refuse: RefuseRow) -> Any:
    """Return the item's messages; None if it is no conversation."""
    if columns.parts:
        return None
    names = CHAT_NAMES if columns.is_default else columns.text
    value = _field(item, names)
    if is_chat(value):
        return value
    if columns.is_default and value is not None and _field(item, (INSTRUCTION, *columns.text)) is None:
        kind = "an empty list" if value == [] else f"a {kind_of(value)}"
        refuse(f"the conversation is {kind}: expected a list of messages with role and content")
    return None


def _text(item: Mapping[str, Any], columns: Columns, refuse: RefuseRow) -> str:
    if columns.parts:
        return "\n".join(_string(_field(item, (name,)), name, refuse) for name in columns.parts)
    if _is_instruction(item, columns):
        instruction = _string(item[INSTRUCTION], INSTRUCTION, refuse)
        more = _string(item.get(INSTRUCTION_INPUT) or "", INSTRUCTION_INPUT, refuse)
        return f"{instruction}\n\n{more}" if more.strip() else instruction
    return _string(_field(item, columns.text), columns.text[0], refuse)


def _is_instruction(item: Mapping[str, Any], columns: Columns) -> bool:
    """Return whether a row is an instruction with or without an input (Alpaca)."""
    return columns.is_default and INSTRUCTION in item and not {"text", "sentence", "prompt"} & set(item)


def _string(value: Any, name: str, refuse: RefuseRow) -> str:
    if not isinstance(value, str):
        refuse(f"the {name} is a {kind_of(value)}: expected a string, repair or remove the row")
    return value


def _field(item: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in item:
            return item[name]
        first, dot, rest = name.partition(".")
        if dot and isinstance(item.get(first), Mapping):
            return _field(item[first], (rest,))
    return None


def _references(value: Any, name: str, refuse: RefuseRow) -> tuple[str, ...]:
    """Return a string, a whole number (as class ids are stored) or a list of these."""
    if value is None:
        refuse(f"no {name}: expected a string or a list of strings, complete or remove the row")
    values = value if isinstance(value, list) else [value]
    if not values:
        refuse(f"the list of references in {name} is empty: expected at least one, complete or remove the row")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int):
            refuse(f"the {name} is a {kind_of(item)}: expected a string, repair or remove the row")
    return tuple(str(item) for item in values)


def kind_of(value: Any) -> str:
    """Describe the type of a value, for messages."""
    return "missing value" if value is None else type(value).__name__
