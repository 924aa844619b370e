"""The commands of `raycl bank`: each returns an answer as text and as a tree for scripts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycl.backbone import BackboneConfig, load_codec
from raycl.backbone.codec import capabilities_of
from raycl.backbone.model_files import FetchedFiles, folder_of
from raycl.bank import AdapterRef, Bank, Snapshot
from raycl.bank.branches import (
    MAIN,
    TAGS,
    Branch,
    branch_names,
    head_of,
    is_ancestor,
    is_branch_name,
    missing_branch,
    resolve,
)
from raycl.bank.manifest import snapshot_file
from raycl.config.trust import Permissions
from raycl.data.sources.fields import TEXT_NAMES, Columns
from raycl.errors import BankError, BranchMovedError, counted, meant
from raycl.operations.banks import merge as merging
from raycl.operations.banks.exchange import (
    card_metadata,
    convert,
    converter,
    export_merged,
    export_peft,
    import_peft,
    import_routed,
    mixed,
)
from raycl.operations.banks.maintenance import Named, diff, prune, verify
from raycl.operations.banks.sample_listing import sample_texts, stored_samples
from raycl.operations.banks.vllm import MIXTURE, export_vllm, of_one_rank
from raycl.routing.routers import router_class
from raycl.serve.offline.prediction_input import Input, files_at
from raycl.serve.snapshots.parts import backbone_of, router_of
from raycl.storage import Storage
from raycl.text_tables import grid, render
from raycl.training.records.hub import on_hub
from raycl.training.records.journal import last_attempt, read_state
from raycl.training.records.named_bank import bank_and_reference, bank_at, find_bank, split_reference
from raycl.types import Score

if TYPE_CHECKING:
    from raycl.operations.banks.unlearning import RecordedSources


@dataclass(frozen=True)
class CommandResult:
    """The answer of a command; `ok` False makes the job fail."""

    text: str
    tree: Any
    ok: bool = True


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return columns and rows as text."""
    drawn = grid(columns, ([str(cell) for cell in row] for row in rows), left=len(columns))
    drawn.show_header = any(columns)
    for column in drawn.columns:
        column.overflow = "fold"
    return render(drawn, 160)


def branches(bank: Bank, options: Namespace) -> CommandResult:
    """Return each branch, and what moved it where it is."""
    tree: list[dict[str, Any]] = []
    for name in branch_names(bank):
        last, head = Branch(bank, name).last(), head_of(bank, name)
        assert last is not None, "a branch that exists has moved"
        entry = {"branch": name, "snapshot": head.number, "sha256": head.sha256}
        tree.append({**entry, "tasks": [task.name for task in head.tasks], "why": last.why, "time": last.time})
    columns = ("branch", "snapshot", "sha256", "tasks", "moved", "by")
    rows = [
        (entry["branch"], entry["snapshot"], _digits(entry), ", ".join(entry["tasks"]), _when(entry), entry["why"])
        for entry in tree
    ]
    return CommandResult(table(columns, rows), tree)


def log(bank: Bank, options: Namespace) -> CommandResult:
    """Return a snapshot's line back to the first: what each changed, and what a branch left when it went back there."""
    entries = []
    is_branch = is_branch_name(options.branch) and Branch(bank, options.branch).head() is not None
    back = Branch(bank, options.branch).steps_back() if is_branch else []
    snapshot: Snapshot | None = resolve(bank, options.branch)
    while snapshot is not None:
        parent = snapshot.parent
        before = bank.open(parent) if parent is not None and bank.storage.exists(snapshot_file(parent)) else None
        entries.append(
            {
                "snapshot": snapshot.number,
                "sha256": snapshot.sha256,
                "parent": parent,
                **_changed_tasks(snapshot, before),
                "tasks": [task.name for task in snapshot.tasks],
                "run": snapshot.provenance.get("run", ""),
                "went_back_from": [left for left, move in back if move.snapshot == snapshot.number],
            }
        )
        snapshot = before
    end = "" if entries[-1]["parent"] is None else f"\nsnapshot {entries[-1]['parent']} and those before it were pruned"
    rows = [(entry["snapshot"], _digits(entry), _change(entry), len(entry["tasks"]), entry["run"]) for entry in entries]
    line = {entry["snapshot"] for entry in entries}
    steps = [
        f"\n{_when(asdict(move))}: the branch went back from snapshot {left} to {move.snapshot} ({move.why})"
        for left, move in back
        if move.snapshot in line
    ]
    return CommandResult(table(("snapshot", "sha256", "change", "tasks", "run"), rows) + end + "".join(steps), entries)


