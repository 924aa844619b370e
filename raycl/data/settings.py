"""The `stream` section of a run's config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from raycl.config import PathOrUri, Section, Tree
from raycl.data.benchmarks.layout import SUFFIXES
from raycl.data.sources.conversation import Turns
from raycl.data.sources.formats import Format
from raycl.data.sources.hub import SQL, split_revision
from raycl.data.sources.reading import OnBadRow, ReadLimits
from raycl.types import Objective, PromptName

Names = Annotated[tuple[str, ...], Field(min_length=1)]
SourceTokens = Annotated[int, Field(ge=8)] | Literal["auto"]
TargetTokens = Annotated[int, Field(ge=2)] | Literal["auto"]

USUAL_LENGTHS = (128, 32)
"""Tokens of a source and of a target that `auto` allows at least, and where rows are not known."""

MOST_LENGTHS = (1024, 256)
"""Tokens of a source and of a target that `auto` allows at most."""


class ColumnNames(Section):
    """Column (or key) names of a custom task's files."""

    text: str | Names | None = Field(
        None,
        description="column of the input, or several that are the input together, one below the other; null: the first "
        "of text, input, sentence, prompt, instruction with input, or messages of a conversation",
    )
    label: str | None = Field(
        None, description="column of the answer; null: the first of label, output, completion, response"
    )
    header: Names | None = Field(None, description="column names of a CSV file that has no header line")


class SplitNames(Section):
    """Names of the splits in a task's data, or slices of them, for example `train[:90%]` or `train[-500:]`.

    A dev split is found by any of the names dev, validation, val and eval. Of a database (`sql:`), tables or queries.
    """

    train: str = Field("train", description="split to train on")
    test: str | None = Field(
        "test", description="split to test on; null: test rows are taken from train, see `stream.test_fraction`"
    )
    dev: str = Field("validation", description="split for dev, where `stream.dev` is file")


class RecordedTask(Section):
    """A task as a snapshot has it, which `bank.start` writes for one whose data is out of reach."""

    labels: tuple[str, ...] | None = Field(None, description="closed label set; null: free text")
    metric: str = Field(description="name of the score")
    prompt: tuple[str, str] = Field(("", ""), description="what stood before and behind every input text")
    chat_template: str = Field("", description="Jinja source of the chat template; empty: none")
    system: str = Field("", description="system message of conversations without one")
    definition: str = Field("", description="instruction in what stood before the texts")
    user_turns: int = Field(
        0, ge=0, description="messages of the user that routers read of an input; 0: inputs are no conversations"
    )


