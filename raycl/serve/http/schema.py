"""The wire: requests and answers of the OpenAI-compatible endpoints, and raycl's own beside them.

Field names and shapes are OpenAI's (platform.openai.com/docs/api-reference); what is raycl's stands under `raycl`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from raycl.data.sources.conversation import ROLES, call_tree, calls_text, result_text, text_of, tools_text, with_tools
from raycl.data.sources.conversation import Message as Turn
from raycl.errors import meant
from raycl.serve.http.tool_calls import forced_schema
from raycl.serve.service.history import Interval, TaskCounts, UnsureText

MAX_STOPS, MAX_STOP, MAX_NAME, MAX_WEIGHT, MAX_NUMBER, MAX_PINNED = 16, 256, 200, 1000.0, 10**9, 1000
"""Stops of an answer, characters of one, characters of a name, an adapter's weight either way, a snapshot's number,
adapters that a request pins."""

MAX_CHOICES = 1000
"""Texts of which an answer may be one."""

MAX_TOOLS = 128
"""Tools that a request offers; OpenAI's limit."""

MAX_LOGPROBS = 20
"""The most likely tokens that are sent with each; OpenAI's limit in chats."""


AnyText = Annotated[str, StringConstraints(min_length=0)]
"""Any text; with a length constraint pydantic finds lone surrogates, which no tokenizer takes."""

Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
"""Several; the first that is wrong ends the check, since messages for tens of thousands take seconds."""
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
Weight = Annotated[FiniteFloat, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
"""A prompt as token ids."""
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[FiniteFloat, Field(ge=-100, le=100)]


class Neutral:
    """Annotation of a field that would change the answer and is not supported: only these values and null are taken.

    Clients send them as defaults.
    """

    def __init__(self, *values: Any) -> None:
        self.values = (None, *values)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.values), "description": "not supported: left out, or one of these"}

    def _check(self, value: Any) -> Any:
        if not any(type(value) is type(known) and value == known for known in self.values):
            raise PydanticCustomError("unsupported", "Input is not supported by this endpoint: leave it out")
        return value


class NullIs:
    """Annotation of a field whose default is not null: null is its default too."""

    def __init__(self, default: Any) -> None:
        self.default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner = handler(source)
        return core_schema.no_info_before_validator_function(lambda v: self.default if v is None else v, inner)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "null"}]}


Unsupported = Annotated[Any, Neutral(False, 0, 0.0, "", [], {})]
NullOrFalse = Annotated[Any, Neutral(False)]
"""The same for what 0 or nothing asks for too: a count of tokens' chances, of which 0 is that of the token taken."""
NoneOrAuto = Annotated[Any, Neutral("none", "auto")]

AUTO = "auto"
"""The model of requests that name none: the router chooses."""

ModelName = Annotated[Name, NullIs(AUTO)]


def _check_few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_PINNED:
        raise PydanticCustomError(
            "too_many",
            "Input has {count} entries: at most {most} are read",
            {"count": len(value), "most": MAX_PINNED},
        )
    return value


class Wire(BaseModel):
    """Unknown fields are ignored, as clients of many versions send them; wrong types are not, null is the default.

    Known fields that would change the answer and are not supported are rejected (`Unsupported`).
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)


class OwnFields(Wire):
    """Fields that no client of OpenAI's sends, so an unknown one is a mistake, and would change the answer."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _knows_every_field(cls, value: Any) -> Any:
        unknown = [str(name) for name in value if name not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            text = f"'{unknown[0][:MAX_NAME]}' is unknown: {meant(unknown[0][:MAX_NAME], cls.model_fields)}"
            raise PydanticCustomError("unknown_field", "{text}", {"text": text})
        return value


class Pins(OwnFields):
    """The snapshot, adapters or task that a request pins; together with `model`, the narrower one counts."""

    snapshot: int | None = Field(None, ge=1, le=MAX_NUMBER, description="answer from this snapshot")
    adapters: Annotated[dict[Name, Weight] | None, BeforeValidator(_check_few)] = Field(
        None, description="adapter -> weight; {} is the bare backbone"
    )
    task: Name | None = Field(
        None,
        description="the text's task: its prompt, and its adapters where the router goes by task ids, not by texts",
    )
    mix: Annotated[bool, NullIs(True)] = Field(True, description="false: only the best task's adapters; null: true")
    template: bool | None = Field(None, description="prompt of the task around the text; null: not in completions")


NO_PINS = Pins()


class Request(Wire):
    """The fields of every request."""

    model: ModelName = Field(AUTO, description="auto, base, a task, an adapter, or snapshot:NUMBER; null: auto")
    raycl: Pins | None = None

    @property
    def pins(self) -> Pins:
        """The adapters that the request pins."""
        return self.raycl or NO_PINS


class StreamOptions(Wire):
    """The content of a stream in addition to the text."""

    include_usage: bool | None = None


Schema = dict[str, Any]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchemaFormat(Wire):
    """The JSON schema of an answer."""

    name: Name | None = None
    schema_: Annotated[Schema, NullIs({})] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Wire):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _names_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing_schema", "type is json_schema: expected the schema in json_schema")
        return self


