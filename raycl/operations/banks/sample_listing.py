"""Stored samples of a bank: inputs of users, with adapters (SAPT's pseudo-samples) or in training states (Replay's)."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import torch

from raycl.backbone.codec import HFCodec
from raycl.bank import Bank, Snapshot
from raycl.bank.manifest import ObjectInfo, SnapshotAdapter
from raycl.bank.pruning import removed_from
from raycl.bank.states import state_objects
from raycl.methods.pseudo_samples.samples import PseudoSamples


def stored_samples(bank: Bank, snapshot: Snapshot) -> dict[str, int]:
    """Return task -> number of samples that the snapshot's adapters keep of it.

    Raises:
        BankError: samples are missing, and were not removed on purpose, or are damaged.
    """
    beside = {task: len(samples) for task, samples in _kept(bank, snapshot.adapters)}
    return {task: len(samples) for task, (_, samples) in samples_in_state(bank, snapshot).items()} | beside


def samples_in_state(bank: Bank, snapshot: Snapshot) -> dict[str, tuple[ObjectInfo, PseudoSamples]]:
    """Return task -> the samples that the snapshot's training state alone holds, and their object.

    Raises:
        BankError: the training state is damaged, or samples are missing that were not removed on purpose.
    """
    removed = removed_from(bank.storage).samples
    others = {info.file for entry in snapshot.adapters for info in (entry.tensors, *entry.extras.values())}
    samples = {}
    for group, info in state_objects(bank, snapshot).items():
        kind, _, owner = group.rstrip("/").partition("/")
        gone = info.file in removed and not bank.storage.exists(info.file)
        if not (kind and owner and group.endswith("/")) or info.file in others or gone:
            continue
        tensors = bank.get(info, f"the training state of snapshot {snapshot.number} ({group})")
        if PseudoSamples.are_in(tensors):
            samples[owner] = (info, PseudoSamples.of(tensors))
    return samples


def sample_files(bank: Bank, snapshot: Snapshot) -> set[str]:
    """Return the files of the snapshot's stored samples.

    Raises:
        BankError: see `samples_in_state`.
    """
    beside = {info.file for entry in snapshot.adapters for info in entry.extras.values()}
    return beside | {info.file for info, _ in samples_in_state(bank, snapshot).values()}


def sample_texts(bank: Bank, snapshot: Snapshot, adapters: Iterable[SnapshotAdapter], codec: HFCodec) -> dict[str, str]:
    """Return task -> lines `{"text": ...}`, as `method.arm.files` reads them: without the prompt around each text.

    Raises:
        BankError: see `stored_samples`.
    """
    prompts = {info.name: info.prompt for info in snapshot.tasks}
    texts_by_task = {}
    for task, samples in _kept(bank, adapters):
        before, behind = codec.encode_source(list(prompts.get(task, ("", ""))))
        texts = [codec.decode(torch.tensor([_inner(ids, before, behind)]))[0] for ids in samples.sources]
        texts_by_task[task] = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    return texts_by_task


def _inner(ids: Sequence[int], before: Sequence[int], behind: Sequence[int]) -> Sequence[int]:
    first = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False))))
    left = ids[first:]
    last = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(left), reversed(behind), strict=False))))
    return left[: len(left) - last]


def _kept(bank: Bank, adapters: Iterable[SnapshotAdapter]) -> Iterator[tuple[str, PseudoSamples]]:
    removed = removed_from(bank.storage).samples
    for entry in adapters:
        for kind, info in entry.extras.items():
            if info.file not in removed or bank.storage.exists(info.file):
                yield "+".join(entry.tasks), PseudoSamples.of(bank.get(info, f"{entry} ({kind})"))
