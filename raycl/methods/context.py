"""The context of a phase: what a method may ask about the tasks that it learns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from raycl.data.prepare import fit_remarked, fit_sources, leaves_room
from raycl.data.router_texts import RouterTexts
from raycl.data.sources.cache import Indices
from raycl.data.stream import Stream
from raycl.data.tokens import HeldRows, Split, TokenRows, TokenTable
from raycl.types import Batch, Phase, RouterText, Task, TextCodec

Quantity = Literal["loss", "outputs"]
"""The function of a row's gradient: its mean task loss, or the sum of the logits of its true label or tokens."""


LEAST_TRIAL = 2
"""Steps of a trial at least: the losses of fewer have no standard error."""


@dataclass(frozen=True)
class Step:
    """An optimizer step of a phase.

    Attributes:
        index: counted from 0 in the phase.
        seed: the same on all workers.
        micro_batches: micro-batches of this worker.
    """

    index: int = 0
    seed: int = 0
    micro_batches: int = 1


@dataclass
class TaskContext:
    """A phase, its rows, and what can be computed from them.

    Attributes:
        phase: the task, or all tasks of the schedule `joint`.
        resumed: values were restored from a checkpoint of this phase; nothing may be reset.
        batch_size: examples of an optimizer step, over all workers.
        step: the present optimizer step; set by the trainer.
        queries: phase index -> split -> `[rows, C]` sentence embeddings, for methods with an encoder. Of the present
            phase; of all phases in the first one where the method fits ahead.
        phases: all phases whose queries are there and new, in order.
        earlier_tasks: tasks of all earlier phases, in the order of learning.
        parameters: learned parameters by name, whole and on the CPU; set before `Method.end_task`. Of a method that
            trains the backbone they may be the backbone's own, on its device, and workers may share each of them out.
            Of another method the checkpoint keeps those that it has put here by the end of `Method.end_task`.
        added: rows and samples of earlier tasks that are trained in this phase too (`add_rows`, `add_samples`).
        routed_text: the method's (`MethodConfig.routed_text`).
    """

    phase: Phase
    batch_size: int
    stream: Stream = field(repr=False)
    codec: TextCodec = field(repr=False)
    resumed: bool = False
    step: Step = field(default_factory=Step)
    queries: dict[int, dict[Split, Tensor]] = field(default_factory=dict, repr=False)
    phases: tuple[Phase, ...] = ()
    earlier_tasks: tuple[Task, ...] = ()
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    added: list[TokenRows] = field(default_factory=list, repr=False)

    is_trained: ClassVar[bool] = False
    """True if there are workers that pass rows through the model; False: shapes alone are wanted."""
    routed_text: RouterText | None = None

    def tables(self, split: Split) -> list[TokenTable]:
        """Return the token table of each of the phase's tasks that has rows in `split`."""
        tasks = [task for task in self.phase.tasks if len(self.stream.rows(task, split))]
        return [self.stream.table(task, split, self.codec) for task in tasks]

    def count(self, split: Split) -> int:
        """Return rows of all its tasks."""
        return sum(map(len, self.tables(split)))

    @property
    def router_texts(self) -> RouterTexts:
        """The ids of rows for a router that reads them by the backbone."""
        return RouterTexts(self.stream, self.codec, self.routed_text)

    def routed_ids(self, split: Split) -> list[list[int]]:
        """Return the ids that such a router reads of all rows of a split of the phase's tasks."""
        return [ids for table in self.tables(split) for ids in self.router_texts.ids(table, range(len(table)))]

    def routed_samples(self, task: Task, texts: Sequence[str], instruction: str | None = None) -> list[list[int]]:
        """Return the ids that such a router reads of texts as a task's inputs; see `prompts`."""
        reads = self.router_texts
        if reads.reads_input_ids:
            return reads.input_ids(task, texts)
        return self.prompts(task, [reads.routed(task, text) for text in texts], instruction)

    def prompts(self, task: Task, texts: Sequence[str], instruction: str | None = None) -> list[list[int]]:
        """Return the prompt ids of texts with the task's template, cut as its own rows are.

        Args:
            instruction: replaces the task's own; see `takes_instruction`.
        """
        prompt = self.stream.prompt(task, self.codec, instruction)
        return fit_sources(texts, prompt, self.codec, self.stream.limits(task, self.codec).source)[0]

    def remarked_prompts(self, task: Task, texts: Sequence[str], remarks: Sequence[str]) -> list[list[int]]:
        """Return the prompt ids of texts with a remark each, such as an example, behind what the user said last.

        Texts are cut as the task's own rows are; remarks are not cut, so that prompts may be longer.
        """
        limit = self.source_limit(task)
        return fit_remarked(texts, remarks, self.stream.prompt(task, self.codec), self.codec, limit)

    def instruction(self, task: Task) -> str:
        """Return the instruction in the task's prompts; "" where they have none."""
        return self.stream.instruction(task, self.codec)

    def takes_instruction(self, task: Task, instruction: str) -> bool:
        """Return whether prompts with this instruction leave room for a text."""
        limit = self.stream.limits(task, self.codec).source
        return leaves_room(self.stream.prompt(task, self.codec, instruction), self.codec, limit)

    def source_limit(self, task: Task) -> int:
        """Return the most tokens that the prompt of a row of a task may have."""
        return self.stream.limits(task, self.codec).source

    def target_limit(self, task: Task) -> int:
        """Return the most tokens that an answer of a task may have."""
        return self.stream.limits(task, self.codec).target

    def targets(self, task: Task, answers: Sequence[str]) -> list[list[int]]:
        """Return ids of a task's answers, written and cut as its rows are; empty lists for encoder-only backbones."""
        return self.stream.answer_ids(task, answers, self.codec)

    def stored_rows(self, task: Task, share: float = 1.0, limit: int | None = None) -> Indices:
        """Return training rows of a task in a replay buffer of this share, `limit` at most (`Stream.stored`)."""
        return self.stream.stored(task, share, limit)

    def add_rows(self, task: Task, rows: Indices) -> None:
        """Train on rows of an earlier task too: they join the shuffle of every epoch."""
        self.added.append(self.stream.table(task, "train", self.codec).part(rows))

    def add_samples(self, rows: HeldRows) -> None:
        """Train on samples of an earlier task too, as on rows."""
        self.added.append(rows)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all workers, in place. Collective."""
        return tensor

    def forward_pass(self, before: Callable[[Batch], None], examples: int | None = None) -> None:
        """Run the phase's training rows through the model as it is, without gradients. Collective.

        Every worker sees its own share; examples of weight 0 fill batches up.

        Args:
            before: called with each batch before it is computed.
            examples: so many rows at most, over all workers; None: each row once.
        """
        raise AssertionError("a forward pass needs a trainer")

    def mean_loss(self, examples: int | None = None) -> float:
        """Return the mean task loss on the phase's training rows, by the model as it is and the method routes them.
        Collective.

        Args:
            examples: so many rows at most, over all workers; None: each row once.
        """
        raise AssertionError("a loss needs a trainer")

    def trial_losses(self, steps: int) -> Tensor | None:
        """Return the losses of a phase's steps after a trial. Collective.

        A trial is the phase's first steps, with its optimizer, rates and seeds, and without modifiers; afterwards all
        parameters are as before.

        Args:
            steps: of the trial, half an epoch at most, and of what is scored after it, without training.

        Returns:
            `[M]` float64 on the CPU, the mean loss of each of the M next steps, infinite if the trial diverges; None:
            half an epoch has fewer than `LEAST_TRIAL` steps.
        """
        raise AssertionError("a trial needs a trainer")

    def gate_gradients(
        self, gates: Sequence[Tensor], loss: Callable[[Batch], Tensor], examples: int | None = None
    ) -> list[Tensor]:
        """Return gradients with regard to virtual gates (`raycl.backbone.gates`), summed over the phase's rows.
        Collective.

        Args:
            gates: leaves that require gradients, open around this call: recomputation reads them after `loss` too.
            loss: loss of a batch, summed over its examples.
            examples: so many rows at most, over all workers; None: each row once.
        """
        raise AssertionError("gradients need a trainer")

    def each_batch(self, read: Callable[[Batch], None]) -> None:
        """Give every worker its own share of the phase's training rows, once, in equally many batches on its device.

        No mixture is active, and nothing is computed but what `read` does; examples of weight 0 fill batches up. An
        example's `rows` is its place among the rows of all the phase's tasks, in the order of `tables`.
        """
        raise AssertionError("batches need a trainer")

    def gradients(self, rows: Sequence[tuple[Task, Indices]]) -> dict[str, Tensor]:
        """Return gradients of the mean task loss on training rows of any tasks, at the present parameters. Collective.

        Methods that call it set `Method.computes_gradients`.

        Returns:
            parameter -> whole float32 gradient over all workers; the optimizer's own gradients stay as they are.
        """
        raise AssertionError("gradients need a trainer")

    def row_gradients(
        self, rows: Sequence[tuple[Task, Indices]], of: Quantity = "loss"
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield gradients on each row alone, at the present parameters and without dropout; one pass for each row.

        Every worker is given its own share of the rows; what it makes of them can be summed with `sum`. Methods that
        call it set `Method.computes_gradients`.

        Yields:
            place among all `rows`, and parameter -> float32 gradient.
        """
        raise AssertionError("gradients need a trainer")
