"""Creation on object stores that exactly one of several racing writers wins; pyarrow.fs does not offer it."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from raycl.errors import StorageError, UnreachableError

S3_ATTEMPTS = 4
"""Attempts of a conditional put to which S3 answers 409, 'another operation is in progress, retry'."""


def create_s3(bucket: str, key: str, data: bytes, endpoint: str | None, full: str, writer: str) -> bool:
    """Put an object unless there is one; False if there is one already.

    Args:
        endpoint: address of an S3-compatible server; None for AWS. full: URI for messages.
        writer: the same word at every attempt of one creation, which identifies our own put when its answer was lost.

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
