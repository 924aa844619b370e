"""Stores beyond this machine: creation that exactly one of several writers wins, and retries while one does not answer.

pyarrow.fs offers neither.
"""

import errno
import logging
import re
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from pyarrow import ArrowException

from raycl.errors import StorageError, UnreachableError

S3_ATTEMPTS = 4
"""Attempts of a conditional put to which S3 answers 409, 'another operation is in progress, retry'."""


def create_s3(
    bucket: str, key: str, data: bytes, endpoint: str | None, full: str, writer: str, region: str | None
) -> bool:
    """Put an object unless there is one; False if there is one already.

    Args:
        endpoint: address of an S3-compatible server; None for AWS. full: URI for messages.
        writer: the same word at every attempt of one creation, which identifies our own put when its answer was lost.
        region: of the bucket; None: as AWS_* variables say.

    Raises:
        UnreachableError: the store does not answer. StorageError: it cannot be written.
    """
    boto3 = _library("boto3", "S3", "s3", full)
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

    try:
        client = boto3.client("s3", endpoint_url=endpoint, region_name=region)
        for attempt in range(1, S3_ATTEMPTS + 1):
            try:
                client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*", Metadata={"writer": writer})
                return True
            except ClientError as error:
                code = error.response.get("Error", {}).get("Code")
                if code == "PreconditionFailed":
                    break
                if code != "ConditionalRequestConflict" or attempt == S3_ATTEMPTS:
                    raise
                time.sleep(0.2 * attempt)
        # boto3 repeats a put whose answer was lost; the existing file is then our own
        return bool(client.head_object(Bucket=bucket, Key=key)["Metadata"].get("writer") == writer)
    except (ConnectionError, HTTPClientError) as error:
        raise UnreachableError(f"cannot create '{full}': {error}") from error
    except ClientError as error:
        away = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
        raise (UnreachableError if away else StorageError)(f"cannot create '{full}': {error}") from error
    except BotoCoreError as error:
        raise StorageError(f"cannot create '{full}': {error}") from error


def create_gs(bucket: str, key: str, data: bytes, endpoint: str | None, full: str, writer: str) -> bool:
    """Put an object on Google Cloud Storage unless there is one; generation 0 means that there is no object yet.

    Raises:
        UnreachableError: the store does not answer. StorageError: it cannot be written.
    """
    storage = _library("google.cloud.storage", "Google Cloud Storage", "gs", full)
    from google.api_core.exceptions import GoogleAPIError, PreconditionFailed, RetryError, ServerError
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError

    try:
        arguments: dict[str, Any] = {}
        if endpoint:  # a local server needs no credentials
            arguments = {"client_options": {"api_endpoint": endpoint}, "project": "none"}
            arguments["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        client = storage.Client(**arguments)
        blob = client.bucket(bucket).blob(key)
        blob.metadata = {"writer": writer}
        try:
            blob.upload_from_string(data, if_generation_match=0)
            return True
        except PreconditionFailed:
            existing = client.bucket(bucket).get_blob(key)
            return existing is not None and (existing.metadata or {}).get("writer") == writer
    except (RetryError, ServerError, OSError) as error:  # requests' connection errors are OSErrors
        raise UnreachableError(f"cannot create '{full}': {error}") from error
    except (GoogleAPIError, GoogleAuthError) as error:
        raise StorageError(f"cannot create '{full}': {error}") from error


def _library(name: str, store: str, extra: str, full: str) -> Any:
    """Import a library with conditional puts, which is an optional dependency."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.replace(".", "-")
        raise StorageError(
            f"cannot create '{full}': {store}'s conditional put needs {package}, pip install 'raycl[{extra}]'"
        ) from error


T = TypeVar("T")
log: logging.Logger = logging.getLogger("raycl")

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
