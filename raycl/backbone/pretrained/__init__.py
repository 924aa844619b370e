"""Pretrained models by name: the location of their files, fetching from the hub, and identity."""

from raycl.backbone.pretrained.hashes import fingerprint_of, parts_of
from raycl.backbone.pretrained.model_files import (
    CONFIG,
    ONE_AT_A_TIME,
    FetchedFiles,
    commit_of,
    folder_of,
    is_local,
    only_pickled,
    present_folder,
    published_name,
    resolve,
    resolve_path,
    weight_files,
)

__all__ = [
    "CONFIG",
    "ONE_AT_A_TIME",
    "FetchedFiles",
    "commit_of",
    "fingerprint_of",
    "folder_of",
    "is_local",
    "only_pickled",
    "parts_of",
    "present_folder",
    "published_name",
    "resolve",
    "resolve_path",
    "weight_files",
]
