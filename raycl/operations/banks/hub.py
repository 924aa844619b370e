"""Push a snapshot to the Hugging Face hub: adapters as PEFT loads them, the bank's records, a model card.

`raycl.training.records.hub` has the layout of the repository, and pulls it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from raycl.adapters.card import METADATA, PIPELINES
from raycl.backbone.codec import capabilities_of
from raycl.backbone.model_files import hub_client_error, published_name
from raycl.bank import Bank, Snapshot
from raycl.bank.bank import info_of
from raycl.bank.manifest import snapshot_file
from raycl.bank.states import get_record, get_router
from raycl.errors import AdapterError, BankError, RunError, StorageError, counted
from raycl.operations.banks.exchange import CARD, CONFIG, LABELS, card_metadata, export_peft, mixed
from raycl.operations.banks.sample_listing import sample_files
from raycl.progress import counted_off
from raycl.routing.routers import router_class
from raycl.storage import Storage
from raycl.storage.records import read_fields, seal
from raycl.training.records.hub import (
    FORMAT,
    HEAD,
    HUB,
    RECORD,
    ROOT,
    TENSORS,
    HubAddress,
    HubRecord,
    cause_of,
    objects_to_pull,
    records_of,
    shared,
    shared_record,
    tensors_in,
)
from raycl.training.records.journal import read_state

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

log: logging.Logger = logging.getLogger("raycl")

FILES = (TENSORS, CONFIG, HEAD, LABELS, METADATA, CARD)
"""Files of an adapter's folder."""

