"""Resolves a stream's config to plans: the files of each task and their format.

Named benchmarks, folders of tasks, custom tasks and the builtin stream all end in one list.
"""

import difflib
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raycl.data import prompts
from raycl.data.benchmarks import builtin
from raycl.data.benchmarks.knowledge import OLORA_INSTRUCTIONS, TASKS, PublishedTask, canonical, folder_names
from raycl.data.benchmarks.layout import LABELS_FILE, SPLITS, SUFFIXES, TaskFolder, check_name, locate, task_folder
from raycl.data.benchmarks.orders import FOLDERS, Benchmark, find, require
from raycl.data.settings import ColumnNames, RecordedTask, SplitNames, StreamConfig, TaskSpec
from raycl.data.sources.cache import cache_folder
from raycl.data.sources.fields import LABEL_NAMES, TEXT_NAMES, Columns
from raycl.data.sources.formats import Source, is_list, splits_in
from raycl.data.sources.hub import ARROW, HUB, SAVED, SQL, HubSplit, is_dataset_folder
from raycl.data.sources.ingest import FileReading, Labels
from raycl.data.sources.json_values import JsonStream
from raycl.data.sources.slices import NAMES, Slice, sliced
from raycl.data.sources.source import SourceFile
from raycl.data.sources.splits import COLUMN, SplitPart
from raycl.data.text_objectives import TOKEN_ACCURACY
from raycl.errors import ConfigError, DataError
from raycl.storage import Storage
from raycl.types import PromptName

_UNKNOWN = PublishedTask(labels="auto")

_LAYOUTS_OF_THEIR_OWN: tuple[PromptName, ...] = ("llama2_chat", "trace")
"""Prompts of benchmarks whose files may be lists of rows, as O-LoRA's are."""


@dataclass(frozen=True)
class TaskPlan:
    """One task before its rows are read.

    Attributes:
        files: split -> file; empty for a task of the builtin stream.
        metric: name of its score; None: exact_match with labels, else rouge_l.
        definition: instruction; None: that of the file.
        group, dataset: names that `prompt_names` writes.
        prompt: meaning of `prompt: auto` for a text backbone.
        around: text between instruction and input, and behind the input, in the prompt `trace`.
        recorded: the task has no data; this is what is known of it.
        type: the task's kind.
        unread_dev: address of a dev file that is left out, since `stream.dev` is not file; "": there is none.
        is_own: neither the task nor one that it is like belongs to a named benchmark or to the builtin stream.
    """

    name: str
    files: Mapping[str, Source]
    reading: FileReading
    metric: str | None = None
    definition: str | None = None
    group: str = ""
    dataset: str = ""
    prompt: PromptName = "long"
    around: tuple[str, str] = ("", "")
    recorded: RecordedTask | None = None
    type: str = ""
    unread_dev: str = ""
    is_own: bool = False


@dataclass(frozen=True)
class StreamPlan:
    """A stream before its rows are read; `notes` list differences from the configuration.

    Attributes:
        unseen: tasks that are evaluated and never trained.
    """

    name: str
    tasks: tuple[TaskPlan, ...]
    unseen: tuple[TaskPlan, ...]
    notes: tuple[str, ...]


def resolve(config: StreamConfig) -> StreamPlan:
    """Find every task of `config`.

    Raises:
        ConfigError: an unknown stream or task, a missing root, a task twice, an unseen task that is also trained.
        DataError, MissingTasksError: names or files that cannot be used.
    """
    benchmark = find(config.name)
    wanted, unseen = _wanted(config, benchmark), _unseen(config)
    _check_names(wanted, unseen)
    _check_release(config, benchmark)
    plans, dropped = _plans(config, benchmark, wanted, _needed(config, benchmark))
    tested, absent = _plans(config, benchmark, unseen, ("test",)) if unseen else ((), [])
    missing = [*dropped, *absent]
    notes = (f"tasks left out because they are missing on disk: {', '.join(missing)}",) if missing else ()
    return StreamPlan(benchmark.name if benchmark else config.title, plans, tested, notes)


