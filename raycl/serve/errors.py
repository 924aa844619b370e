"""Why a request gets no answer: each error has the status, type and code of its response.

RayclError                  503  anything else that raycl cannot do now: the bank is out of reach, the server stops
├── InvalidRequestError              400  the request itself is at fault
│   ├── LimitExceededError        400  beyond the limits, or nothing in it
│   ├── PromptTooLongError        400  a prompt that does not fit (code context_length_exceeded)
│   └── NotFoundError        404  a model, adapter or snapshot that does not exist
├── BusyError               429  too many answers are being made: retry later
├── DeadlineExceededError               504  an answer took longer than allowed
├── UnavailableError        503  an adapter that is damaged or out of reach
└── InternalError             500  an internal error; see the log
"""

from __future__ import annotations

from typing import Any

from raycl.errors import AdapterError, BankError, ConversationError, RayclError, RetrievalError

Answer = tuple[int, str, str | None]
"""Status, OpenAI's type of the error, and its code."""

RETRYABLE = (429, 503)
"""Statuses that a client may meet with the same request a second later: they come with Retry-After."""


class InvalidRequestError(RayclError):
    """The request cannot be answered as it is."""


class LimitExceededError(InvalidRequestError):
    """A request beyond the limits, or an empty one."""


class PromptTooLongError(InvalidRequestError):
    """A prompt longer than the model reads, in a place where it must not be cut."""


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


_ANSWERS: tuple[tuple[type[RayclError], Answer], ...] = (
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


def answer_of(error: RayclError) -> Answer:
    """What an error becomes on the wire; the first line that fits."""
    return next(answer for kind, answer in _ANSWERS if isinstance(error, kind))


def body_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: RayclError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error's answer."""
    status, kind, code = answer_of(error)
    return status, body_of(str(error), kind, code=code)
