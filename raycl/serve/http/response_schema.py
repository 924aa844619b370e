"""The wire: answers of the OpenAI-compatible endpoints, and raycl's own beside them.

Field names and shapes are OpenAI's (platform.openai.com/docs/api-reference); what is raycl's stands under `raycl`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


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


class ChatChoice(BaseModel):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    finish_reason: Finish
    logprobs: None = None
    raycl: ResponseDetails


class ChatAnswer(BaseModel):
    """The response of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    raycl: ResponseDetails


class TextChoice(BaseModel):
    """One answer to a prompt."""

    index: int
    text: str
    finish_reason: Finish
    logprobs: None = None
    raycl: ResponseDetails


class TextAnswer(BaseModel):
    """The response of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    raycl: ResponseDetails


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
    problem: str = Field(description="why the newest snapshot or decision cannot be used or evaluated, or empty")


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