def missing_files(config: StreamConfig) -> str:
    """Return which files of a stream are missing, without reading any; "" if all are there.

    Raises:
        RayclError: the store is out of reach.
    """
    try:
        for task in resolve(config).tasks:
            for file in task.files.values():
                file.require()
    except (ConfigError, DataError) as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise
        return str(error)
    return ""


def _plans(
    config: StreamConfig, benchmark: Benchmark | None, wanted: Sequence[str | TaskSpec], needed: Sequence[str]
) -> tuple[tuple[TaskPlan, ...], list[str]]:
    known: Mapping[str, PublishedTask] = {**TASKS, **(benchmark.known if benchmark else {})}
    names = [task for task in wanted if isinstance(task, str)]
    if config.root is None:
        named = {name: _builtin(name, config) for name in names}
    else:
        possible = {name: folder_names(name, known.get(name)) for name in names}
        release = benchmark.folder if benchmark else ""
        folders = locate(
            Storage.at(config.root), possible, needed, config.allow_missing, config.test_fraction is not None, release
        )
        named = {name: _known(name, known.get(name), folder, config) for name, folder in folders.items()}
    plans = [_custom(task, config, needed) if isinstance(task, TaskSpec) else named.get(task) for task in wanted]
    kept = tuple(_as_set(plan, config) for plan in plans if plan is not None)
    return kept, [name for name in names if name not in named]


def _as_set(plan: TaskPlan, config: StreamConfig) -> TaskPlan:
    """Return the task with the settings of the whole stream: how it is read, and without answers of texts alone."""
    files = {split: file.within(config.limits) for split, file in plan.files.items()}
    columns = replace(plan.reading.columns, group=config.group or "")
    reading = replace(plan.reading, columns=columns, on_bad_row=config.on_bad_row)
    if config.objective == "answer":
        metric = config.metric_by_task.get(plan.name, plan.metric)
        return replace(plan, files=files, reading=reading, metric=metric)
    if files:  # they need not have any answers
        reading = replace(reading, columns=replace(columns, label=()), labels=None, unlabelled=(), first_label=None)
    return replace(plan, files=files, reading=reading, metric=TOKEN_ACCURACY, definition="")


def _wanted(config: StreamConfig, benchmark: Benchmark | None) -> list[str | TaskSpec]:
    if config.tasks is not None:
        return [canonical(task) if isinstance(task, str) else task for task in config.tasks]
    if config.name != "builtin":
        return list((benchmark or require(config.name)).tasks)
    if config.root is not None:
        raise ConfigError(
            f"stream.root is '{config.root}' but stream.name is builtin, which has no files: "
            "set stream.name to a benchmark (for example long-A) or list stream.tasks"
        )
    return list(builtin.TASKS)


def _unseen(config: StreamConfig) -> list[str | TaskSpec]:
    """Return tasks that are evaluated only; the name of a benchmark order stands for its tasks."""
    tasks: list[str | TaskSpec] = []
    for task in config.unseen or ():
        benchmark = find(task) if isinstance(task, str) else None
        tasks += benchmark.tasks if benchmark else [canonical(task) if isinstance(task, str) else task]
    return tasks


def _check_names(wanted: Sequence[str | TaskSpec], unseen: Sequence[str | TaskSpec]) -> None:
    named = {
        key: [task if isinstance(task, str) else task.name for task in tasks]
        for key, tasks in (("stream.tasks", wanted), ("stream.unseen", unseen))
    }
    for key, names in named.items():
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ConfigError(
                f"{key} names {', '.join(twice)} more than once: a task comes once in a stream, rename it"
            )
    if both := [name for name in named["stream.unseen"] if name in named["stream.tasks"]]:
        raise ConfigError(
            f"stream.unseen names {', '.join(both)}, which the stream trains: a task is either trained or unseen, "
            "take it out of one of the two"
        )


