"""The wire: requests and answers of the OpenAI-compatible endpoints, and raycl's own beside them.

Field names and shapes are OpenAI's (platform.openai.com/docs/api-reference); what is raycl's stands under `raycl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raycl.data.sources.conversation import Message as Turn
from raycl.data.sources.conversation import text_of
from raycl.errors import meant

MAX_STOPS, MAX_STOP, MAX_NAME, MAX_WEIGHT, MAX_NUMBER, MAX_PINNED = 16, 256, 200, 1000.0, 10**9, 1000
"""Stops of an answer, characters of one, characters of a name, an adapter's weight either way, a snapshot's number,
adapters that a request pins."""


AnyText = Annotated[str, StringConstraints(min_length=0)]
"""Any text; with a length constraint pydantic finds lone surrogates, which no tokenizer takes."""

Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
"""Several; the first that is wrong ends the check, since messages for tens of thousands take seconds."""
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
Weight = Annotated[FiniteFloat, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]


def _check_unsupported(value: Any) -> None:
    if value:
        raise PydanticCustomError("unsupported", "Input is not supported by this endpoint: leave it out")


Unsupported = Annotated[
    Any,
    AfterValidator(_check_unsupported),
    WithJsonSchema({"enum": [None, False, 0, [], {}], "description": "not supported: empty, or left out"}),
]
"""A field of OpenAI's that would change the answer; clients that send what it is by default are understood."""

UnsupportedLogprobs = Annotated[
    Any,
    AfterValidator(lambda value: _check_unsupported(value is not None and value is not False)),
    WithJsonSchema({"enum": [None, False], "description": "not supported: left out"}),
]
"""The same for a count of tokens' chances, of which 0 is one: that of the token taken."""


def _check_few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_PINNED:
        raise PydanticCustomError(
            "too_many",
            "Input names {count} adapters: at most {most} are read",
            {"count": len(value), "most": MAX_PINNED},
        )
    return value


class Wire(BaseModel):
    """Unknown fields are ignored, as clients of many versions send them; wrong types are not, null is the default.

    Known fields that would change the answer and are not supported are rejected (`Unsupported`).
    """

    model_config = ConfigDict(extra="ignore", strict=True)


