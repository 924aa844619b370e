"""Creation that exactly one of several racing writers wins, on object stores: what pyarrow.fs has no word for."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from raycl.errors import StorageError, UnreachableError

S3_ATTEMPTS = 4
"""Tries of a conditional put that S3 answers with 409, 'another operation is under way, ask again'."""


def create_s3(bucket: str, key: str, data: bytes, endpoint: str | None, full: str, writer: str) -> bool:
    """Put an object unless there is one; False if there is one already.

    Args:
        endpoint: of an S3-compatible server; None for AWS. full: URI for messages.
        writer: the same word at every try of one creation: a put whose answer was lost is found to be our own.

    Raises:
        UnreachableError: the store does not answer. StorageError: it cannot be written.
    """
    boto3 = _library("boto3", "S3", "s3", full)
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

    try:
        client = boto3.client("s3", endpoint_url=endpoint)
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
        # boto3 repeats a put whose answer was lost; then the file that is in the way is our own
        return bool(client.head_object(Bucket=bucket, Key=key)["Metadata"].get("writer") == writer)
    except (ConnectionError, HTTPClientError) as error:
        raise UnreachableError(f"cannot create '{full}': {error}") from error
    except ClientError as error:
        away = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
        raise (UnreachableError if away else StorageError)(f"cannot create '{full}': {error}") from error
    except BotoCoreError as error:
        raise StorageError(f"cannot create '{full}': {error}") from error


def create_gs(bucket: str, key: str, data: bytes, endpoint: str | None, full: str, writer: str) -> bool:
    """Return the same on Google Cloud Storage: generation 0 stands for 'no object yet'.

    Raises:
        UnreachableError: the store does not answer. StorageError: it cannot be written.
    """
    storage = _library("google.cloud.storage", "Google Cloud Storage", "gs", full)
    from google.api_core.exceptions import GoogleAPIError, PreconditionFailed, RetryError, ServerError
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError

    try:
        own: dict[str, Any] = {}
        if endpoint:  # an own server needs no credentials
            own = {"client_options": {"api_endpoint": endpoint}, "project": "none"}
            own["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        client = storage.Client(**own)
        blob = client.bucket(bucket).blob(key)
        blob.metadata = {"writer": writer}
        try:
            blob.upload_from_string(data, if_generation_match=0)
            return True
        except PreconditionFailed:
            found = client.bucket(bucket).get_blob(key)
            return found is not None and (found.metadata or {}).get("writer") == writer
    except (RetryError, ServerError, OSError) as error:  # requests' connection errors are OSErrors
        raise UnreachableError(f"cannot create '{full}': {error}") from error
    except (GoogleAPIError, GoogleAuthError) as error:
        raise StorageError(f"cannot create '{full}': {error}") from error


def _library(name: str, store: str, extra: str, full: str) -> Any:
    """Return the only modules with conditional puts; optional dependencies."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.replace(".", "-")
        raise StorageError(
            f"cannot create '{full}': {store}'s conditional put needs {package}, pip install 'raycl[{extra}]'"
        ) from error
