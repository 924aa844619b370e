"""Measures large backbones, at 7B: packed rows, loading, FSDP2 on one GPU, weights in eight and four bits.

Steps are LoRA's, over the same unquantized weights under torch's engine, which take turns with the contender. Files are
those of the drawn model, in a temporary folder (TMPDIR says where), and are loaded as users' files are.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from benchmarks.figures import Figure
from benchmarks.gpu.models import batch_to_learn, decoder, sizes_of, twin
from benchmarks.gpu.parts.steps import SAME_LOSS, Learner, plain_lora
from benchmarks.gpu.setup import Case, Setup, check_close, check_equal, ratio
from benchmarks.gpu.timing import Times
from benchmarks.step import unlike_batch
from raycl.backbone import Backbone, BackboneConfig, BackboneOptions, load_backbone
from raycl.backbone.causal import join
from raycl.backbone.linears import Quantization
from raycl.training.engines.fsdp import shard
from raycl.types import IGNORE, Batch

SIZE = "7B"
BATCH, TINY_BATCH = (8, 512, 128), (4, 12, 3)
"""Rows, tokens in all, tokens of answers."""
UNLIKE, TINY_UNLIKE = (16, 448, 64), (6, 16, 3)
"""Rows, tokens of the longest prompt and of the longest answer, where rows are padded or packed."""

PACKED_LIMIT, FSDP_LIMIT, LOADING_LIMIT = 0.75, 1.10, 1.5
QUANTIZED_LIMIT = 1.5
"""The limit of a step's time, relative to float weights."""
WEIGHTS: dict[Quantization, float] = {"int8": 0.55, "nf4": 0.32}
"""Memory of quantized weights over bfloat16's, embeddings included: 1/2 and 1/4 without them."""
NEAR_LOSS = 0.05
"""The tolerance of first losses with quantized weights."""
ROUNDS = 2
"""The rounds of loading."""
PIECE = 2**26
"""Bytes that are read at once."""


def cases(setup: Setup) -> Iterator[Case]:
    """They share one model; the first ones need no package."""
    disable_progress_bar()
    large = Large(setup)
    yield Case("packing", large.packing)
    yield Case("loading", large.loading)
    yield Case("fsdp", large.fsdp)
    for name in WEIGHTS:
        yield Case(name, partial(large.quantized, name), needs=("bitsandbytes",))


