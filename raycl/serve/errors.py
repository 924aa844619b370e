"""The errors of requests without an answer, and what each becomes on the wire: status, type and code, as OpenAI's.

RayclError                    anything else that raycl cannot do now: the bank is out of reach, the server stops
├── InvalidRequestError       the request itself is at fault
│   ├── LimitExceededError    beyond the limits, or nothing in it
│   ├── PromptTooLongError    a prompt that does not fit
│   ├── UnknownTextError      a text of no learned task, where such texts are refused
│   └── NotFoundError         a model, adapter or snapshot that does not exist
├── BusyError                 too many answers are being made: retry later
├── DeadlineExceededError     an answer took longer than allowed
├── UnavailableError          an adapter that is damaged or out of reach
└── InternalError             an internal error; see the log
"""

from typing import Any

from raycl.errors import AdapterError, BankError, ConversationError, RayclError, RetrievalError


class InvalidRequestError(RayclError):
    """The request cannot be answered as it is."""


class LimitExceededError(InvalidRequestError):
    """A request beyond the limits, or an empty one."""


class PromptTooLongError(InvalidRequestError):
    """A prompt longer than the model reads, in a place where it must not be cut."""


class UnknownTextError(InvalidRequestError):
    """A text of no learned task, where such texts are refused."""

    def __init__(self) -> None:
        super().__init__(
            "the text is unlike those of all learned tasks, and such texts get no answer (unknown=refuse): ask about "
            "what was learned, or name a task (model=TASK at an endpoint, --task TASK of raycl predict)"
        )


class NotFoundError(InvalidRequestError):
    """A model, adapter or snapshot that does not exist."""


class BusyError(RayclError):
    """Too many answers are being made: retry later."""


class DeadlineExceededError(RayclError):
    """An answer took longer than allowed."""


class UnavailableError(RayclError):
    """Something that the answer needs is damaged or out of reach."""


class InternalError(RayclError):
    """An internal error; see the log."""


# ---- on the wire -------------------------------------------------------------------------------------------------

ErrorStatus = tuple[int, str, str | None]
"""Status, OpenAI's type of the error, and its code."""

RETRYABLE = (429, 503)
"""Statuses that a client may meet with the same request a second later: they come with Retry-After."""

_STATUSES: tuple[tuple[type[RayclError], ErrorStatus], ...] = (
    (UnknownTextError, (422, "invalid_request_error", "unknown_text")),
    (PromptTooLongError, (400, "invalid_request_error", "context_length_exceeded")),
    (NotFoundError, (404, "not_found_error", None)),
    (InvalidRequestError, (400, "invalid_request_error", None)),
    (BusyError, (429, "rate_limit_error", None)),
    (DeadlineExceededError, (504, "timeout_error", None)),
    (UnavailableError, (503, "server_error", None)),
    (InternalError, (500, "server_error", None)),
    (BankError, (400, "invalid_request_error", None)),
    (AdapterError, (400, "invalid_request_error", None)),
    (ConversationError, (400, "invalid_request_error", None)),
    (RetrievalError, (400, "invalid_request_error", None)),
    (RayclError, (503, "server_error", None)),
)


def status_of(error: RayclError) -> ErrorStatus:
    """Return what an error becomes on the wire; the first line that fits."""
    return next(status for kind, status in _STATUSES if isinstance(error, kind))


def body_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: RayclError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error's answer."""
    status, kind, code = status_of(error)
    return status, body_of(str(error), kind, code=code)