def _changed_tasks(snapshot: Snapshot, before: Snapshot | None) -> dict[str, list[str]]:
    """Return the tasks that a snapshot adds to its parent, those that it lacks, and the one that it learned again."""
    now, known = [task.name for task in snapshot.tasks], [task.name for task in before.tasks] if before else []
    added, removed = [name for name in now if name not in known], [name for name in known if name not in now]
    learned = snapshot.provenance.get("phase_name")
    again = before is not None and not added and not removed and "fused" not in snapshot.provenance
    return {
        "tasks_added": added,
        "tasks_removed": removed,
        "tasks_again": [learned] if again and learned in now else [],
    }


def _change(entry: dict[str, Any]) -> str:
    removed, again = entry["tasks_removed"], entry["tasks_again"]
    words = [*entry["tasks_added"], *(f"without {name}" for name in removed), *(f"{name} again" for name in again)]
    return ", ".join(words)


def promote(bank: Bank, options: Namespace) -> CommandResult:
    """Return a branch moved forward to a snapshot that descends from it."""
    snapshot, target = resolve(bank, options.branch), Branch(bank, options.to)
    before = target.head()
    try:
        target.advance(snapshot, f"promoted from {options.branch}")
    except BranchMovedError as error:
        raise BankError(
            f"'{options.branch}' (snapshot {snapshot.number}) does not descend from snapshot {before}, the head of "
            f"'{options.to}', so '{options.to}' would lose what it has: train again from '{options.to}', or promote "
            "onto another branch with --to"
        ) from error
    tree = {"branch": options.to, "before": before, "snapshot": snapshot.number, "sha256": snapshot.sha256}
    moved = f"branch '{options.to}' points at snapshot {snapshot.number}"
    return CommandResult(f"{moved} (before: {'nothing' if before is None else f'snapshot {before}'})", tree)


def rollback(bank: Bank, options: Namespace) -> CommandResult:
    """Return a branch moved back to a snapshot that it had."""
    snapshot, branch = resolve(bank, options.to), Branch(bank, options.branch)
    before = branch.head()
    branch.go_back(snapshot, options.why)
    tree = {"branch": branch.name, "before": before, "snapshot": snapshot.number, "sha256": snapshot.sha256}
    forward = before is not None and is_ancestor(bank, snapshot.number, bank.open(before))
    again = f"promote {before} --to {branch.name}" if forward else f"rollback --to {before} --branch {branch.name}"
    text = (
        f"branch '{branch.name}' went back from snapshot {before} to {snapshot.number}, and so do endpoints that "
        f"follow it; the next task is learned from there, and `{again}` undoes this"
    )
    return CommandResult(text, tree)


def merge(bank: Bank, options: Namespace) -> CommandResult:
    """Return a snapshot with the tasks of two."""
    ours = resolve(bank, options.ours)
    is_elsewhere = "@" in options.theirs or on_hub(options.theirs)
    other, reference = bank_and_reference(options.theirs) if is_elsewhere else (bank, options.theirs)
    theirs = resolve(other, reference)
    merged = merging.merge(bank, ours, theirs, other, options.with_samples)
    tree = {"snapshot": merged.number, "tasks": [task.name for task in merged.tasks], "branch": None}
    text = f"snapshot {merged.number} has the tasks of snapshots {ours.number} and {theirs.number}"
    name = options.to or (options.ours if is_branch_name(options.ours) else None)
    if name is not None:
        Branch(bank, name).advance(merged, f"{options.theirs} merged")
        tree["branch"] = name
        text += f"; branch '{name}' points at it"
    text += f": {', '.join(task.name for task in merged.tasks)}"
    back = f"`rollback --to {ours.number}` goes back to one that has"
    return CommandResult(f"{text}\nit has no training state: it answers, and no run can start from it; {back}", tree)


def tag(bank: Bank, options: Namespace) -> CommandResult:
    """Return a snapshot with a name that never moves."""
    snapshot, name = resolve(bank, options.snapshot), TAGS + options.tag
    Branch(bank, name).advance(snapshot, f"tagged by hand at {options.snapshot}")
    tree = {"tag": options.tag, "snapshot": snapshot.number, "sha256": snapshot.sha256}
    return CommandResult(f"tag '{options.tag}' names snapshot {snapshot.number}", tree)