class Large:
    """The unquantized model, and its files; both are made when needed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @cached_property
    def base(self) -> Backbone:
        """The model on the device."""
        return decoder(self.setup, SIZE)

    @cached_property
    def folder(self) -> Path:
        """The folder with the weights of `base`."""
        folder = Path(self.setup.closing.enter_context(tempfile.TemporaryDirectory()))
        self.base.model.save_pretrained(folder)
        return folder

    @cached_property
    def batch(self) -> Batch:
        """Rows of the same length."""
        rows, tokens, answers = TINY_BATCH if self.setup.tiny else BATCH
        vocabulary = sizes_of(self.setup, SIZE).vocabulary
        return batch_to_learn(self.setup, rows, tokens, answers, vocabulary).to(self.setup.device)

    def load(self, quantization: Quantization = "none") -> Backbone:
        """Load the files to the device."""
        dtype: Any = str(self.setup.dtype).removeprefix("torch.")
        config = BackboneConfig(name=str(self.folder), dtype=dtype, quantization=quantization)
        return load_backbone(config, self.base.codec, self.setup.device, 0, BackboneOptions(trains=True))

    def packing(self, seconds: float) -> Iterator[Figure]:
        """Yield the same unlike rows, padded and packed: so many useful tokens in both."""
        sizes = TINY_UNLIKE if self.setup.tiny else UNLIKE
        batch = unlike_batch(*sizes, sizes_of(self.setup, SIZE).vocabulary, 0)
        useful = int(batch.source_mask.sum() + (batch.target_ids != IGNORE).sum())
        share = useful / join(batch, 0)[0].numel()
        batch = batch.to(self.setup.device)
        packs = twin(self.base)
        packs.check_packing()
        packs.packs = True
        backbones = {"padded": twin(self.base), "packed": packs}
        learners = {name: Learner(self.setup, plain_lora(backbone), batch) for name, backbone in backbones.items()}
        times = _in_turn(self.setup, learners, SAME_LOSS, seconds)
        detail = f"{100 * share:.0f} % of {len(batch)} padded rows are tokens"
        what = "packed rows: time for a useful token over padded rows"
        yield ratio(what, times["packed"], times["padded"], PACKED_LIMIT, detail)

    def loading(self, seconds: float) -> Iterator[Figure]:
        """Yield files that are not in memory, read one after another, and loaded to the device."""
        files = sorted(self.folder.glob("*.safetensors"))
        works = {"read": partial(_read, files), "load": partial(self._loaded, files)}
        spent: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(1 if self.setup.tiny else ROUNDS):
            for name, work in works.items():
                _forget(files)
                began = time.perf_counter()
                work()
                spent[name].append(time.perf_counter() - began)
                self.setup.free()
        read, load = (Times(tuple(spent[name])) for name in works)
        size = sum(file.stat().st_size for file in files)
        mapped = "" if self.setup.is_cuda else "; on a CPU files are mapped, and read when a pass needs them"
        detail = f"{size / 1e9:.3g} GB, read at {size / read.median / 1e9:.3g} GB/s{mapped}"
        yield ratio("loading: disk to device over reading the files", load, read, LOADING_LIMIT, detail)

    def _loaded(self, files: Sequence[Path]) -> None:
        loaded = self.load()
        self.setup.synchronize()
        head, expected = (item.model.get_output_embeddings().weight for item in (loaded, self.base))
        check_equal(f"output words loaded from {len(files)} files", bool(torch.equal(head, expected)), True)

    def fsdp(self, seconds: float) -> Iterator[Figure]:
        """FSDP2 over one device: gathering is a copy, so what is measured is its machinery."""
        if not dist.is_initialized():
            self.setup.closing.callback(dist.destroy_process_group)
        torch_engine = Learner(self.setup, plain_lora(twin(self.base)), self.batch)
        backbone = twin(self.base)
        root = shard(backbone, torch_engine.world, trains_layers=False)
        learners = {"torch": torch_engine, "fsdp": Learner(self.setup, plain_lora(backbone), self.batch, root)}
        times = _in_turn(self.setup, learners, SAME_LOSS, seconds)
        yield ratio("fsdp on one worker: step over the torch engine's", times["fsdp"], times["torch"], FSDP_LIMIT)

    def quantized(self, name: Quantization, seconds: float) -> Iterator[Figure]:
        """Yield a step's time, and the memory of weights."""
        backbones = {"unquantized": twin(self.base), name: self.load(name)}
        sizes = {which: _weight_bytes(backbone.model) for which, backbone in backbones.items()}
        learners = {
            which: Learner(self.setup, plain_lora(backbone), self.batch) for which, backbone in backbones.items()
        }
        times = _in_turn(self.setup, learners, NEAR_LOSS, seconds)
        yield ratio(f"{name}: step over unquantized weights", times[name], times["unquantized"], QUANTIZED_LIMIT)
        mine, theirs = sizes[name], sizes["unquantized"]
        limit = None if self.setup.tiny else WEIGHTS[name]
        detail = f"{mine / 2**30:.3g} GiB against {theirs / 2**30:.3g} GiB of {self.setup.dtype}"
        yield Figure(f"{name}: memory of weights over unquantized ones", mine / theirs, "x", limit, detail=detail)
        if times[name].peak_gib is not None:
            yield from self._step_memory(name, sizes, times)

    def _step_memory(self, name: str, sizes: dict[str, int], times: dict[str, Times]) -> Iterator[Figure]:
        """Yield weights, and what a step allocates beside both models, which are on the device together."""
        held = torch.cuda.memory_allocated(self.setup.device) / 2**30
        needs = {which: sizes[which] / 2**30 + (times[which].peak_gib or 0.0) - held for which in sizes}
        detail = f"{needs[name]:.3g} GiB against {needs['unquantized']:.3g} GiB, weights included"
        what = f"{name}: memory of a step over unquantized weights"
        yield Figure(what, needs[name] / needs["unquantized"], "x", 1.0, detail=detail)


def _in_turn(setup: Setup, learners: dict[str, Learner], tolerance: float, seconds: float) -> dict[str, Times]:
    """Measure a step; first losses are the first learner's, since new adapters add nothing."""
    losses = torch.tensor([learner.step().loss for learner in learners.values()])
    check_close(f"first losses of {', '.join(learners)}", losses, losses[:1], tolerance)
    return setup.turns({name: learner.step for name, learner in learners.items()}, seconds)


def _weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, with the scales of quantized ones."""
    return sum(
        tensor.numel() * tensor.element_size() for weight in model.parameters() for tensor in _tensors_of(weight)
    )


def _tensors_of(weight: Any) -> Iterator[Tensor]:
    yield weight
    state, scales = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
    if state is not None:
        yield state.absmax
        if state.nested:
            yield state.state2.absmax
    if scales is not None:
        yield scales


def _read(files: Sequence[Path]) -> None:
    room = bytearray(PIECE)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(room):
                pass


def _forget(files: Sequence[Path]) -> None:
    """Drop the files from the system's page cache, where it can be asked to."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
