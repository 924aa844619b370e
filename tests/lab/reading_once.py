"""Folders of tiny models are read once: whoever loads one again gets a copy of what the first load has read.

A run on a tiny model spends a sixth of its time on reading the same three files, which nothing here is about. Raycl's
own loading runs each time; what transformers reads for it is copied. It is read anew for any other folder, settings or
dtype, when a file of the folder has changed, for quantized weights, and for weights that stay in mapped files. Sentence
encoders are copied as raycl's loading leaves them.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import transformers

from raycl.backbone import load
from raycl.routing.sentence_encoder import SentenceEncoder

KEPT: dict[Hashable, Pickled] = {}
"""What was read, by what it was read from and how."""

PLAIN = {
    *("config", "dtype", "use_safetensors", "trust_remote_code"),
    *("output_loading_info", "ignore_mismatched_sizes"),
}
"""All options of weights that are not quantized."""


class Pickled:
    """An object of which copies are made, four to eight times as fast as by `copy.deepcopy`.

    Tensors and functions (the hooks of modules) are copied as there: functions are not.
    """

    def __init__(self, original: Any) -> None:
        self.parts: list[torch.Tensor | FunctionType] = []
        number_of: dict[int, int] = {}

        def number(part: Any) -> int | None:
            if not isinstance(part, torch.Tensor | FunctionType):
                return None
            if id(part) not in number_of:
                number_of[id(part)] = len(self.parts)
                self.parts.append(part)
            return number_of[id(part)]

        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = number
        pickler.dump(original)
        self.rest: bytes = file.getvalue()

    def copied(self) -> Any:
        """Return a copy that shares nothing with others."""
        made: dict[int, Any] = {}
        unpickler = pickle.Unpickler(io.BytesIO(self.rest))
        unpickler.persistent_load = lambda number: copy.deepcopy(self.parts[number], made)
        return unpickler.load()


def files_of(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Return the folder's files, with their times and sizes."""
    with os.scandir(folder) as entries:
        return tuple(sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in entries))


def copied(key: Hashable, read: Callable[[], Any]) -> Any:
    """Return a copy of what is kept by a key, or is read now."""
    if key not in KEPT:
        KEPT[key] = Pickled(read())
    return KEPT[key].copied()


class Loader:
    """One of transformers' automatic classes."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def from_pretrained(self, folder: str, **options: Any) -> Any:
        """Return a copy of the model and of what is said of its loading, with the random numbers that follow it."""
        if options.keys() != PLAIN or not isinstance(options["dtype"], torch.dtype):
            return self.loader.from_pretrained(folder, **options)

        def read() -> tuple[Any, torch.Tensor]:
            own = {**options, "config": copy.deepcopy(options["config"])}
            return self.loader.from_pretrained(folder, **own), torch.get_rng_state()

        settings, others = repr(vars(options["config"])), (options[name] for name in sorted(PLAIN - {"config"}))
        key = (self.loader, folder, files_of(folder), settings, *others, torch.initial_seed())
        model, state = copied(key, read)
        torch.set_rng_state(state)
        return model


@contextmanager
def reading_once() -> Iterator[None]:
    """Copy what has been read before, inside."""
    settings, loader, tokenizer = load._settings, load._loader, transformers.AutoTokenizer.from_pretrained
    loaded = SentenceEncoder._loaded

    def settings_of(folder: str, trusts: bool) -> Any:
        return copied(("settings", folder, trusts, files_of(folder)), lambda: settings(folder, trusts))

    def tokenizer_of(folder: Any, *args: Any, **options: Any) -> Any:
        if args or options != {"trust_remote_code": False} or not Path(folder).is_dir():
            return tokenizer(folder, *args, **options)
        return copied(("tokenizer", str(folder), files_of(folder)), lambda: tokenizer(folder, **options))

    def encoder_of(encoder: SentenceEncoder) -> Any:
        folder = encoder.config.name
        if encoder._model is None and Path(folder).is_dir():
            key = ("encoder", repr(encoder.config), encoder._device, files_of(folder))
            encoder._model = copied(key, lambda: loaded(encoder))
        return loaded(encoder)

    with (
        mock.patch.object(load, "_settings", settings_of),
        mock.patch.object(load, "_loader", lambda kind: Loader(loader(kind))),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer_of),
        mock.patch.object(SentenceEncoder, "_loaded", encoder_of),
    ):
        yield