def delete(bank: Bank, options: Namespace) -> CommandResult:
    """Return a branch deleted."""
    branch = Branch(bank, options.branch)
    head = next(branch.newest_first(), None)
    branch.delete("deleted by hand")
    text = (
        f"branch '{options.branch}' is deleted (it was at snapshot {head}); its snapshots stay until they are pruned "
        f"(prune --keep-snapshots), `promote {head} --to NAME` brings it back"
    )
    return CommandResult(text, {"branch": options.branch, "snapshot": head})


def _digits(entry: dict[str, Any]) -> str:
    return str(entry["sha256"])[:12]


def _when(entry: dict[str, Any]) -> str:
    return datetime.fromtimestamp(entry["time"]).isoformat(" ", "seconds")


def _list(bank: Bank, options: Namespace) -> CommandResult:
    if options.reference:
        snapshots = [resolve(bank, options.reference)]
        adapters = {entry.name: [entry.version] for entry in snapshots[0].adapters}
    else:
        snapshots = [bank.open(number) for number in bank.snapshots()]
        adapters = {name: bank.versions(name) for name in bank.names()}
    tree: dict[str, Any] = {
        "snapshots": [
            {
                "number": s.number,
                "parent": s.parent,
                "router": s.router.kind,
                "backbone": s.backbone.name,
                "tasks": [task.name for task in s.tasks],
                "adapters": [str(entry) for entry in s.adapters],
            }
            for s in snapshots
        ],
        "adapters": adapters,
    }
    first = table(
        ("snapshot", "router", "backbone", "tasks", "adapters"),
        [
            (s["number"], s["router"], s["backbone"], ", ".join(s["tasks"]), len(s["adapters"]))
            for s in tree["snapshots"]
        ],
    )
    second = table(
        ("adapter", "versions"), [(name, ", ".join(map(str, numbers))) for name, numbers in adapters.items()]
    )
    return CommandResult(f"{first}\n\n{second}", tree)


def _show(bank: Bank, options: Namespace) -> CommandResult:
    what: str | None = options.what
    if what is None or what.isdigit():
        snapshot = resolve(bank, what or options.snapshot)
        tree = {"stored_samples": stored_samples(bank, snapshot), **snapshot.model_dump(mode="json")}
    else:
        name, _, number = what.partition("@")
        versions = bank.versions(name)
        if not versions or (number and not number.isdigit()):
            raise BankError(
                f"the bank '{bank.storage.uri}' has no adapter '{what}': {meant(name, bank.names())}, as NAME or "
                "NAME@VERSION, or the number of a snapshot"
            )
        tree = bank.manifest(AdapterRef(name=name, version=int(number or versions[-1]))).model_dump(mode="json")
    rows = [(key, _short(value)) for key, value in tree.items()]
    return CommandResult(table(("", ""), rows), tree)


def _verify(bank: Bank, options: Namespace) -> CommandResult:
    findings = verify(bank, _named(bank, options.run))
    lines = [
        f"{counted(findings.adapters, 'adapter')}, {counted(findings.snapshots, 'snapshot')}, "
        f"{counted(findings.objects, 'file of tensors')}, {counted(findings.bytes, 'byte')}",
        *(f"problem: {problem}" for problem in findings.problems),
        *(f"leftover: {file}" for file in findings.leftovers),
        *(f"stray: {file}" for file in findings.strays),
        "clean" if not findings.problems else counted(len(findings.problems), "problem"),
    ]
    return CommandResult("\n".join(lines), asdict(findings), not findings.problems)


def _named(bank: Bank, run: str | None) -> list[Named]:
    """Return what a run published; without a name that of the run in whose folder the bank lies, if it does."""
    if run is None:
        if not bank.storage.is_local or not last_attempt(Storage.at(Path(bank.storage.root).parent)):
            return []
        run = str(Path(bank.storage.root).parent)
    storage = Storage.at(run)
    if not last_attempt(storage):
        raise BankError(f"'{run}' holds no run: give the run directory that a training run printed")
    published = [record for record in read_state(storage).phases if record["bank"]]
    return [
        Named(record["bank"]["snapshot"], f"phase {record['phase']} of '{storage.uri}'", record["bank"]["adapters"])
        for record in published
    ]