TOGETHER = 8
"""Files that are sent between two reports of progress."""

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Phase -> task -> cell of the accuracy matrix."""


@dataclass(frozen=True)
class CardFields:
    """The fields of a card that a user sets for a pushed bank; None or (): as the repository's card has it.

    Attributes:
        language: codes of ISO 639. license: identifier of the hub, such as apache-2.0. datasets: ids on the hub.
    """

    language: tuple[str, ...] = ()
    license: str | None = None
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pushed:
    """A pushed snapshot.

    Attributes:
        commit: of the repository.
        folders: folder in PEFT's layout -> its adapters, and the weight of each: those of a task.
        own: folder that was not written -> why its adapters are in raycl's own format alone.
    """

    commit: str
    folders: dict[str, dict[str, float]]
    own: dict[str, str]


def push(
    bank: Bank,
    snapshot: Snapshot,
    branch: str,
    repository: str,
    fields: CardFields,
    with_samples: bool = False,
    private: bool | None = None,
) -> Pushed:
    """Write a snapshot to a repository in one commit; large files that a push before has sent are not sent again.

    Args:
        branch: branch that points at the snapshot in a pulled bank.
        with_samples: stored samples, inputs of users, are part of it.
        private: visibility of a new repository; None: as the organization has it.

    Raises:
        BankError: something is missing or damaged, the hub refuses it, or another commit was made meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # a command has bars of its own
    without = () if with_samples else tuple(sorted(sample_files(bank, snapshot)))
    rows, snapshot = accuracy_rows(bank, snapshot), shared(snapshot)
    with TemporaryDirectory() as folder:
        pushed = _stage(bank, snapshot, branch, without, Storage.at(folder))
        try:
            api = HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            parent = api.model_info(repository).sha
            there = api.list_repo_files(repository, revision=parent)
            known = ModelCard.load(repository, ignore_metadata_errors=True).data if CARD in there else None
            text = bank_card(snapshot, rows, repository, _filled(fields, known, snapshot), pushed, without)
            Path(folder, CARD).write_text(text, encoding="utf-8")
            files = {str(path.relative_to(folder)): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
            additions = [CommitOperationAdd(name, path) for name, path in files.items()]
            for first in counted_off(range(0, len(additions), TOGETHER), "sending files, batches"):
                api.preupload_lfs_files(repository, additions[first : first + TOGETHER], free_memory=False)
            old = sorted(_written_before(repository, parent, there) - files.keys())
            tasks = _listed(task.name for task in snapshot.tasks)
            done = api.create_commit(
                repository,
                [*additions, *(CommitOperationDelete(name) for name in old)],
                commit_message=f"Snapshot {snapshot.number} ({snapshot.sha256[:12]}): {tasks}",
                parent_commit=parent,
            )
        except (OSError, ValueError, RuntimeError, hub_client_error()) as error:
            raise BankError(
                f"cannot push to {HUB}{repository}: {cause_of(error.__cause__ or error)}; expected ORG/NAME that you "
                "may write to (log in with `hf auth login`); what was sent stays there: try again"
            ) from error
    return replace(pushed, commit=done.oid)


def _written_before(repository: str, commit: str | None, there: Collection[str]) -> set[str]:
    """Return those of a commit's files that a push wrote, which the next one replaces; others are not raycl's.

    Args:
        there: all files of the commit.
    """
    ours = {name for name in there if name.startswith(f"{ROOT}/")}
    if f"{ROOT}/{RECORD}" in ours:
        folder = HubAddress(repository, revision=commit).fetch([f"{ROOT}/{RECORD}"])
        try:
            record = read_fields(Storage.at(folder / ROOT), RECORD, FORMAT, HubRecord)
        except StorageError as error:  # this push replaces the record
            log.warning(
                "old folders of adapters stay in %s%s, since its record is unreadable: %s", HUB, repository, error
            )
        else:
            ours |= {f"{name}/{file}" for name in record.folders for file in FILES} & set(there)
    return ours


def _stage(bank: Bank, snapshot: Snapshot, branch: str, without: Sequence[str], folder: Storage) -> Pushed:
    """Write everything but the card to a folder."""
    written: dict[str, dict[str, float]] = {}
    own: dict[str, str] = {}
    exact: dict[str, str] = {}
    linear_heads = snapshot.router.settings.get("head_rule") in ("logit", "sum")
    for name, weights in counted_off(_folders(bank, snapshot).items(), "writing folders for PEFT"):
        try:
            state = mixed(bank, snapshot, weights, head=len(weights) == 1 or linear_heads)
            export_peft(state, card_metadata(snapshot, weights), folder.sub(name).address)
        except AdapterError as error:
            own[name] = str(error)
            continue
        written[name] = weights
        entry = snapshot.adapter(next(iter(weights)))
        if len(weights) == 1 and info_of(tensors_in(folder.sub(name))) == entry.tensors:
            exact[entry.name] = name
    whole = {snapshot.adapter(name).tensors.file for name in exact}
    ours = folder.sub(ROOT)
    for file, info in counted_off(objects_to_pull(bank, snapshot, without).items(), "reading what is pushed"):
        if file not in whole:
            ours.write(file, bank.read_object(info, f"snapshot {snapshot.number} ({file})"))
    for file in records_of(snapshot):
        ours.write(file, shared_record(file, bank.storage.read(file)))
    ancestors = _ancestors(bank, snapshot)
    record = HubRecord(
        snapshot.number, snapshot.sha256, branch, ancestors, exact, tuple(written), without=tuple(without)
    )
    ours.write(RECORD, seal({"format": FORMAT, **vars(record)}))
    return Pushed("", written, own)


def _ancestors(bank: Bank, snapshot: Snapshot) -> dict[int, str]:
    """Return number -> SHA-256 of the snapshots that it descends from, back to where they were pruned."""
    hashes: dict[int, str] = {}
    while snapshot.parent is not None and bank.storage.exists(snapshot_file(snapshot.parent)):
        snapshot = bank.open(snapshot.parent)
        hashes[snapshot.number] = shared(snapshot).sha256
    return hashes


def _folders(bank: Bank, snapshot: Snapshot) -> dict[str, dict[str, float]]:
    """Return folder -> adapter -> weight: a folder for each task that has adapters of its own, else for each adapter.

    Several adapters of a task have the weights that its texts give them on average.
    """
    owned: dict[str, list[str]] = {}
    for entry in snapshot.adapters:
        for task in entry.tasks:
            owned.setdefault(task, []).append(entry.name)
    folders: dict[str, dict[str, float]] = {}
    for entry in snapshot.adapters:
        task = entry.tasks[0] if len(entry.tasks) == 1 else ""
        names = owned.get(task, [])
        weights: dict[str, float] | None = {entry.name: 1.0}
        if len(names) > 1:
            are_own = all(snapshot.adapter(name).tasks == (task,) for name in names)
            weights = router_class(snapshot.router).own_weights(get_router(bank, snapshot), names) if are_own else None
        is_named = any(task == other.name for other in snapshot.adapters if other.name not in names)
        name = task if task and weights and not is_named else entry.name
        name = f"{name}-adapter" if name.casefold() in (ROOT, CARD.casefold()) else name
        folders[name] = weights or {entry.name: 1.0}
    return folders


def accuracy_rows(bank: Bank, snapshot: Snapshot) -> Rows:
    """Return the accuracy matrix that the snapshot's run has recorded: phase -> task -> cell.

    The bank's training state lacks the row of the newest task, which was scored after it was published; the run's
    folder has it, if it is on this machine.
    """
    run = str(snapshot.provenance.get("run") or "")
    if run and "://" not in run:  # a record does not decide where requests go
        with suppress(RunError, StorageError):
            phases = read_state(Storage.at(run)).phases
            published = [record["bank"]["snapshot"] if record["bank"] else None for record in phases]
            if snapshot.number in published:
                return _rows(phases[: published.index(snapshot.number) + 1])
    with suppress(BankError):
        return _rows(get_record(bank, snapshot)[0]["phases"])
    return {}


def _rows(phases: Sequence[Mapping[str, Any]]) -> Rows:
    return {str(record["times"]["phase"]): record["row"] for record in phases}


def _filled(given: CardFields, known: Any, snapshot: Snapshot) -> CardFields:
    """Return the fields with those of the repository's card where the user says nothing."""
    stream = snapshot.provenance.get("config", {}).get("stream", {})
    paths = [str(task.get("path", "")) for task in stream.get("tasks") or () if isinstance(task, dict)]
    used = tuple(dict.fromkeys(path.removeprefix(HUB).removeprefix("datasets/") for path in paths if HUB in path))

    def of_card(name: str) -> tuple[str, ...]:
        value = known.get(name) if known is not None else None
        return (value,) if isinstance(value, str) else tuple(value or ())

    return CardFields(
        given.language or of_card("language"),
        given.license or next(iter(of_card("license")), None),
        given.datasets or used or of_card("datasets"),
    )


def bank_card(
    snapshot: Snapshot, rows: Rows, repository: str, fields: CardFields, pushed: Pushed, without: Sequence[str]
) -> str:
    """Return the model card: metadata with the accuracy matrix as results, and how the bank is used."""
    from huggingface_hub import ModelCard

    settings = snapshot.provenance.get("config", {}).get("backbone", {})
    base = published_name(settings.get("name", snapshot.backbone.name))
    data = _metadata(snapshot, repository, base, fields, rows)
    kind = router_class(snapshot.router)
    mixes = "mixes adapters for each text" if kind.chooses else "adds up all adapters for every text"
    needs = "needs the task of each text" if "task_id" in kind.needs else "needs no task id"
    samples = f" {counted(len(without), 'file')} of stored samples, inputs of users, were left out." if without else ""
    parts = [
        f"# {repository.rpartition('/')[2]}",
        f"{counted(len(snapshot.tasks), 'task')}, learned one after another on `{_shown(base)}` (SHA-256 over its "
        f"files `{snapshot.backbone.sha256}`): snapshot {snapshot.number} of a bank of raycl. Its router "
        f"`{snapshot.router.kind}` {mixes}, and {needs}.{samples}",
        f"```sh\nraycl predict {HUB}{repository} rows.csv --text text\nraycl serve {HUB}{repository}\n"
        f"raycl train bank.start={HUB}{repository} 'stream.tasks=[data/tickets]'\n```",
        _adapters(snapshot, repository, pushed),
        _matrix(snapshot, rows),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"))


def _metadata(snapshot: Snapshot, repository: str, base: str, fields: CardFields, rows: Rows) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    pipeline = PIPELINES[capabilities_of(snapshot.backbone.kind).answers]
    metrics = {task.name: task.metric for task in snapshot.tasks}
    results = [
        EvalResult(pipeline, task, task, metrics[task], cell["value"], metric_name=f"{metrics[task]} after {phase}")
        for phase, row in rows.items()
        for task, cell in row.items()
        if task in metrics
    ]
    known = None if _is_local(base) else base
    return ModelCardData(
        base_model=known,
        base_model_relation=known and "adapter",
        language=list(fields.language) or None,
        license=fields.license,
        datasets=list(fields.datasets) or None,
        metrics=sorted(set(metrics.values())),
        library_name="peft",
        pipeline_tag=pipeline,
        tags=["lora", "continual-learning", "raycl"],
        model_name=repository.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _is_local(base: str) -> bool:
    return base.startswith(("/", "."))


def _shown(base: str) -> str:
    return Path(base).name if _is_local(base) else base


def _adapters(snapshot: Snapshot, repository: str, pushed: Pushed) -> str:
    rows = [
        (f"`{folder}/`", _listed(task for name in weights for task in snapshot.adapter(name).tasks), _weighted(weights))
        for folder, weights in pushed.folders.items()
    ]
    rows += [(folder, "", f"raycl's own format: {reason}") for folder, reason in pushed.own.items()]
    text = f"## Adapters\n\n{_table(('folder', 'tasks', 'adapters'), rows)}"
    if not pushed.folders:
        return text
    auto = {"CAUSAL_LM": "ModelForCausalLM", "SEQ_2_SEQ_LM": "ModelForSeq2SeqLM"}
    loader = f"Auto{auto.get(capabilities_of(snapshot.backbone.kind).task_type, 'Model')}"
    folder = next(iter(pushed.folders))
    lines = (
        "from peft import PeftModel",
        f"from transformers import {loader}",
        "",
        f"model = {loader}.from_pretrained(BASE)  # the base model above",
        f'model = PeftModel.from_pretrained(model, "{repository}", subfolder="{folder}")',
    )
    code = "\n".join(lines)
    return (
        f"{text}\n\nPEFT loads each folder by itself, and the card in it has the prompt of its task, labels and lines "
        f"to run:\n\n```python\n{code}\n```"
    )


def _weighted(weights: Mapping[str, float]) -> str:
    if len(weights) == 1:
        return next(iter(weights))
    shares = ", ".join(f"{name} {weight:.3f}" for name, weight in weights.items() if weight)
    return f"the mean mixture of the task's texts: {shares}"


def _matrix(snapshot: Snapshot, rows: Rows) -> str:
    if not rows:
        return ""
    tasks = [task.name for task in snapshot.tasks]
    cells = [
        (f"after {phase}", *(f"{row[task]['value']:.1f}" if task in row else "" for task in tasks))
        for phase, row in rows.items()
    ]
    return f"## Accuracy\n\nScores from 0 to 100 after each task.\n\n{_table(('', *tasks), cells)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _listed(tasks: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(tasks))
