"""The frozen sentence encoder: texts to queries, each text encoded once.

Which layer is read decides how well tasks are separated: SLM takes the mean of the last one, which in sentence encoders
    has learned to drop the style of a text. Two thirds of the way up, content and style are both present: on MiniLM and
    four tasks the paper's
keys find 96.7 % of texts' tasks there and 88.6 % in the last layer, the discriminant 99.2 and 96.3 %, for the same pass
of the encoder.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from safetensors.torch import load, save
from torch import Tensor, nn

from raycl.backbone.load import check_weights
from raycl.backbone.model_files import (
    CONFIG,
    LAYER,
    ONE_AT_A_TIME,
    FetchedFiles,
    folder_of,
    identity_files,
    only_pickled,
    resolve_path,
    unused_revision,
)
from raycl.backbone.model_hashes import fingerprint_of
from raycl.backbone.positions import positions_of
from raycl.config import Section
from raycl.data.loader import parts_by_length
from raycl.errors import RetrievalError, StorageError
from raycl.progress import counted_off
from raycl.storage import Storage
from raycl.storage.records import read_sealed, record_of, write_sealed

log: logging.Logger = logging.getLogger("raycl")


SAMPLE = "Which of these texts is about the same thing?"

FAILURES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)

KEPT_TEXTS, SERVED_TEXTS = 200_000, 4_096
"""The number of texts whose queries stay in memory: in training, where every epoch reads them again (300 MB at 384
dimensions), and in serving, where texts seldom come twice (10 MB). The oldest are dropped first."""


class EncoderConfig(Section):
    """The sentence encoder, and how much of a text it reads."""

    name: Annotated[str, AfterValidator(resolve_path)] = Field(
        "minilm", description="'minilm' (packaged), a hub id, or the path of a sentence-transformers folder"
    )
    revision: str | None = Field(None, description="commit or tag of a hub id")
    layer: Annotated[int, Field(ge=0)] | Literal["auto", "last"] = Field(
        "auto",
        description="layer whose mean is the query; auto: two thirds up; last: the sentence embedding, as in the paper",
    )
    max_tokens: int = Field(256, ge=2, description="longer texts are cut, the same in training and in serving")
    batch_size: int = Field(32, ge=1, description="texts per forward pass")
    allow_pickle: bool = Field(
        False,
        description="accept weights that are not safetensors (pickles can run code); only the command line may set it",
    )

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield the setting of models of the hub."""
        yield from unused_revision(self.name)


