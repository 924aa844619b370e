"""A store that does not answer: which errors mean that, and retries with growing pauses."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

from pyarrow import ArrowException

from raycl.errors import StorageError, UnreachableError

T = TypeVar("T")
log = logging.getLogger("raycl")

PAUSE_S, LONGEST_S = 0.5, 20.0
"""The first pause, and the one after which they no longer double."""

AWAY = {errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN}
"""Error numbers of network file systems that are out of reach."""

_AWAY = re.compile(
    r"NETWORK_CONNECTION|SERVICE_UNAVAILABLE|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE|REQUEST_TIMEOUT|HTTP status 5\d\d"
    r"|curlCode|UNAVAILABLE|DEADLINE_EXCEEDED|[Tt]imed out|[Cc]onnection refused|[Cc]onnection reset"
)
"""Matches errors of pyarrow's S3, Google Cloud Storage and HDFS, which have no types of their own."""


def is_unreachable(error: BaseException, local: bool) -> bool:
    """Return whether an error means that the store may answer later.

    Args:
        local: the path is local, where only errors of network file systems count.
    """
    if local:
        return isinstance(error, OSError) and error.errno in AWAY
    return _AWAY.search(str(error)) is not None


def with_retries(action: Callable[[], T], what: str, retry_s: float, local: bool) -> T:
    """Return the result of `action`, retried while the store does not answer; its errors become StorageErrors.

    Args:
        what: the action, for messages, as in "read 's3://bucket/file'". retry_s: seconds during which it is retried.

    Raises:
        UnreachableError: the store is away for longer. StorageError: everything else that failed.
    """
    began, pause, first_reason = time.monotonic(), PAUSE_S, ""
    spent = 0.0
    while True:
        try:
            return action()
        except UnreachableError as error:
            reason = str(error.__cause__ or error)
        except (OSError, ArrowException, ValueError) as error:  # the hub's file system refuses names by ValueErrors
            if not is_unreachable(error, local):
                raise StorageError(f"cannot {what}: {' '.join(str(error).split())}") from error
            reason = str(error)
        reason = " ".join(reason.split())
        spent = max(spent, time.monotonic() - began)
        if spent + pause > retry_s:
            raise UnreachableError(f"cannot {what}: the store did not answer for {spent:.0f} s ({reason})")
        if not first_reason:
            first_reason = reason
            log.warning("cannot %s: %s; trying again for %.0f s", what, reason, retry_s)
        time.sleep(pause)
        spent += pause
        pause = min(2 * pause, LONGEST_S)