class Pins(Wire):
    """The snapshot, adapters or task that a request pins; together with `model`, the narrower one counts.

    No client of OpenAI's sends this object, so an unknown field in it is a mistake, and would change the answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    snapshot: int | None = Field(None, ge=1, le=MAX_NUMBER, description="answer from this snapshot")
    adapters: Annotated[dict[Name, Weight] | None, BeforeValidator(_check_few)] = Field(
        None, description="adapter -> weight; {} is the bare backbone"
    )
    task: Name | None = Field(
        None,
        description="the text's task: its prompt, and its adapters where the router goes by task ids, not by texts",
    )
    mix: bool = Field(True, description="false: only the best task's adapters")
    template: bool | None = Field(None, description="prompt of the task around the text; null: not in completions")

    @model_validator(mode="before")
    @classmethod
    def _knows_every_field(cls, value: Any) -> Any:
        unknown = [str(name) for name in value if name not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            text = f"'{unknown[0][:MAX_NAME]}' is unknown: {meant(unknown[0][:MAX_NAME], cls.model_fields)}"
            raise PydanticCustomError("unknown_field", "{text}", {"text": text})
        return value


class Request(Wire):
    """The fields of every request."""

    model: Name = Field("auto", description="auto, base, an adapter, or snapshot:NUMBER")
    raycl: Pins | None = None

    @property
    def pins(self) -> Pins:
        """The adapters that the request pins."""
        return self.raycl or Pins()


class StreamOptions(Wire):
    """The content of a stream in addition to the text."""

    include_usage: bool | None = None


class ResponseFormat(Wire):
    """The form of an answer."""

    type: Literal["text"]


class Generation(Request):
    """Settings of a text answer."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: FiniteFloat | None = Field(None, ge=0, le=2, description="0, as it was measured; OpenAI's default: 1")
    top_p: FiniteFloat | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    logprobs: Unsupported = None

    @property
    def answers(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts at which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Return whether a stream ends with the tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Part(Wire):
    """A part of a message's content."""

    type: Literal["text"]
    text: AnyText


class ChatMessage(Wire):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: AnyText | Annotated[list[Part], Field(fail_fast=True)]

    @property
    def turn(self) -> Turn:
        """It, as tasks of conversations have it."""
        return Turn("system" if self.role == "developer" else self.role, self.text)

    @property
    def text(self) -> str:
        """The text of the message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def conversation(messages: Sequence[ChatMessage]) -> str:
    """Return messages as one text (`raycl.data.sources.conversation`); "" where they say nothing."""
    turns = [message.turn for message in messages]
    return text_of(turns) if any(turn.content.strip() for turn in turns) else ""


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat | None = None
    tools: Unsupported = None
    functions: Unsupported = None

    @property
    def prompt(self) -> str:
        """The conversation as one text (`raycl.data.sources.conversation`)."""
        return conversation(self.messages)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Text | Texts
    echo: bool | None = Field(None, description="the prompt before the answer")
    suffix: Unsupported = None
    logprobs: UnsupportedLogprobs = None
    best_of: int | None = Field(None, ge=1, le=1)


class ClassifyRequest(Request):
    """POST /v1/classify and /v1/route."""

    input: Text | Texts

    @property
    def texts(self) -> list[str]:
        """All texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class ActivateRequest(Wire):
    """POST /admin/activate."""

    snapshot: int = Field(ge=1, le=MAX_NUMBER)


class ResponseDetails(BaseModel):
    """Details of an answer; times in milliseconds."""

    snapshot: int
    adapters: dict[str, float]
    tasks: dict[str, float]
    template: str = ""
    cut_tokens: int = 0
    ood_score: float | None = Field(
        None,
        description="from 0 to 1, near 1 for a text unlike all learned tasks; null: the snapshot's router has no such "
        "score, or the request names its adapters",
    )
    queue_ms: float = 0.0
    retrieval_ms: float = 0.0
    batch: int = 1


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


Finish = Literal["stop", "length"]


class AssistantMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str


class ResponseChoice(BaseModel):
    """One answer to a prompt."""

    index: int
    finish_reason: Finish
    logprobs: None = None
    raycl: ResponseDetails


class ChatChoice(ResponseChoice):
    """One answer to a chat."""

    message: AssistantMessage


class TextChoice(ResponseChoice):
    """One answer to a prompt as text."""

    text: str


class GeneratedAnswer(BaseModel):
    """The fields of every response with texts."""

    id: str
    created: int
    model: str
    usage: Usage
    raycl: ResponseDetails


class ChatAnswer(GeneratedAnswer):
    """The response of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextAnswer(GeneratedAnswer):
    """The response of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Label(BaseModel):
    """One text's label, and the probability of every one in question."""

    index: int
    label: str
    scores: dict[str, float]
    raycl: ResponseDetails


class LabelAnswer(BaseModel):
    """The response of POST /v1/classify."""

    object: Literal["list"]
    model: str
    data: list[Label]
    usage: Usage


class Route(BaseModel):
    """The mixture of one text."""

    index: int
    raycl: ResponseDetails


class RouteAnswer(BaseModel):
    """The response of POST /v1/route."""

    object: Literal["list"]
    model: str
    data: list[Route]


class ListedModel(BaseModel):
    """A value of `model`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(BaseModel):
    """The response of GET /v1/models."""

    object: Literal["list"]
    data: list[ListedModel]


class AdapterInfo(BaseModel):
    """An adapter of the active snapshot."""

    name: str
    version: int
    tasks: list[str]
    labels: list[str]
    rank: int
    bytes: int


class AdaptersAnswer(BaseModel):
    """The response of GET /v1/adapters."""

    object: Literal["list"]
    snapshot: int
    data: list[AdapterInfo]


class SnapshotsAnswer(BaseModel):
    """The response of GET /v1/snapshots."""

    object: Literal["list"]
    active: int
    tasks: list[str]
    kind: str
    data: list[int]
    decision: dict[str, Any] = Field(description="the last one: number, snapshot, why, time")
    decisions: list[dict[str, Any]] = Field(
        description="the last few, the newest first; with `rejected`, the snapshot that the gate did not activate"
    )
    problem: str = Field(description="why the newest snapshot or decision cannot be used or evaluated, or empty")


class ServedTask(BaseModel):
    """A task that the active snapshot has learned."""

    name: str
    labels: list[str] | None
    definition: str = Field(description="its instruction; empty: it has none")
    examples: list[str] = Field(description="rows that it was not trained on; see the setting `examples`")


class TasksAnswer(BaseModel):
    """The response of GET /v1/tasks."""

    object: Literal["list"]
    snapshot: int
    data: list[ServedTask]


class MetricsInterval(BaseModel):
    """What happened in one interval; times and scores as numbers of answers in each class."""

    start: int
    statuses: dict[str, int] = Field(description="responses to requests for answers, by the first digit of the status")
    answers: int
    tokens: int
    total_ms: list[int]
    first_ms: list[int]
    queue_ms: list[int]
    weights: dict[str, float] = Field(description="task -> sum of routing weights")
    ood: list[int] = Field(description="answers by out-of-distribution score, in ten classes from 0 to 1")
    ood_sum: float


class MetricsAnswer(BaseModel):
    """The response of GET /v1/metrics: the last hour of the replica that answers it."""

    object: Literal["metrics"]
    replica: str
    now: float
    interval_s: int
    intervals: int
    bounds_ms: list[int] = Field(description="upper bounds of the classes of times; one more is for longer ones")
    data: list[MetricsInterval]


class ActivateAnswer(BaseModel):
    """The response of POST /admin/activate."""

    active: int
    before: int


class HealthAnswer(BaseModel):
    """The response of GET /healthz and /readyz."""

    status: str
    snapshot: int | None = None
    metrics: str | None = Field(None, description="where Prometheus reads this replica's metrics")


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The response to every failed request."""

    error: ErrorBody
