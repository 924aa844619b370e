"""Settings of evaluation."""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from raycl.config import PathOrUri, Section
from raycl.types import FormKind, UnknownPolicy


class AnswerFormat(Section):
    """The form of a task's generated answers: one of the three."""

    json_schema: dict[str, Any] | str | None = Field(
        None, description="answers are JSON of this schema, given as a tree or as text"
    )
    regex: str | None = Field(None, description="answers match this regular expression as a whole")
    grammar: str | None = Field(None, description="answers are written by this grammar, in GBNF or Lark")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"it has {' and '.join(given) or 'no form'}: expected one of json_schema, regex, grammar")
        return self

    @property
    def form(self) -> tuple[FormKind, Any]:
        """The kind of the form, and the form itself."""
        if self.json_schema is not None:
            return "json", self.json_schema
        return ("grammar", self.grammar) if self.regex is None else ("regex", self.regex)


class GeneralConfig(Section):
    """General ability: tasks outside the stream, evaluated by EleutherAI's lm-eval before the stream and after it."""

    tasks: tuple[str, ...] = Field(
        (),
        description="what is evaluated beside the stream (pip install 'raycl[eval]'): the suites arc, piqa, "
        "winogrande, hellaswag, mmlu-subset, ifeval, slm-zero-shot, migu-zero-shot and trace, and any task, group or "
        "tag that lm-eval or a file in include_path has. (): nothing",
    )
    include_path: PathOrUri = Field(
        None,
        description="folder of this machine with task files of lm-eval (YAML), which can run code: only the command "
        "line may set it; null: none",
    )
    at: Literal["ends", "tasks", "epochs"] = Field(
        "ends",
        description="ends: before the stream and after its last task; tasks: also after every task; epochs: also "
        "inside each task, where eval.at_epochs evaluates it",
    )
    limit: int | None = Field(None, ge=1, description="rows of each task, the first of its file; null: all")
    shots: int | None = Field(
        None, ge=0, description="examples in front of each text; null: as many as the task's file says"
    )
    chat_template: bool = Field(False, description="write texts as messages under the model's chat template")
    allow_code: bool = Field(
        False,
        description="allow tasks that run code which the model generates, such as humaneval; only the command line "
        "may set it",
    )

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield all others where no task is named."""
        if not self.tasks:
            yield from ((name, "tasks=()") for name in type(self).model_fields if name != "tasks")


class EvalConfig(Section):
    """Evaluation: how a row of the accuracy matrix is filled."""

    tasks: Literal["seen", "all"] = Field(
        "seen",
        description="tasks that are evaluated after each task. seen: those trained so far; all: also later ones "
        "(zero-shot cells)",
    )
    labels: Literal["all", "task"] = Field(
        "all",
        description="allowed answers. all: any label seen so far, or any text where answers are generated "
        "(class-incremental); task: the task's own labels (task-incremental; van de Ven and Tolias "
        "2019). Tasks without labels have no limit",
    )
    response_format: dict[str, AnswerFormat] = Field(
        default_factory=dict,
        description="task name -> the form of its generated answers: `{json_schema: SCHEMA}`, `{regex: TEXT}` or "
        "`{grammar: TEXT}`, as requests to an endpoint may name. An answer that reaches its most tokens is cut. "
        "`raycl evaluate`, `predict`, the gate and an endpoint of the run's snapshots keep to it too; where a task "
        "has labels, labels=task goes before it",
    )
    instruction: Literal["given", "chosen"] = Field(
        "given",
        description="what fills the matrix. given: each text is read in its own task's prompt, instruction included, "
        "as in the papers; chosen: the text is given alone, and the router chooses adapters and prompt, as an endpoint "
        "does for requests without instruction",
    )
    other_row: bool = Field(
        True,
        description="at the end of a run also score the row that `instruction` leaves out, where it can differ: the "
        "tasks' prompts do, or conversations have system messages",
    )
    unknown: UnknownPolicy = Field(
        "nearest",
        description="texts that lie farther from all learned tasks than false_alarms allows, where a router chooses by "
        "the text. nearest: the adapters of the nearest task answer, as for all texts; bare: the backbone without "
        "adapters does; refuse: they get no answer. An endpoint of the run's snapshots does the same",
    )
    false_alarms: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="largest share of texts of the learned tasks that may count as unknown; the threshold follows from "
        "their dev rows",
    )
    untrained: bool = Field(
        False, description="also evaluate every task, unseen ones too, by the backbone before any training"
    )
    shots: int = Field(
        0,
        ge=0,
        description="in-context learning: also evaluate every task by the backbone before any training, with so many "
        "of its train rows, drawn by the run's seed, in front of each text: as turns of the chat template, or as "
        "prompts with their answers. 0: not at all",
    )
    off_task: Literal["wrong", "count"] = Field(
        "wrong",
        description="answers that are a label of another task, and not of their own. wrong: they score 0, as SLM "
        "states, except under metrics of overlapping text (rouge_l); count: they are counted only",
    )
    split: Literal["test", "dev"] = Field(
        "test", description="rows that are scored: dev for choosing settings, test for reporting"
    )
    subsample: int | None = Field(
        None,
        ge=1,
        description="rows of each task that are scored, drawn once by the run's seed: the same after each task and for "
        "each method; with 95 % intervals, but for macro_f1, bleu, sari, sari_trace and bertscore. null: all. "
        "stream.test_rows takes rows out of the data instead",
    )
    select: Literal["last", "best_dev"] = Field(
        "last",
        description="weights that a task ends with. last: those of its last step; best_dev: those with the best score "
        "on the task's dev rows (of equal ones the first)",
    )
    select_epochs: int = Field(1, ge=1, description="select=best_dev: epochs between two scores")
    at_epochs: int | None = Field(
        None,
        ge=1,
        description="also evaluate a task inside itself, each time so many of its epochs have ended, on the rows of "
        "`split`: a curve over its epochs, as in figure 3 of MIGU; null: after the task alone",
    )
    batch_size: int = Field(
        64,
        ge=1,
        description="examples per worker per forward pass; of generated answers, those decoded together: where "
        "one ends, the next example takes its place",
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="tokens of a generated answer at most; null: stream.max_target_tokens of its task"
    )
    decoding: Literal["auto", "generate"] = Field(
        "auto",
        description="how answers are generated. auto: in one continuous batch, where the backbone allows; generate: by "
        "Hugging Face's generate, in batches that wait for their longest answer. Both take the most likely token; "
        "sums are rounded in another order, which can change an answer where two tokens are as likely",
    )
    save_predictions: bool = Field(True, description="keep every answer in the run's folder")
    singles: PathOrUri = Field(
        None, description="run directory (or results.json) of `method=separate`, whose scores FWT compares with"
    )

    general: GeneralConfig = GeneralConfig()

    @model_validator(mode="after")
    def _epochs_are_given(self) -> "EvalConfig":
        if self.general.at == "epochs" and self.at_epochs is None:
            raise ValueError(
                "general.at is epochs and at_epochs is null: name the number of epochs, such as at_epochs=1"
            )
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of dev rows where they choose nothing."""
        if self.select == "last":
            yield "select_epochs", "select=last"
        if self.unknown == "nearest":
            yield "false_alarms", "unknown=nearest"
