"""The wire: requests and answers of the OpenAI-compatible endpoints, and raycl's own beside them.

Field names and shapes are OpenAI's (platform.openai.com/docs/api-reference); what is raycl's stands under `raycl`.
What it does not know: how an answer is made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints

Text = Annotated[str, StringConstraints(min_length=1)]


class _Wire(BaseModel):
    """Unknown fields are ignored, as clients of many versions send them; wrong types are not."""

    model_config = ConfigDict(extra="ignore", strict=False)


class Pins(_Wire):
    """Who speaks, where the request wants to say so; together with `model`, the narrower one counts."""

    snapshot: int | None = Field(None, ge=1, description="answer from this snapshot")
    adapters: dict[str, FiniteFloat] | None = Field(None, description="adapter -> weight; {} is the bare backbone")
    task: str | None = Field(None, description="the text's task, for routers that go by it")
    mix: bool = Field(True, description="false: only the best task's adapters")
    template: bool | None = Field(None, description="prompt of the task around the text; null: not in completions")


class Request(_Wire):
    """What every request has."""

    model: Text = Field("auto", description="auto, base, an adapter, or snapshot:NUMBER")
    raycl: Pins = Pins()


class Generation(Request):
    """Settings of a text answer."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: FiniteFloat = Field(0.0, ge=0, le=2, description="0, as it was measured; OpenAI's default is 1")
    top_p: FiniteFloat = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Text | list[Text] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Where the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Part(_Wire):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Wire):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        """Its text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def prompt(self) -> str:
        """All turns' texts, below each other: what was learned are single turns."""
        return "\n".join(message.text for message in self.messages if message.text)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Text | list[Text]
    echo: bool = False


class ClassifyRequest(Request):
    """POST /v1/classify and /v1/route."""

    input: Text | list[Text]

    @property
    def texts(self) -> list[str]:
        """Every text."""
        return [self.input] if isinstance(self.input, str) else self.input


class ActivateRequest(_Wire):
    """POST /admin/activate."""

    snapshot: int = Field(ge=1)


class How(BaseModel):
    """How an answer was made; times in milliseconds."""

    snapshot: int
    adapters: dict[str, float]
    tasks: dict[str, float]
    template: str = ""
    cut_tokens: int = 0
    queue_ms: float = 0.0
    retrieval_ms: float = 0.0
    batch: int = 1


class Usage(BaseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """What every failed request gets."""

    error: ErrorBody