class TaskSpec(Section):
    """A task of your own, in `stream.tasks`."""

    name: str = Field(description="name of the task, unique in its stream, without slashes")
    path: PathOrUri = Field(
        None,
        description="folder (path or URI) with train.*, test.* and maybe dev.* (or validation, val, eval); one file, "
        "whose column 'split' names the split of each row; a dataset of the Hugging Face hub (hf://fancyzhx/ag_news, "
        "hf://ORG/NAME@REVISION); a local folder in the hub's layout or written by save_to_disk; or a database "
        "(sql:sqlite:////data/tickets.db)",
    )
    config: str | None = Field(None, description="configuration of the dataset, where it has several")
    splits: SplitNames = Field(default_factory=SplitNames, description="names of the splits, or slices of them")
    revision: str | None = Field(None, description="commit, branch or tag of a dataset on the hub; null: its newest")
    train: PathOrUri = Field(None, description="train file, or a slice of one, instead of the one in path")
    test: PathOrUri = Field(None, description="test file, instead of the one in path")
    dev: PathOrUri = Field(None, description="dev file; null: dev is carved from train")
    format: Format = Field("auto", description="file format; auto: by suffix, and for .json by how the file begins")
    columns: ColumnNames = Field(default_factory=ColumnNames, description="columns of text and label")
    labels: Names | Literal["auto"] | None = Field(
        "auto",
        description="closed label set; auto: the distinct answers of the train file if at most 64; null: free text",
    )
    first_label: Literal[0, 1] | None = Field(
        None, description="number of the first of `labels` in files that hold class numbers instead of names"
    )
    metric: str | None = Field(None, description="name of the score; null: exact_match with labels, else rouge_l")
    definition: str | None = Field(
        None, description="instruction of the prompt; null: the one in the file, if there is one"
    )
    type: str = Field("", description="kind of task, for example dialogue: unseen tasks have a mean for each type")
    like: str | None = Field(
        None,
        description="a known task (mmlu, finance, agnews, ...) from which columns, labels, metric, definition, words "
        "and prompt are taken where this task names none",
    )
    words: dict[str, str] = Field(
        default_factory=dict, description="label -> the word that is its answer, where `stream.answers` is words"
    )

    recorded: RecordedTask | None = Field(
        None, description="a learned task without data: it is neither trained nor evaluated; null: it has data"
    )

    @model_validator(mode="before")
    @classmethod
    def _revision_of_path(cls, value: Any) -> Any:
        """Take the revision out of `hf://NAME@REVISION`."""
        path = value.get("path") if isinstance(value, dict) else None
        name, revision = split_revision(path) if isinstance(path, str) else ("", None)
        if revision is None:
            return value
        if value.get("revision") not in (None, revision):
            raise ValueError(
                f"path is '{path}' and revision is '{value['revision']}': expected one revision, leave one of the two "
                "out"
            )
        return {**value, "path": name, "revision": revision}

    @field_validator("labels", "words", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        """Refuse labels that are not text: YAML reads some words and all digits as other types."""
        given = [*value, *value.values()] if isinstance(value, dict) else value
        others = [item for item in given if not isinstance(item, str)] if isinstance(given, list | tuple) else []
        if others:
            raise ValueError(
                f"{others[0]!r} is no text: write labels in quotes, ['yes', 'no', '1'], for YAML reads yes, no, on and "
                "off without them as true and false, and digits as numbers"
            )
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.recorded is None and self.path is None and self.train is None:
            raise ValueError(
                f"task '{self.name}' has no data: give 'path', or both 'train' and 'test', or the name without braces "
                "if raycl knows the task"
            )
        if set(self.words) & set(self.words.values()) - {label for label, word in self.words.items() if label == word}:
            raise ValueError(f"task '{self.name}' has words that are labels with other words: choose other words")
        if isinstance(self.labels, tuple) and (twice := [name for name in self.labels if self.labels.count(name) > 1]):
            raise ValueError(f"task '{self.name}' has the label '{twice[0]}' twice: name each once")
        if self.first_label is not None and not isinstance(self.labels, tuple):
            raise ValueError(f"task '{self.name}' sets first_label without a list of labels: name the labels in order")
        return self


DATABASES = (".db", ".sqlite", ".sqlite3")


def name_at(path: str) -> str:
    """Return the name of a task whose rows are at a path or URI: the last part, without a data file's suffix."""
    if "://" in path or path.startswith(SQL):
        parts = urlsplit(path.removeprefix(SQL))
        last = parts.path.rstrip("/").rpartition("/")[2] or parts.hostname or ""
        suffix = next(filter(last.lower().endswith, (*SUFFIXES, *DATABASES)), "")
        return last.partition("@")[0].removesuffix(last[len(last) - len(suffix) :])
    place = Path(path).expanduser().resolve()
    return place.name if place.is_dir() else place.name.partition(".")[0]


def as_spec(task: Any) -> Any:
    """Return an entry of `stream.tasks`; a path or URI alone is a task of your own with the name of its last part."""
    if not isinstance(task, str) or "/" not in task:
        return task
    return {"name": name_at(task), "path": task}


def as_specs(tasks: Any) -> Any:
    """Return a list of tasks as `as_spec` gives them, or one of them alone; anything else as it is."""
    if isinstance(tasks, str):
        return [as_spec(tasks)]
    return list(map(as_spec, tasks)) if isinstance(tasks, list | tuple) else tasks


def with_specs(tree: Tree) -> Tree:
    """Return a config that a person wrote with the tasks of its stream as `as_specs` gives them."""
    stream = tree.get("stream")
    if not isinstance(stream, dict):
        return tree
    return {
        **tree,
        "stream": {**stream, **{key: as_specs(stream[key]) for key in ("tasks", "unseen") if key in stream}},
    }


TITLE = 40
"""Characters of the names of tasks that are the name of a stream at most."""


class StreamConfig(Section):
    """The tasks, their order, their rows and their prompts."""

    name: str = Field(
        "builtin",
        description="builtin, a benchmark order (long-A, superni-1, sapt-3, ...), or any name if `tasks` is set",
    )
    root: PathOrUri = Field(
        None, description="folder (path or URI) that holds the task folders, or CL_Benchmark around them"
    )
    schedule: Literal["sequential", "joint", "separate"] = Field(
        "sequential",
        description="sequential: one task after another; joint: all tasks at once (multi-task); separate: each task "
        "from the pretrained model, its task id given at test",
    )
    tasks: tuple[str | TaskSpec, ...] | None = Field(
        None,
        min_length=1,
        description="explicit order: names below root, and your own tasks, each by its path alone or as a mapping; "
        "null: the named order",
    )
    unseen: tuple[str | TaskSpec, ...] | None = Field(
        None,
        description="tasks that are not trained, and are evaluated zero-shot after the last task: as in `tasks`, "
        "or benchmark orders (superni-unseen); no train files are needed",
    )
    allow_missing: bool = Field(False, description="drop tasks that are not on disk, with a warning")
    objective: Objective = Field(
        "answer",
        description="what is predicted. answer: each text's answer; for continual pre-training without labels "
        "mlm: masked tokens (encoder-only backbones), or clm: each next token (decoder-only ones)",
    )
    mask_share: float = Field(0.15, gt=0, lt=1, description="mlm: share of a text's tokens that are predicted")
    train_rows: int | None = Field(
        None, ge=1, description="rows of a task to train on, sampled; null: all (builtin: 320)"
    )
    train_rows_by_task: dict[str, PositiveInt] = Field(
        default_factory=dict, description="task name -> train_rows, where it differs, for example a task with few rows"
    )
    metric_by_task: dict[str, str] = Field(
        default_factory=dict,
        description="task name -> name of its score, instead of the benchmark's, for example {MeetingBank: "
        "rouge_l_trace}",
    )
    test_rows: int | None = Field(
        None, ge=1, description="rows of a task to test on, sampled; null: all (builtin: 150)"
    )
    dev_rows: int | None = Field(200, ge=1, description="upper limit of dev rows; null: no limit")
    dev_fraction: float = Field(0.1, ge=0, lt=1, description="share of the train rows that is set aside as dev")
    test_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the rows that is set aside as test, drawn by seed, for tasks that come as one file "
        "(SLM: 0.15); tasks with test files keep these; null: every task needs test rows of its own",
    )
    group: str | None = Field(
        None,
        description="column (or key) whose value rows have in common that belong together, such as conversation_id: "
        "test, dev and replay rows are drawn by whole groups; null: the turns of a conversation are a group",
    )
    on_bad_row: OnBadRow = Field(
        "refuse",
        description="a row that cannot be used (no label, a conversation without an answer, malformed JSON). refuse: "
        "the run stops and names it; skip: such rows are left out and counted",
    )
    limits: ReadLimits = ReadLimits()
    dev: Literal["carve", "file"] = Field(
        "carve",
        description="carve: dev rows are taken from train; file: dev files are used, which equal the test files "
        "in the public release",
    )
    per_class: int | None = Field(None, ge=1, description="few-shot: train rows for each label, for example 16")
    dev_per_class: int | None = Field(
        None, ge=1, description="dev rows for each label, instead of dev_fraction and dev_rows, for example 16"
    )
    answers: Literal["labels", "words"] = Field(
        "labels",
        description="answers of tasks with labels. labels: as they are; words: one word for each, which known tasks "
        "have and others name in `words`, and the first word of an answer is scored (SLM with T5)",
    )
    unlabelled: Literal["drop", "keep"] = Field(
        "drop", description="rows whose label stands for 'no label' (mnli: '-')"
    )
    prompt: PromptName = Field(
        "auto",
        description="template around the text; auto: the benchmark's, the chat template for conversations and, where "
        "the model has one, for tasks of your own, plain for encoders; chat: the model's chat template, with the text "
        "as the user's message and the task's instruction as the system message",
    )
    instruction_turn: Literal["system", "user"] = Field(
        "system",
        description="chat prompts: the task's instruction is the system message, or stands before the text in the "
        "user's first message, for templates without system messages",
    )
    list_labels: bool = Field(
        True,
        description="chat prompts of tasks with labels: the instruction ends with a list of them, unless it names "
        "all; not those of conversations",
    )
    turns: Turns = Field(
        "all",
        description="which of the assistant's turns of a conversation are learned and scored: all, or the last one; a "
        "message with weight 0 is none of them",
    )
    prompt_names: bool = Field(False, description="olora template: name group and dataset in the prompt (also at test)")
    references: Literal["first", "random"] = Field(
        "first",
        description="rows with several answers. first: train on the first, score the best of all; random: keep "
        "one, drawn by seed, as the official loaders do",
    )
    max_source_tokens: SourceTokens = Field(
        "auto",
        description="prompt tokens at most; a longer prompt loses the end of its input text. auto: those of the task's "
        "longest row, at least 128, at most 1024 and the backbone's positions",
    )
    max_target_tokens: TargetTokens = Field(
        "auto",
        description="answer tokens at most; a longer answer is cut before the end-of-sequence token. auto: those of "
        "the task's longest answer, at least 32, at most 256 and the backbone's positions",
    )
    max_source_tokens_by_task: dict[str, SourceTokens] = Field(
        default_factory=dict,
        description="task name -> max_source_tokens, where it differs, for example a task of chats; a run records "
        "there what auto was",
    )
    max_target_tokens_by_task: dict[str, TargetTokens] = Field(
        default_factory=dict,
        description="task name -> max_target_tokens, where it differs; a run records there what auto was",
    )
    cache_dir: PathOrUri = Field(None, description="node-local cache; null: $RAYCL_CACHE, else ~/.cache/raycl")

    @field_validator("tasks", "unseen", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn one task into a list, and unseen tasks of an empty list into None."""
        return as_specs(value) if value or info.field_name == "tasks" else None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for key in ("train_rows", "train_rows_by_task"):
            if self.per_class is not None and getattr(self, key):
                raise ValueError(
                    f"per_class is {self.per_class} and {key} is {getattr(self, key)}: both limit the train rows, "
                    "set one"
                )
        if self.objective != "answer" and self.prompt not in ("auto", "plain"):
            raise ValueError(
                f"prompt is '{self.prompt}' and objective is '{self.objective}': no prompt is put around texts that "
                "are learned themselves, leave prompt at auto"
            )
        return self

    @property
    def title(self) -> str:
        """The name of the stream for people and folders: of own tasks without one, the names of the tasks."""
        names = [task if isinstance(task, str) else task.name for task in self.tasks or ()]
        are_own = self.root is not None or any(not isinstance(task, str) for task in self.tasks or ())
        if self.name != type(self).model_fields["name"].default or not are_own:
            return self.name
        joined = "-".join(names)
        return joined if len(joined) <= TITLE else f"{len(names)}-own-tasks"

    @property
    def token_settings(self) -> tuple[tuple[int | Literal["auto"], Mapping[str, int | Literal["auto"]]], ...]:
        """Return the setting of all tasks and those by task, for sources and for targets."""
        return (
            (self.max_source_tokens, self.max_source_tokens_by_task),
            (self.max_target_tokens, self.max_target_tokens_by_task),
        )

    def limits_of(self, task: str) -> tuple[int, int]:
        """Return the most tokens of a source and of a target of this task; `USUAL_LENGTHS` where auto is not known."""
        given = (by_task.get(task, every) for every, by_task in self.token_settings)
        source, target = (
            usual if limit == "auto" else limit for limit, usual in zip(given, USUAL_LENGTHS, strict=True)
        )
        return source, target

    @property
    def token_limits(self) -> tuple[int, int]:
        """Return the most tokens of a source and of a target of any task."""
        source, target = (
            max((limit for limit in (every, *by_task.values()) if limit != "auto"), default=usual)
            for (every, by_task), usual in zip(self.token_settings, USUAL_LENGTHS, strict=True)
        )
        return source, target

    def train_rows_of(self, task: str) -> int | None:
        """Return the largest number of train rows of this task; None: all."""
        return self.train_rows_by_task.get(task, self.train_rows)
