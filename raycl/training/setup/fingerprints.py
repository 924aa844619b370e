"""Fingerprints of what a run reads: its rows, its pretrained models, and files that its method names.

Rows count by what they say, so the same rows in another folder or format are the same. Hashes of large files are kept
(`raycl.backbone.model_hashes`), those of rows are made once, when they are read.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from raycl.backbone import BackboneConfig
from raycl.backbone.model_files import is_local
from raycl.backbone.model_hashes import parts_of
from raycl.config import Section
from raycl.data.sources.cache import cache_folder
from raycl.data.sources.source import SourceFile
from raycl.data.stream import Stream
from raycl.data.tokens import SPLITS
from raycl.routing.sentence_encoder import EncoderConfig
from raycl.storage import Storage
from raycl.training.definition.inputs import Inputs
from raycl.training.setup.run_config import RunConfig
from raycl.types import Task


def inputs_of(config: RunConfig, stream: Stream, fetches: bool = False) -> Inputs:
    """Return the fingerprints of a run's inputs.

    Args:
        fetches: hub models too, whose files are fetched first; else models that lie on this machine alone, for a
            driver that loads none.

    Raises:
        BackboneError, DataError: a model or a file cannot be read.
    """
    named = [("backbone", config.backbone), *_sections("method", config.method)]
    models = {path: model for path, model in named if isinstance(model, BackboneConfig | EncoderConfig)}
    return {
        "models": {path: _parts(model) for path, model in models.items() if fetches or is_local(model.name)},
        "tasks": {
            task.name: rows_of(stream, task) for task in (*stream.tasks, *stream.unseen) if stream.has_data(task)
        },
        "files": dict(_files(config)),
    }


def _parts(model: BackboneConfig | EncoderConfig) -> dict[str, str]:
    code = isinstance(model, BackboneConfig) and model.trust_remote_code
    return {"name": model.name, **parts_of(model.name, model.revision, model.allow_pickle, code)}


def rows_of(stream: Stream, task: Task) -> dict[str, Any]:
    """Split -> number, SHA-256 and place of a task's rows."""
    result: dict[str, Any] = {}
    for split in SPLITS:
        source, rows = stream.source(task, split), stream.rows(task, split)
        if source is not None and len(rows):
            sha256 = hashlib.sha256(f"{source.sha256}|{source.definition}|".encode() + rows.tobytes()).hexdigest()
            result[split] = {"rows": len(rows), "sha256": sha256, "where": source.where}
    return result


def _files(config: RunConfig) -> Iterator[tuple[str, dict[str, str]]]:
    """Return setting and name -> path and hash, of each JSON file in the folders that the method's settings name."""
    cache = cache_folder(config.stream.cache_dir)
    for path, section in _sections("method", config.method):
        for name in section.folders:
            folder = Storage.at(getattr(section, name)) if getattr(section, name) else None
            for file in sorted(folder.files()) if folder is not None else ():
                if folder is not None and file.endswith((".json", ".jsonl")):
                    source = SourceFile(folder, file)
                    yield f"{path}.{name}/{file}", {"path": source.uri, "sha256": source.content_hash(cache)}


def _sections(path: str, section: Section) -> Iterator[tuple[str, Section]]:
    yield path, section
    for name in type(section).model_fields:
        if isinstance(value := getattr(section, name), Section):
            yield from _sections(f"{path}.{name}", value)