class StructuredOutputs(Wire):
    """The form of an answer in vLLM's words; one field alone."""

    json_: Schema | AnyText | None = Field(None, alias="json")
    regex: Text | None = None
    grammar: Text | None = None
    choice: Choices | None = None
    json_object: bool | None = None
    structural_tag: Unsupported = None


class Form(NamedTuple):
    """The form of an answer.

    Attributes:
        field: name of the field that asks for it. kind: a `FormKind` of `raycl.generation.grammars`, or `choice`.
    """

    field: str
    kind: Literal["json", "regex", "grammar", "choice"]
    value: Any


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
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="vLLM's; 0 and -1: all tokens")
    min_p: FiniteFloat | None = Field(None, ge=0, le=1, description="vLLM's")
    repetition_penalty: FiniteFloat | None = Field(None, gt=0, le=2, description="vLLM's, over prompt and answer")
    frequency_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    presence_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_check_few)] = Field(
        None, description="token id -> what is added to its logit"
    )
    prompt_logprobs: NullOrFalse = None
    use_beam_search: Unsupported = None
    length_penalty: Annotated[Any, Neutral(1, 1.0)] = None
    min_tokens: Unsupported = None
    ignore_eos: Unsupported = None
    stop_token_ids: Unsupported = None
    include_stop_str_in_output: Unsupported = None
    skip_special_tokens: Annotated[Any, Neutral(True)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    truncate_prompt_tokens: NullOrFalse = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's")
    guided_json: Schema | AnyText | None = Field(None, description="vLLM's; the same as structured_outputs.json")
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    guided_choice: Choices | None = None

    @property
    def answers(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def forms(self) -> list[Form]:
        """All forms that the request asks for."""
        asked, vllm = self.response_format, self.structured_outputs or StructuredOutputs()
        schema: Any = None
        if asked is not None and asked.type != "text":
            schema = asked.json_schema.schema_ if asked.json_schema else {"type": "object"}
        found = [
            Form("response_format", "json", schema),
            Form("structured_outputs.json", "json", {"type": "object"} if vllm.json_object else vllm.json_),
            Form("structured_outputs.regex", "regex", vllm.regex),
            Form("structured_outputs.grammar", "grammar", vllm.grammar),
            Form("structured_outputs.choice", "choice", vllm.choice),
            Form("guided_json", "json", self.guided_json),
            Form("guided_regex", "regex", self.guided_regex),
            Form("guided_grammar", "grammar", self.guided_grammar),
            Form("guided_choice", "choice", self.guided_choice),
        ]
        return [form for form in found if form.value is not None]

    @property
    def top(self) -> int | None:
        """The most likely tokens that are sent with each token's log probability; None: no log probabilities."""
        raise AssertionError("each kind of request has a field of its own for it")

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


class CalledFunction(Wire):
    """A function with the arguments of a call, as JSON."""

    name: Name
    arguments: AnyText

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            is_object = isinstance(json.loads(value or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise PydanticCustomError("arguments", "Input should be a JSON object as text")
        return value


class CalledTool(Wire):
    """A call of a tool in an earlier turn of the assistant."""

    id: AnyText | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    @property
    def tree(self) -> dict[str, Any]:
        """The call as chat templates take it: with arguments that are no text."""
        return call_tree(self.function.name, self.function.arguments, self.id)


class ChatMessage(Wire):
    """One turn; only turns of the assistant that call tools do without content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: AnyText | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: AnyText | None = None
    name: AnyText | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content is missing: expected text")
        return self

    @property
    def turns(self) -> list[Turn]:
        """The message as conversations have it."""
        if self.role == "tool":
            return [Turn("tool", result_text(self.text, self.tool_call_id, self.name))]
        calls = [call.tree for call in self.tool_calls or () if self.role == "assistant"]
        called = [Turn("tool_calls", calls_text(calls))] if calls else []
        return [Turn(ROLES[self.role], self.text), *called]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class FunctionSpec(Wire):
    """A function that may be called; its parameters are a JSON schema."""

    name: Name
    description: AnyText | None = None
    parameters: Schema | None = None


class ToolSpec(Wire):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Wire):
    """A function by its name."""

    name: Name


class NamedTool(Wire):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    functions: Unsupported = None
    function_call: NoneOrAuto = None
    audio: Unsupported = None
    modalities: Annotated[Any, Neutral([], ["text"])] = None
    chat_template: Unsupported = None
    chat_template_kwargs: Unsupported = None
    add_generation_prompt: Annotated[Any, Neutral(True)] = None
    continue_final_message: Unsupported = None
    documents: Unsupported = None
    echo: Unsupported = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs needs logprobs: set it to true")
        return self

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _choice_is_offered(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise PydanticCustomError("tool_choice", "tool_choice names '{name}', which tools lacks", {"name": name})
        if self.tool_choice == "required" and not names:
            raise PydanticCustomError("tool_choice", "tool_choice is 'required' and tools is empty")
        return self

    @property
    def offered(self) -> list[FunctionSpec]:
        """The functions that the answer may call."""
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            return [tool.function for tool in self.tools or () if tool.function.name == wanted]
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def is_forced(self) -> bool:
        """Return whether the answer must be a call."""
        return isinstance(self.tool_choice, NamedTool) or self.tool_choice == "required"

    @property
    def forms(self) -> list[Form]:
        """See `Generation`; a call that must be made is a form too."""
        if not self.is_forced:
            return super().forms
        schemas = {function.name: function.parameters or {} for function in self.offered}
        return [Form("tool_choice", "json", forced_schema(schemas)), *super().forms]

    @property
    def prompt(self) -> str:
        """The conversation as one text (`raycl.data.sources.conversation`); "" where it says nothing."""
        turns = [turn for message in self.messages for turn in message.turns]
        if not any(turn.content.strip() for turn in turns):
            return ""
        return text_of(with_tools(turns, tools_text([tool.model_dump() for tool in self.offered])))


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Text | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=0, description="0 only with echo: log probabilities of the prompt")
    echo: bool | None = Field(None, description="the prompt before the answer")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    top_logprobs: Unsupported = None
    suffix: Unsupported = None
    best_of: int | None = Field(None, ge=1, le=1)

    @model_validator(mode="after")
    def _no_tokens_need_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("echo", "max_tokens is 0 and echo is not true: expected one of both")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def texts(self) -> list[str]:
        """All prompts that are texts."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt for prompt in given if isinstance(prompt, str)]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """All prompts that are tokens."""
        if single := tuple(token for token in self.prompt if isinstance(token, int)):
            return [single]
        return [tuple(ids) for ids in self.prompt if isinstance(ids, list)]


class ClassifyRequest(Request):
    """POST /v1/classify and /v1/route."""

    input: Text | Texts

    @property
    def texts(self) -> list[str]:
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
    ood_distance: float | None = Field(
        None, description="the distance to the learned tasks behind the score, which has no upper limit; null: as there"
    )
    ood_threshold: float | None = Field(
        None, description="the distance above which a text counts as one of no learned task; null: there is none"
    )
    unknown: bool | None = Field(
        None, description="whether the text counts as one of no learned task; null: the router cannot tell"
    )
    queue_ms: float = 0.0
    retrieval_ms: float = 0.0
    batch: int = 1


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


Finish = Literal["stop", "length", "tool_calls"]


class WrittenFunction(BaseModel):
    """A function that the answer calls."""

    name: str
    arguments: str


class WrittenCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: WrittenFunction


class AssistantMessage(BaseModel):
    """The assistant's turn; null is the content of one that only calls tools."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[WrittenCall] | None = None


class ResponseChoice(BaseModel):
    """One answer to a prompt."""

    index: int
    finish_reason: Finish
    raycl: ResponseDetails


class Logprob(BaseModel):
    """A token with its log probability, and its bytes where they are known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Logprob):
    """A token of an answer, and the most likely ones at its place."""

    top_logprobs: list[Logprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of the tokens of a chat's answer, the end of the turn included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TextLogprobs(BaseModel):
    """Log probabilities of the tokens of a completion, and with `echo` of the prompt, whose first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatChoice(ResponseChoice):
    """One answer to a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class TextChoice(ResponseChoice):
    """One answer to a prompt as text."""

    text: str
    logprobs: TextLogprobs | None = None


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
    chat: bool = Field(description="a chat template renders conversations")
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


class MetricsAnswer(BaseModel):
    """The response of GET /v1/metrics: the last hour of the replica that answers it."""

    object: Literal["metrics"]
    replica: str
    now: float
    interval_s: int
    intervals: int
    bounds_ms: list[int] = Field(description="upper bounds of the classes of times; one more is for longer ones")
    data: list[Interval]


class TrainingDrift(BaseModel):
    """Counts of the rows that tasks were learned from: labels of training rows, the rest of held-out rows."""

    state: Literal["counting", "ready", "missing"]
    reason: str = Field(description="why they are missing; else empty")
    data: dict[str, TaskCounts]


class DriftAnswer(BaseModel):
    """The response of GET /v1/drift: answers of the active snapshot by the task with the largest weight."""

    object: Literal["drift"]
    replica: str
    snapshot: int
    served: dict[str, TaskCounts]
    training: TrainingDrift
    keeps_unsure: int = Field(description="the setting `keep_unsure`")


class UnsureAnswer(BaseModel):
    """The response of GET /admin/unsure."""

    object: Literal["list"]
    replica: str
    data: list[UnsureText]


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
