"""Preparation of a phase: sentence embeddings of its texts, for methods with an encoder."""

from __future__ import annotations

import logging
import time

from torch import Tensor

from raycl.data.tokens import Split
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.training.definition.training_context import TrainingContext
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase

log = logging.getLogger("raycl")

Queries = dict[int, dict[Split, Tensor]]
"""Phase index -> split -> `[rows, C]` sentence embeddings."""


def encode_texts(
    context: TrainingContext, phase: Phase, world: DistributedContext
) -> tuple[tuple[Phase, ...], Queries]:
    """Embed the texts of a phase, or in the first one those of all phases if the method fits ahead.

    Every text is encoded once, shared by the workers; the encoder keeps the embeddings for routing. Collective.

    Returns:
        phases that are new to the method, and their queries.
    """
    encoder = context.method.encoder
    if encoder is None:
        return (), {}
    new: tuple[Phase, ...] = (phase,)
    if context.method.config.fits_ahead:
        new = context.phases if phase.index == 0 else ()
    queries = {
        encoded_phase.index: _encode(context, encoded_phase, encoder, world) for encoded_phase in new or (phase,)
    }
    return new, queries


def _encode(
    context: TrainingContext, phase: Phase, encoder: SentenceEncoder, world: DistributedContext
) -> dict[Split, Tensor]:
    began = time.perf_counter()
    splits: tuple[Split, ...] = ("train", "dev")
    texts = {split: _texts(context, phase, split) for split in splits}
    queries = {
        split: encoder.embed_all(result, (world.rank, world.size), world.gather) for split, result in texts.items()
    }
    if world.is_first:
        log.info("    %d texts encoded in %.1f s", sum(map(len, texts.values())), time.perf_counter() - began)
    return queries


def _texts(context: TrainingContext, phase: Phase, split: Split) -> list[str]:
    """Input texts of a split of all the phase's tasks; none where a task has none."""
    stream, codec = context.stream, context.backbone.codec
    tables = [stream.table(task, split, codec) for task in phase.tasks if len(stream.rows(task, split))]
    return [text for table in tables for text in table.texts(range(len(table)))]