def _check_release(config: StreamConfig, benchmark: Benchmark | None) -> None:
    """Refuse the folder of another order's release, which has the same tasks with other rows."""
    own = benchmark.folder if benchmark else ""
    given = (config.root or "").rstrip("/").rpartition("/")[2]
    if own and given != own and given in FOLDERS.values():
        orders = " or ".join(order for order, folder in FOLDERS.items() if folder == given)
        raise ConfigError(
            f"stream.root is '{config.root}', and the rows of stream.name={config.name} are those of {own}: set "
            f"stream.root to that folder or to the one that holds it, or stream.name to {orders}"
        )


def _needed(config: StreamConfig, benchmark: Benchmark | None) -> tuple[str, ...]:
    if benchmark is not None and benchmark.test_only:
        return ("test",)
    splits = SPLITS if config.dev == "file" else ("train", "test")
    return tuple(split for split in splits if split != "test" or config.test_fraction is None)


def _builtin(name: str, config: StreamConfig) -> TaskPlan:
    if name in builtin.TASKS:
        return TaskPlan(name, {}, FileReading(labels=builtin.labels(name)))
    if name in TASKS or (config.tasks is None and config.name != "builtin"):
        raise ConfigError(
            f"task '{name}' of stream '{config.name}' comes from files: set stream.root to the folder of the benchmark"
        )
    raise ConfigError(
        f"unknown task '{name}': expected one of the builtin tasks {', '.join(builtin.TASKS)}, or set stream.root to "
        f"the folder that holds it, or give the path of your own, such as ./{name}"
    )


def _known(name: str, known: PublishedTask | None, located: TaskFolder, config: StreamConfig) -> TaskPlan:
    info = known or _UNKNOWN
    files = dict(located.files)
    unread = _taken_dev(files, config)
    labels, prompt, definition = info.labels, info.prompt, info.instruction
    first = next(iter(files.values()))
    is_olora = isinstance(first, SourceFile) and first.name.endswith(".json") and is_list(first)
    if info.prompt not in _LAYOUTS_OF_THEIR_OWN and is_olora:
        labels, prompt = _labels_file(located.folder) or labels, "olora"
        definition = OLORA_INSTRUCTIONS.get(info.group, "")
    keep = config.unlabelled == "keep"
    words, around = _words(info.words, config), _prompt_of_rows(info, config)
    reading = FileReading("auto", info.columns, labels, info.unlabelled, keep, words=words, around=around)
    metric = _metric(info.metric if known else None, labels, config)
    folder = located.folder.uri.rpartition("/")[2]
    more: dict[str, Any] = {"around": info.around, "type": info.type, "unread_dev": unread}
    return TaskPlan(name, files, reading, metric, definition, info.group, folder, prompt, **more)


def _prompt_of_rows(info: PublishedTask, config: StreamConfig) -> tuple[str, str]:
    """Return what every text of the release begins and ends with, which the prompt puts around it: it is taken off.

    With `stream.prompt=plain` no prompt is put around texts, so they stay whole.
    """
    if info.prompt != "trace" or config.prompt == "plain":
        return "", ""
    prompt = prompts.trace(info.instruction or "", info.around)
    return prompt.prefix, prompt.suffix


