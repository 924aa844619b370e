"""Fields of a run's records: what one with a right hash must hold, since it may still come from a stranger.

Names become folders, which are read, copied and deleted: each is a plain one.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from raycl.config.names import FolderName

Natural = Annotated[int, Field(ge=0)]


class _Published(TypedDict, total=False):
    """The record of a phase's publication; {}: nothing. `adapters`: name -> version."""

    bank: str
    snapshot: Natural
    adapters: dict[str, Natural]


class _Router(TypedDict, total=False):
    """The router of a phase but for its tensors; {}: it has none. `owners`: pairs of an adapter and its tasks."""

    kind: str
    settings: dict[str, Any]
    encoder: dict[str, Any] | None
    encoder_sha256: str
    package: str
    owners: list[tuple[str, list[str]]]


class _Times(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    phase: FolderName
    steps: NotRequired[Natural]


class _Phase(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    phase: Natural
    row: dict[str, dict[str, Any]]
    times: _Times
    bank: _Published
    summary: dict[str, Any]
    ended: NotRequired[float]


class _Attempt(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    attempt: Natural
    started: float
    host: str
    pid: int
    ended: NotRequired[float]
    seconds: NotRequired[float]
    inherited: NotRequired[Natural]


@dataclass(frozen=True)
class _CheckedAs:
    """A dict that must have these fields, where the code reads a plain dict."""

    kind: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.kind)


PhaseRecord = Annotated[dict[str, Any], _CheckedAs(_Phase)]
AttemptRecord = Annotated[dict[str, Any], _CheckedAs(_Attempt)]
Publication = Annotated[dict[str, Any], _CheckedAs(_Published)]
RouterRecord = Annotated[dict[str, Any], _CheckedAs(_Router)]
