"""Backbones of a sweep in the object store: read once, then each node has one copy that its workers look at.

Why it exists: many trials have one backbone. Workers whose methods leave it frozen compute with the node's copy itself;
others copy it from there.
What it does not know: how a backbone is made of its files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from raycl.backbone import BackboneConfig
from raycl.bank.tensors import views
from raycl.errors import BankError
from raycl.pretrained import weight_files

log = logging.getLogger("raycl")

ROOM = 0.5
"""Share of the smallest node's object store that backbones may take; larger ones are read by every worker."""


def key_of(backbone: BackboneConfig) -> str:
    """The same for settings that mean the same files."""
    return f"{backbone.name}@{backbone.revision}"


def put_weights(backbones: Sequence[BackboneConfig]) -> dict[str, Any]:
    """By `key_of`, a reference to each backbone's safetensors files; without those that have none or need too much.

    Raises:
        BackboneError: one does not exist.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = ROOM * min(resources.get("object_store_memory", 0.0) for resources in nodes)
    found: dict[str, Any] = {}
    for key, backbone in {key_of(backbone): backbone for backbone in backbones}.items():
        files = weight_files(backbone.name, backbone.revision)
        size = sum(file.stat().st_size for file in files)
        if not 0 < size <= room:
            log.info("%s is read by every worker: %.0f MiB, room for %.0f", key, size / 2**20, room / 2**20)
            continue
        buffers = [np.fromfile(file, dtype=np.uint8) for file in files]
        try:
            for file, buffer in zip(files, buffers, strict=True):
                views(buffer.data, str(file))
        except BankError as error:  # a dtype that an adapter never has
            log.info("%s is read by every worker: %s", key, error)
            continue
        try:
            found[key] = ray.put(buffers)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            log.warning("%s is read by every worker: the object store is full (%s)", key, type(error).__name__)
            continue
        room -= size
    return found