def _custom(spec: TaskSpec, config: StreamConfig, needed: Sequence[str]) -> TaskPlan:
    check_name(spec.name)
    if spec.recorded is not None:
        return TaskPlan(
            spec.name, {}, FileReading(labels=spec.recorded.labels), spec.recorded.metric, recorded=spec.recorded
        )
    files, folder = _task_files(spec, config, needed)
    unread = _taken_dev(files, config)
    given = {"train": spec.train, "dev": spec.dev, "test": spec.test}
    files |= {split: _source(uri, config) for split, uri in given.items() if uri is not None}
    for split in needed:
        if split not in files:
            if folder is not None and folder.is_local and not folder.exists():
                raise ConfigError(
                    f"task '{spec.name}': '{spec.path}' does not exist: expected a file or a folder of rows, check the "
                    "path"
                )
            carved = " or stream.test_fraction to take test rows from train" if split == "test" else ""
            in_folder = (
                f"expected {split}.json, .jsonl, .csv, .tsv, .parquet or .txt in '{spec.path}', a dataset in the "
                f"hub's layout there, one file whose column '{COLUMN}' names the split of each row, or "
            )
            expected = f"{in_folder if spec.path else ''}set its '{split}' to a file{carved}"
            raise ConfigError(f"task '{spec.name}' has no {split} file: {expected}")
    info = _like(spec)
    labels: Labels = spec.labels
    if labels == "auto":
        labels = (_labels_file(folder) if folder is not None else None) or (info.labels if spec.like else labels)
    is_release = spec.columns == ColumnNames()
    columns = replace(info.columns if is_release else _columns(spec.columns), turns=config.turns)
    words = _words(spec.words or info.words, config)
    around = _prompt_of_rows(info, config) if is_release else ("", "")
    reading = FileReading(spec.format, columns, labels, info.unlabelled, False, spec.first_label, words, around=around)
    metric = _metric(spec.metric or (info.metric if spec.like else None), labels, config)
    definition = info.instruction if spec.definition is None else spec.definition
    more: dict[str, Any] = {"dataset": spec.name, "prompt": info.prompt, "type": spec.type or info.type}
    more["unread_dev"] = "" if "dev" in files else unread
    return TaskPlan(spec.name, files, reading, metric, definition, **more, around=info.around, is_own=spec.like is None)


def _like(spec: TaskSpec) -> PublishedTask:
    if spec.like is None:
        return _UNKNOWN
    info = TASKS.get(canonical(spec.like))
    if info is None:
        near = difflib.get_close_matches(canonical(spec.like), TASKS, n=3, cutoff=0.3) or list(TASKS)[:3]
        raise ConfigError(
            f"task '{spec.name}' is like '{spec.like}', which is no known task: expected one of a benchmark, for "
            f"example {', '.join(near)}"
        )
    return info


def _words(words: Mapping[str, str], config: StreamConfig) -> tuple[tuple[str, str], ...]:
    return tuple(words.items()) if config.answers == "words" else ()


def _metric(metric: str | None, labels: Labels, config: StreamConfig) -> str | None:
    """Return the task's metric; where answers are one word, tasks with labels are scored by the first word."""
    if config.answers == "words" and labels is not None and metric in (None, "exact_match", "accuracy"):
        return "first_word"
    return metric


def _task_files(
    spec: TaskSpec, config: StreamConfig, needed: Sequence[str]
) -> tuple[dict[str, Source], Storage | None]:
    """Split -> where its rows are below the task's path, and the folder if it is one of files."""
    if spec.path is None:
        return {}, None
    if spec.path.startswith((HUB, SQL)):
        return _hub_files(spec, config), None
    file_name = SourceFile.at(spec.path).name.lower()  # without the query of a URI
    if file_name.endswith((*SUFFIXES, ARROW, f".{spec.format}")) and not Path(spec.path).is_dir():
        return _one_file(spec, config), None
    folder = Storage.at(spec.path)
    named = spec.config is not None or spec.splits != SplitNames()
    one_file = config.test_fraction is not None and not named
    there = task_folder(folder, one_file, spec.format).files if spec.config is None else {}
    if named and (parts := _parts(spec, config, there)):
        return parts, folder
    if named and not folder.is_local:
        raise ConfigError(
            f"task '{spec.name}' names a config or splits of '{spec.path}': datasets in the hub's layout are read from "
            f"local folders and {HUB} names, copy it to one"
        )
    files: dict[str, Source] = {} if named else dict(there)
    absent = [split for split in needed if split not in files and getattr(spec, split) is None]
    if named or (absent and folder.is_local and is_dataset_folder(Path(spec.path))):
        return _hub_files(spec, config), None
    return files, folder


def _hub_files(spec: TaskSpec, config: StreamConfig) -> dict[str, Source]:
    """Return splits of a dataset; one for dev only where dev comes from files."""
    assert spec.path is not None, "a dataset has a path"
    names = _split_names(spec, config)
    cache = None if spec.path.startswith(HUB) else str(cache_folder(config.cache_dir) / "hub")
    return {split: HubSplit(spec.path, name, spec.config, spec.revision, cache) for split, name in names.items()}


