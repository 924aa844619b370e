"""The disk space that a run needs, and a check that the disk has it.

A run that fills the disk in its tenth task cannot go on with the nine that it has learned before space is freed.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raycl.bank.tensor_groups import ROUTERS
from raycl.storage import Storage
from raycl.training.definition.training_context import TrainingContext
from raycl.training.optimizers.parameters import specs_of, state_bytes
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.phase.evaluation import evaluated_tasks
from raycl.types import Phase

SAMPLE = 64
"""Rows whose text is measured."""

ANSWER_BYTES = 80
"""Bytes of a line of `predictions/` in addition to its text: reference, answer, score and keys."""


@dataclass(frozen=True)
class DiskPlan:
    """The bytes that a run writes, and when.

    Attributes:
        steps: steps of each phase. every, keep: `checkpoint.every_steps` and `checkpoint.keep`.
        inside, end: a checkpoint inside a phase, and at its end.
        published: bytes published to the bank at the end of each phase.
        stays: bytes written to the run's folder at the end of each phase, for good.
    """

    steps: Sequence[int]
    every: int | None
    keep: int
    inside: int
    end: int
    published: Sequence[int]
    stays: Sequence[int]


@dataclass(frozen=True)
class Moment:
    """The bytes on disk when a checkpoint is written.

    Attributes:
        run: bytes in the run's folder before old checkpoints are deleted. left: bytes afterwards.
        bank: bytes in the bank.
    """

    phase: int
    step: int
    run: int
    left: int
    bank: int


def moments(plan: DiskPlan) -> Iterator[Moment]:
    """Yield the moment of every checkpoint."""
    kept: list[int] = []
    stays = bank = 0
    for phase, steps in enumerate(plan.steps):
        inside = range(plan.every, steps, plan.every) if plan.every else ()
        for step in (*inside, steps):
            size = plan.end if step == steps else plan.inside
            if step == steps:
                bank, stays = bank + plan.published[phase], stays + plan.stays[phase]
            most = sum(kept) + size + stays
            kept = [*kept, size][-plan.keep :]
            yield Moment(phase, step, most, sum(kept) + stays, bank)


@dataclass(frozen=True)
class Growth:
    """Bytes that come on top of what is there, at the moment when it is most: in each place, and in both together."""

    run: int
    bank: int
    both: int


def growth(plan: DiskPlan, phase: int = 0, step: int = 0) -> Growth:
    """Return what a run adds from a step of a phase on."""
    all_of_it = list(moments(plan))
    before = [moment for moment in all_of_it if (moment.phase, moment.step) <= (phase, step)]
    later = all_of_it[len(before) :]
    if not later:
        return Growth(0, 0, 0)
    run, bank = (before[-1].left, before[-1].bank) if before else (0, 0)
    return Growth(
        max(0, max(moment.run for moment in later) - run),
        later[-1].bank - bank,
        max(0, max(moment.run + moment.bank for moment in later) - run - bank),
    )


# ---- what this run will write ------------------------------------------------------------------------------------


def plan_of(context: TrainingContext, phase: Phase, steps: Sequence[int]) -> DiskPlan:
    """Return an estimate, once `phase` has begun and its parameters are created: later phases are taken to be like it.

    A phase's adapters are as large as its trained parameters; a method with adapters of its own for every task freezes
    them, others go on training them, so that the state to continue from holds them once more. What a method keeps of
    each task beside them (statistics, texts) is stored once, but the router's part of it again with each router. What
    a method will keep that it does not have yet is not known (InfLoRA's subspaces).

    Args:
        steps: optimizer steps of each phase.
    """
    specs = specs_of(context.backbone, context.train, {}).values()
    trained, state = 4 * sum(spec.shape.numel() for spec in specs), state_bytes(optimizer_kind(context.train), specs)
    kept = {name: tensor.nbytes for name, tensor in context.method.state_dict()[1].items()}
    return plan_from(context, phase, steps, trained, state, kept, answers_of(context, phase))


def plan_from(
    context: TrainingContext,
    phase: Phase,
    steps: Sequence[int],
    trained: int,
    state: int,
    kept: Mapping[str, int],
    answers: Sequence[int],
) -> DiskPlan:
    """Return the same from sizes, for a backbone without weights.

    Args:
        trained: bytes of the phase's trained parameters. state: those of the optimizer's state for them. kept: those
            of the method's state, by name.
        answers: bytes of `predictions/`, for each phase.
    """
    method, count = context.method, len(context.phases)
    module = method.router_module
    router = 0 if module is None else 4 * sum(parameter.numel() for parameter in module.parameters())
    routing = sum(size for name, size in kept.items() if name.startswith(tuple(f"{kind}/" for kind in ROUTERS)))
    earlier = phase.index * (trained - router) if method.own_adapters else 0
    others = max(0, sum(kept.values()) - earlier - routing)
    known = count if method.config.fits_ahead else phase.index + 1
    grows = 0 if router else routing // known  # one that is trained is shared by the tasks
    per_task = others // known + (grows or routing)
    modifiers = sum(tensor.nbytes for tensor in context.modifiers.tensors().values())
    end = (router if method.own_adapters else trained) + modifiers
    publishes = context.bank.publish and not method.trains_backbone
    own = trained - router if method.own_adapters else 0
    stored = per_task + own if context.bank.copies or not publishes else 0
    published = [trained + end + per_task + number * grows for number in range(1, count + 1)]
    exports = {"each": range(count), "last": range(count - 1, count), "none": range(0)}[context.checkpoint.export]
    model = trained if method.trains_backbone else 0
    selects = context.evaluation.select != "last"  # the best weights so far
    return DiskPlan(
        steps=steps,
        every=context.checkpoint.every_steps,
        keep=context.checkpoint.keep,
        inside=(1 + selects) * trained + state + modifiers,
        end=end,
        published=published if publishes else [0] * count,
        stays=[stored + answers[number] + model * (number in exports) for number in range(count)],
    )


def answers_of(context: TrainingContext, phase: Phase) -> list[int]:
    """Return the bytes of each phase's answers, from texts of this phase."""
    settings, stream = context.evaluation, context.stream
    if not settings.save_predictions or stream.learns_texts:
        return [0] * len(context.phases)
    table = stream.table(phase.tasks[0], "train", context.backbone.codec)
    texts = table.texts(range(min(SAMPLE, len(table))))
    line = sum(len(json.dumps(text)) for text in texts) / max(1, len(texts)) + ANSWER_BYTES
    return [
        round(line * sum(len(stream.rows(task, settings.split)) for task in evaluated_tasks(context, other_phase)))
        for other_phase in context.phases
    ]


# ---- the disk ----------------------------------------------------------------------------------------------------


def free_bytes(path: str) -> int:
    """Free on the disk of a folder that may not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: str) -> Path:
    folder = Path(path)
    while not folder.exists():
        folder = folder.parent
    return folder


def _device(storage: Storage) -> int:
    return _existing(storage.path()).stat().st_dev


def shortage(run: Storage, bank: Storage, needed: Growth, free: Callable[[str], int] = free_bytes) -> str:
    """Return a warning if a disk will not hold what the run adds; empty if it will, as far as is known."""
    together = run.is_local and bank.is_local and _device(run) == _device(bank)
    wanted = [(run, needed.both)] if together else [(run, needed.run), (bank, needed.bank)]
    for storage, size in wanted:
        if storage.is_local and size > (left := free(storage.path())):
            setting = "output.dir" if storage is run else "bank.dir"
            return (
                f"the run will write about {_written(size)} to '{storage.uri}', where {_written(left)} are free: make "
                f"room (`raycl clean` shows what can be removed), or choose another {setting}, a lower "
                "checkpoint.keep, or eval.save_predictions=false"
            )
    return ""


def _written(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