def _export(bank: Bank, options: Namespace) -> CommandResult:
    snapshot = resolve(bank, options.snapshot)
    if options.engine:
        return _export_for_engine(bank, snapshot, options)
    if options.served_from or options.accelerator:
        raise BankError("--served-from and --accelerator are options of --engine vllm: add it, or leave them out")
    program = _gguf_converter(snapshot, options) if options.gguf else ""
    weights = _weights(options.adapters) if options.adapters else _always(bank, snapshot)
    state = mixed(bank, snapshot, weights, head=not options.without_head)
    if program and not options.merged:
        state = of_one_rank(state)
    needs_backbone = options.with_samples or options.merged or options.backbone or program
    backbone = backbone_of(snapshot, options.backbone, _permissions(options)) if needs_backbone else None
    texts: dict[str, str] = {}
    if options.with_samples and backbone:
        chosen = [snapshot.adapter(name) for name in weights]
        texts = sample_texts(bank, snapshot, chosen, load_codec(backbone, 1, 1))
    card = card_metadata(snapshot, weights, backbone if options.merged or options.backbone else None)
    if options.merged and backbone:
        storage = export_merged(state, card, backbone, options.to)
    else:
        storage = export_peft(state, card, options.to)
    for task, lines in texts.items():
        storage.write(f"samples/{task}.jsonl", lines.encode())
    tree = {"folder": storage.uri, "weights": weights, "snapshot": snapshot.number}
    if program and backbone:
        base = None if options.merged else folder_of(backbone.name, backbone.revision, FetchedFiles(weights=False))
        tree["gguf"] = str(convert(program, Path(storage.root), base))
        return CommandResult(f"wrote {tree['gguf']}", tree)
    return CommandResult(f"wrote {storage.uri}", tree)


def _gguf_converter(snapshot: Snapshot, options: Namespace) -> str:
    """Return the path of llama.cpp's converter, if a GGUF file can hold what is exported."""
    if capabilities_of(snapshot.backbone.kind).answers == "label" and not options.without_head:
        raise BankError(
            f"snapshot {snapshot.number} answers by label heads, which a GGUF file does not hold: export it without "
            "--gguf, or add --without-head"
        )
    if not Storage.at(options.to).is_local:
        raise BankError(f"--gguf writes to a folder of this machine, and --to is '{options.to}': name a folder")
    return converter(options.merged)


def _export_for_engine(bank: Bank, snapshot: Snapshot, options: Namespace) -> CommandResult:
    """Return a fixed mixture as one adapter; without one, each adapter by itself, of which a router chooses."""
    if options.merged or options.with_samples or options.gguf:
        raise BankError("--engine vllm writes adapters alone: leave --merged, --gguf and --with-samples out")
    if options.adapters or not router_class(snapshot.router).chooses:
        weights = _weights(options.adapters) if options.adapters else _always(bank, snapshot)
        mixtures = {next(iter(weights)) if len(weights) == 1 else MIXTURE: weights}
    else:
        mixtures = {entry.name: {entry.name: 1.0} for entry in snapshot.adapters}
    exported = export_vllm(bank, snapshot, mixtures, options.to, options.served_from, options.accelerator)
    models = "\n".join(f"  {model}" for model in exported.models.values())
    text = f"wrote {exported.folder.uri}, for max_lora_rank {exported.rank}; models:\n{models}"
    if exported.config is None:
        text += "\nno serve.yaml: Ray loads adapters from object stores, give --served-from s3://... for it"
    tree = {"folder": exported.folder.uri, "models": exported.models, "max_lora_rank": exported.rank}
    return CommandResult(text, {**tree, "config": exported.config, "snapshot": snapshot.number})


def _always(bank: Bank, snapshot: Snapshot) -> dict[str, float]:
    """Return the mixture that every text gets; a router that chooses for each text is refused."""
    if router_class(snapshot.router).chooses:
        raise BankError(
            f"router '{snapshot.router.kind}' of snapshot {snapshot.number} mixes adapters for each text: name some of "
            f"{', '.join(entry.name for entry in snapshot.adapters)} with --adapters"
        )
    mixture = router_of(bank, snapshot).route([""], None)
    return dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True))