class SentenceEncoder:
    """Maps texts to `[B, c]` float32 on the CPU, unnormalised means over real tokens (SLM, section 3.2, and its code).

    An empty text has the query of the encoder's special tokens alone.

    Attributes:
        width: c. truncated: distinct texts that were cut so far.
    """

    def __init__(
        self, config: EncoderConfig, cache: Path | None = None, device: str = "cpu", keeps: int = KEPT_TEXTS
    ) -> None:
        """Prepare; the weights are loaded when the first unknown text comes, which may raise a RetrievalError.

        Args:
            cache: folder that keeps whole sets of queries over runs (`embed_all`); None: none.
            keeps: texts whose queries stay in memory.

        Raises:
            BackboneError: it does not exist.
        """
        self.config = config
        self.fingerprint: str = fingerprint_of(config.name, config.revision, config.allow_pickle)
        self.truncated: int = 0
        self._cache, self._keeps = Storage.at(cache) if cache is not None else None, keeps
        self._device = device
        self._model: Any = None
        self._read: int | None = None
        self._known: dict[str, Tensor] = {}
        self._counted: set[str] = set()

    @property
    def width(self) -> int:
        """The dimensions of a query; a model whose layers have weights of their own is loaded to know them."""
        folder = folder_of(self.config.name, self.config.revision)
        is_alone = all(file.parent == folder for file in identity_files(folder))
        if is_alone and (folder / CONFIG).is_file():
            settings = json.loads((folder / CONFIG).read_text())
            if "hidden_size" in settings:
                return int(settings["hidden_size"])
        model = self._loaded()
        is_last = self.config.layer == "last"
        return int(model.get_embedding_dimension() if is_last else model[0].auto_model.config.hidden_size)

    def _loaded(self) -> Any:
        if self._model is None:
            from sentence_transformers import SentenceTransformer

            folder = folder_of(self.config.name, self.config.revision, FetchedFiles(pickles=self.config.allow_pickle))
            if not self.config.allow_pickle and (file := only_pickled(folder)) is not None:
                raise RetrievalError(
                    f"encoder '{self.config.name}' has pickled weights, which can run code: '{file}' has no "
                    "model.safetensors beside it; expected safetensors, or encoder.allow_pickle=true on the command "
                    "line if you trust the author of the model"
                )
            safe = {} if self.config.allow_pickle else {"use_safetensors": True}
            try:
                with ONE_AT_A_TIME:
                    self._model = SentenceTransformer(str(folder), device=self._device, model_kwargs=safe)
            except (*FAILURES, OSError) as error:
                raise RetrievalError(
                    f"encoder '{self.config.name}' cannot be loaded: {' '.join(str(error).split())[:300]}; expected "
                    "'minilm', a hub id or the folder of a sentence-transformers model"
                ) from error
            self._check_weights(folder)
            limits = [self.config.max_tokens, self._model.tokenizer.model_max_length]
            positions = positions_of(self._model[0].auto_model)
            self._model.max_seq_length = min(limits if positions is None else [*limits, positions])
            self._model.eval()
            if self.config.layer != "last":
                self._model[0].auto_model.config.output_hidden_states = True
                self._shorten()
        return self._model

    def _check_weights(self, folder: Path) -> None:
        """Check that the transformer's weights are all there, since Sentence Transformers draws others at random."""
        place = folder if (folder / CONFIG).is_file() else min(folder.glob(LAYER))
        kind: Any = type(self._model[0].auto_model)
        check_weights(kind, str(place), self.fingerprint, f"encoder '{self.config.name}'", self.config.allow_pickle)

    def _shorten(self) -> None:
        """Drop the layers above the one that is read, where queries stay exactly the same."""
        inner = getattr(self._model[0].auto_model, "encoder", None)
        layers = getattr(inner, "layer", None)
        if inner is None or not isinstance(layers, nn.ModuleList) or not 0 < self._layer(len(layers) + 1) < len(layers):
            return
        before, same = self._passed([SAMPLE]), False
        inner.layer = layers[: self._layer(len(layers) + 1)]
        try:
            same = torch.equal(self._passed([SAMPLE]), before)
        except FAILURES:  # this model counts its layers elsewhere
            log.info("'%s' computes all its layers", self.config.name)
        if not same:
            inner.layer = layers

    def _layer(self, states: int) -> int:
        """Return which of so many hidden states (the embeddings are the first) is read."""
        assert self.config.layer != "last"
        if self._read is None:
            self._read = round(2 * (states - 1) / 3) if self.config.layer == "auto" else self.config.layer
        return self._read

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return queries of texts, those seen before from memory.

        Raises:
            RetrievalError: the encoder gives values that are not finite.
        """
        fresh = list(dict.fromkeys(text for text in texts if text not in self._known))
        if fresh:
            self.remember(fresh, self._computed(fresh))
        queries = torch.stack([self._known[text] for text in texts]) if texts else torch.zeros(0, self.width)
        while len(self._known) > self._keeps:  # a server always encodes new texts
            self._known.pop(next(iter(self._known)))
        return queries

    def remember(self, texts: Sequence[str], queries: Tensor) -> None:
        """Remember queries that were computed elsewhere."""
        self._known.update(zip(texts, queries.unbind(), strict=True))

    def _computed(self, texts: Sequence[str]) -> Tensor:
        model = self._loaded()
        limit = model.max_seq_length
        lengths = model.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
        self.truncated += sum(len(ids) > limit for ids in lengths)
        by_length = sorted(range(len(texts)), key=lambda row: len(lengths[row]))
        queries: Tensor | None = None
        for first in counted_off(range(0, len(texts), self.config.batch_size), "encoding texts, batches"):
            batch = by_length[first : first + self.config.batch_size]
            tokens = [min(len(lengths[row]), limit) for row in batch]
            for part in parts_by_length(tokens) if model.device.type == "cpu" else [range(len(batch))]:
                rows = [batch[number] for number in part]
                found = self._passed([texts[row] for row in rows])
                queries = torch.zeros(len(texts), found.shape[1]) if queries is None else queries
                queries[rows] = found
        assert queries is not None, "no texts"
        bad = ~torch.isfinite(queries).all(1)
        if bool(bad.any()):
            text = texts[int(bad.nonzero()[0])]
            raise RetrievalError(
                f"encoder '{self.config.name}' gives values that are not finite for the text '{text[:60]}': use another"
            )
        return queries

    def _passed(self, texts: list[str]) -> Tensor:
        """Run one forward pass."""
        model = self._loaded()
        features = model.preprocess(texts)
        features = {
            name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in features.items()
        }
        with torch.no_grad():
            out = model(features)
        if self.config.layer == "last":
            embedding: Tensor = out["sentence_embedding"]
            return embedding.float().cpu()
        layers = out["all_layer_embeddings"]
        number = self._layer(len(layers))
        if number >= len(layers):
            raise RetrievalError(
                f"encoder.layer={number}, but '{self.config.name}' has layers 0 to {len(layers) - 1}: name one of them"
            )
        mask = out["attention_mask"].unsqueeze(-1).float()
        mean: Tensor = (layers[number].float() * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return mean.cpu()

    def embed_all(self, texts: Sequence[str], share: tuple[int, int], gather: Callable[[Any], Sequence[Any]]) -> Tensor:
        """Return queries of many texts, computed once by all workers together, and kept on disk by content.

        Args:
            share: this worker's number and how many there are.
            gather: every worker's part from this one's. Collective.
        """
        distinct = list(dict.fromkeys(texts))
        rank, workers = share
        mine = distinct[rank::workers]
        key = hashlib.sha256(
            "\0".join([self.fingerprint, str(self.config.max_tokens), str(self.config.layer), *mine]).encode()
        ).hexdigest()
        parts = gather(self._kept(key, mine))
        for number, (queries, _) in enumerate(parts):
            self.remember(distinct[number::workers], queries)
        if key not in self._counted:
            self._counted.add(key)
            self.truncated += sum(cut for _, cut in parts)
        return self.embed(texts)

    def _kept(self, key: str, texts: Sequence[str]) -> tuple[Tensor, int]:
        """Return queries, and how many of the texts were cut; from disk where they were computed before."""
        cache, file = self._cache, f"{key}.safetensors"
        if cache is not None and cache.exists(record_of(file)):
            try:
                data, seal = read_sealed(cache, file, key)
                return load(data)["queries"], int(seal.info["truncated"])
            except StorageError as error:
                log.warning("queries are computed again: %s", error)
        before = self.truncated
        queries = self._computed(texts) if texts else torch.zeros(0, self.width)
        cut, self.truncated = self.truncated - before, before
        if cache is not None:
            try:
                write_sealed(cache, file, key, save({"queries": queries.contiguous()}), truncated=cut)
            except StorageError as error:
                log.warning("queries are not kept: %s", error)
        return queries, cut
