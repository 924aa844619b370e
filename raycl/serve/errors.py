"""Why a request gets no answer; `raycl.serve.http.error_responses` has the status of each.

RayclError                    anything else that raycl cannot do now: the bank is out of reach, the server stops
├── InvalidRequestError       the request itself is at fault
│   ├── LimitExceededError    beyond the limits, or nothing in it
│   ├── PromptTooLongError    a prompt that does not fit
│   └── NotFoundError         a model, adapter or snapshot that does not exist
├── BusyError                 too many answers are being made: retry later
├── DeadlineExceededError     an answer took longer than allowed
├── UnavailableError          an adapter that is damaged or out of reach
└── InternalError             an internal error; see the log
"""

from __future__ import annotations

from raycl.errors import RayclError


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