def _weights(text: str) -> dict[str, float]:
    """Parse `a=0.7,b=0.3`, or a name alone for weight 1."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value) if value else 1.0
        except ValueError as error:
            raise BankError(f"'{part}' is no weight: write name=number, for example agnews=0.7") from error
    return weights


def _import(bank: Bank, options: Namespace) -> CommandResult:
    head = Branch(bank, options.snapshot).head()
    permissions = _permissions(options)
    if options.examples is None:
        if options.backbone is None:
            raise BankError("import needs --backbone MODEL, the model that the adapter was made for")
        backbone = BackboneConfig(name=options.backbone, **asdict(permissions))
        manifest = import_peft(bank, options.folder, options.name, backbone, options.tasks)
        return CommandResult(f"published {manifest.ref}", manifest.model_dump(mode="json"))
    if head is None:
        raise missing_branch(bank, options.snapshot)
    snapshot = head_of(bank, options.snapshot)
    rows = Input(files_at([options.examples]), Columns(TEXT_NAMES, (), setting="")).rows()
    texts = [row.text for _, row in rows if row.text.strip()]
    backbone = backbone_of(snapshot, options.backbone, permissions)
    new, adapters, found = import_routed(bank, snapshot, options.folder, options.name, backbone, texts, options.prompt)
    Branch(bank, options.snapshot).advance(new, f"'{options.name}' imported from {options.folder}")
    text = (
        f"branch '{options.snapshot}' points at snapshot {new.number}, whose router selects "
        f"'{options.name}' for {found} of {counted(len(texts), 'example')}; it has no training state: it "
        "answers, and no run can start from it"
    )
    tree = {"snapshot": new.number, "adapters": adapters, "examples": len(texts), "found": found}
    return CommandResult(text, tree)


def _prune(bank: Bank, options: Namespace) -> CommandResult:
    pruned = prune(bank, options.keep_snapshots, options.grace_s, options.dry_run, options.sample_days)
    verb = "would remove" if options.dry_run else "removed"
    numbers = (len(pruned.snapshots), len(pruned.adapters), len(pruned.files), pruned.bytes)
    counts = ", ".join(map(counted, numbers, ("snapshot", "adapter", "file", "byte")))
    samples = f"; of them {counted(len(pruned.samples), 'file')} of stored samples" if pruned.samples else ""
    return CommandResult(f"{verb} {counts}{samples}", asdict(pruned))


def _diff(bank: Bank, options: Namespace) -> CommandResult:
    tree = diff(resolve(bank, options.old), resolve(bank, options.new))
    return CommandResult(table(("", ""), [(key, _short(value) or "-") for key, value in tree.items()]), tree)


def _forget(bank: Bank, options: Namespace) -> CommandResult:
    from raycl.operations.banks.unlearning import forget

    snapshot = resolve(bank, options.snapshot)
    done = forget(bank, snapshot, options.task, not options.without_scores, _sources(options))
    gone = ", ".join(done.removed) or "no adapter"
    words = f"snapshot {done.new} is snapshot {done.old} without '{done.task}' (removed: {gone})"
    scored = _score_table(done.before, done.after)
    moved = ""
    if is_branch_name(options.snapshot) and Branch(bank, options.snapshot).head() == snapshot.number:
        Branch(bank, options.snapshot).advance(bank.open(done.new), f"'{options.task}' forgotten")
        moved = f"branch '{options.snapshot}' points at snapshot {done.new}"
    stays = f"snapshot {done.old} stays until it is pruned (prune --keep-snapshots)"
    return CommandResult("\n".join(filter(None, [scored, words, moved, stays])), asdict(done))


def _sources(options: Namespace) -> RecordedSources:
    """Return where data and backbone of a snapshot that is scored are now."""
    from raycl.operations.banks.unlearning import RecordedSources  # brings the engine, which other commands need not

    overrides = options.set + ([f"stream.test_rows={options.rows}"] if options.rows else [])
    return RecordedSources(overrides, options.backbone or "", _permissions(options), options.allow_storage)


def _score_table(before: Mapping[str, Score], after: Mapping[str, Score]) -> str:
    """Return the scores of tasks before and after, and their means over several; "" without any."""
    pairs = {task: (score, after[task]) for task, score in before.items()}
    rows = [
        (task, f"{old.value:.1f}", f"{new.value:.1f}", f"{new.value - old.value:+.1f}", str(old.count))
        for task, (old, new) in pairs.items()
    ]
    return table(("task", "before", "after", "difference", "examples"), rows) if rows else ""


def _fuse(bank: Bank, options: Namespace) -> CommandResult:
    from raycl.operations.banks.fusion import FusionSettings, fuse  # brings peft
    from raycl.operations.banks.unlearning import evaluate

    snapshot, branch = resolve(bank, options.snapshot), Branch(bank, options.to or f"fused-{options.how}")
    if branch.head() is not None:
        raise BankError(
            f"branch '{branch.name}' points at snapshot {branch.head()} already: name a new branch with --to, or "
            "delete that one"
        )
    if not 0 < options.density <= 1 or (options.rank is not None and options.rank < 1):
        raise BankError(
            f"--density is {options.density:g} and --rank {options.rank}: expected a density above 0 up to 1, and a "
            "rank of 1 or more"
        )
    names: dict[str, float | None] = {}
    for part in options.adapters.split(",") if options.adapters else ():
        names |= _weights(part) if "=" in part else {part.strip(): None}
    sources = _sources(options)
    before = {} if options.without_scores else evaluate(bank, snapshot, sources=sources)
    settings = FusionSettings(options.how, options.density, options.rank, options.seed)
    fused = fuse(bank, snapshot, settings, names, branch.name.replace("/", "-"))
    branch.advance(fused.snapshot, f"fused by {options.how}")
    after = evaluate(bank, fused.snapshot, sources=sources) if before else {}
    kept = {task: before[task] for task in after}
    words = (
        f"branch '{branch.name}' points at snapshot {fused.snapshot.number}, in which {fused.adapter.ref} answers "
        f"every text: {counted(len(fused.weights), 'adapter')} of snapshot {snapshot.number} by {options.how}, rank "
        f"{fused.rank}, which loses {100 * fused.lost:.1f} % of the update's norm\nit has no training state: it "
        "answers, and no run can start from it"
    )
    tree = {"snapshot": fused.snapshot.number, "branch": branch.name, "adapter": str(fused.adapter.ref)}
    tree |= {"weights": fused.weights, "rank": fused.rank, "lost": fused.lost}
    tree |= {"before": {task: asdict(score) for task, score in kept.items()}}
    tree |= {"after": {task: asdict(score) for task, score in after.items()}}
    return CommandResult("\n".join(filter(None, [_score_table(kept, after), words])), tree)


def _permissions(options: Namespace) -> Permissions:
    return Permissions(options.trust_remote_code, options.allow_pickle)


COMMANDS: dict[str, Callable[[Bank, Namespace], CommandResult]] = {
    "branches": branches,
    "log": log,
    "promote": promote,
    "rollback": rollback,
    "merge": merge,
    "tag": tag,
    "delete": delete,
    "list": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
    "import": _import,
    "prune": _prune,
    "diff": _diff,
    "forget": _forget,
    "fuse": _fuse,
}
"""Command -> what it does."""

WITH_REFERENCE = ("list", "log", "show", "tag", "export", "forget", "fuse")
"""Commands that take `BANK@REF`."""

READING = ("branches", "log", "list", "show", "verify", "export", "diff")
"""Commands that change no bank, so that they take one of the hub."""


def answer(options: Namespace) -> CommandResult:
    """Run a command on the bank that it names; only `import` begins a new one.

    Raises:
        RayclError: there is no such bank, or the command failed.
    """
    if on_hub(options.bank) and options.command not in READING:
        raise BankError(
            f"`raycl bank {options.command}` changes a bank, and '{options.bank}' is a commit of the hub, which stays "
            f"as it is: pull it into a folder (`raycl pull {options.bank} FOLDER`), and name the folder"
        )
    place, reference = split_reference(options.bank)
    if reference and options.command not in WITH_REFERENCE:
        if find_bank(place) is not None:
            raise BankError(
                f"`raycl bank {options.command}` takes a whole bank: write '{place}', without '@{reference}'"
            )
        place, reference = options.bank, ""
    begins = options.command == "import" and find_bank(place) is None
    bank, branch = (Bank.at(place), MAIN) if begins else bank_at(place)
    branch = reference or branch
    options.reference, options.snapshot = reference, branch
    if vars(options).get("branch", branch) is None:
        options.branch = branch
    if options.command == "promote" and options.to is None:
        options.to = MAIN
    return COMMANDS[options.command](bank, options)


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 200 else f"{text[:200]} ... (all of it with --json)"