def _split_names(spec: TaskSpec, config: StreamConfig) -> dict[str, str]:
    names = {"train": spec.splits.train, "test": spec.splits.test, "dev": spec.splits.dev}
    wanted = [split for split in SPLITS if split != "dev" or config.dev == "file"]
    return {split: name for split in wanted if (name := names[split]) is not None}


def _parts(spec: TaskSpec, config: StreamConfig, there: Mapping[str, Source]) -> dict[str, Source]:
    """Return the splits that a task names of a folder's files; empty if one of them is not there."""
    parts: dict[str, Source] = {}
    taken = set[str]()
    for split, written in _split_names(spec, config).items():
        name, part = sliced(written)
        known = next((known for known, names in NAMES.items() if name in names), None)
        if known not in there and split != "test":
            return {}
        if known is not None and known in there:
            parts[split] = _part(there[known], part, known not in taken)
            taken.add(known)
    return parts


def _part(source: Source, part: Slice | None, is_first: bool = True) -> Source:
    return source if part is None or isinstance(source, SplitPart) else SplitPart(source, part, is_first=is_first)


def _one_file(spec: TaskSpec, config: StreamConfig) -> dict[str, Source]:
    """Return the splits of one file: by its column `split`, else slices of its rows, which are all train."""
    assert spec.path is not None, "the file has a path"
    file = _source(spec.path, config)
    assert isinstance(file, SourceFile | HubSplit), "a file without a slice"
    names = {split: sliced(name) for split, name in _split_names(spec, config).items()}
    if names_splits(spec, config):
        return {split: SplitPart(file, part, name, split == "train") for split, (name, part) in names.items()}
    return {split: _part(file, part, split == "train") for split, (name, part) in names.items() if name == "train"}


def names_splits(spec: TaskSpec, config: StreamConfig) -> bool:
    """Return whether the rows of the task's one file name their splits.

    Raises:
        DataError: the file cannot be read.
    """
    assert spec.path is not None, "the file has a path"
    file, columns = _source(spec.path, config), _columns(spec.columns)
    if config.objective != "answer":
        columns = replace(columns, label=())  # texts need not have any answers
    return isinstance(file, SourceFile | HubSplit) and splits_in(file, spec.format, columns)


def _source(uri: str, config: StreamConfig) -> Source:
    """Return a file, a slice of one, or a folder that `save_to_disk` wrote."""
    path, part = sliced(uri)
    if part is not None and not Path(uri).exists():
        return _part(_source(path, config), part)
    if (Path(uri) / SAVED[1]).is_file() or uri.endswith(ARROW):
        return HubSplit(uri, "", cache=str(cache_folder(config.cache_dir) / "hub"))
    return SourceFile.at(uri)


def _columns(names: ColumnNames) -> Columns:
    parts = names.text if isinstance(names.text, tuple) else ()
    return Columns(
        parts or (TEXT_NAMES if names.text is None else (str(names.text),)),
        LABEL_NAMES if names.label is None else (names.label,),
        names.header,
        parts,
    )


def _taken_dev(files: MutableMapping[str, Any], config: StreamConfig) -> str:
    """Take a dev file out of a task's files unless `stream.dev` is file, and return its address; "": none is taken."""
    dev = files.pop("dev", None) if config.dev != "file" else None
    return "" if dev is None else str(dev.uri)


def _labels_file(folder: Storage) -> tuple[str, ...] | None:
    """Return the label set in `labels.json` beside the split files, if there is one."""
    file = SourceFile(folder, LABELS_FILE)
    if not folder.exists(LABELS_FILE):
        return None
    with file.open() as stream:
        text = JsonStream(file, stream)
        labels = text.value()
        text.end()
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        file.refuse("found something else than a list of strings: expected the label set as a JSON list")
    return tuple(dict.fromkeys(labels))
