"""Training of one phase, from its first batch, or a checkpoint in its middle, to its last checkpoint.

It checks that the optimizer uses the gradients that modifiers return, on the real model, engine and data.

Some engines copy gradients before they can be edited (DeepSpeed 0.14.2 at ZeRO 0 in bfloat16, which the authors of MIGU
pinned; 0.19.8 at ZeRO 1 in bfloat16 with float32 accumulation), and then a mask does nothing, silently. The running
average of gradients (Adam's first moment) shows it: where the gradient was zero it has only decayed, whatever the
learning rate, weight decay, clipping or precision. It is read around the first steps of every task, until one has a
gradient, and nothing is changed: a trial step beforehand would have to put weights, moments, schedule and partitions
back under five engines, and would prove less, since it is not the step that counts.
"""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from raycl.data.loader import Loader
from raycl.errors import DivergedError, RunError
from raycl.methods.base import Learned, Method, activate_trainable, phase_labels, trained_names
from raycl.methods.context import LEAST_TRIAL, Step, TaskContext
from raycl.methods.modifier import Modifiers
from raycl.methods.queries import bare_queries
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import NONE, Engine, OpenEngine, Share, scattered, weights_of
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.phase.data import PhaseData, order_of, stable_seed
from raycl.training.phase.disk_space import growth, plan_of, shortage
from raycl.training.phase.selection import Selection
from raycl.training.phase.step import noted_rows, train_step
from raycl.training.phase.task_end import keep_learned, kept_bytes
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.records.progress import StepResult
from raycl.training.records.publish import open_bank
from raycl.training.records.recorder import Recorder
from raycl.training.workers.control import Control
from raycl.training.workers.distributed import DistributedContext, load_parameters, whole
from raycl.training.workers.stopping import StopRequested
from raycl.types import Phase

log: logging.Logger = logging.getLogger("raycl")


@dataclass
class TaskTrainer:
    """Trains phases of a run on one worker.

    Attributes:
        alone: other worker groups train the other phases.
    """

    context: TrainingContext
    open_engine: OpenEngine
    world: DistributedContext
    recorder: Recorder
    control: Control
    alone: bool = False

    def __post_init__(self) -> None:
        self._disk_is_checked = False
        self._tried: dict[str, float] = {}

    def train(self, phase: Phase, resume: Checkpoint | None) -> Checkpoint:
        """Train a phase to its end and write its last checkpoint. Collective.

        Args:
            resume: a checkpoint in the middle of this phase, whose state the method has already.

        Raises:
            StopRequested: a checkpoint was written, and the run is to stop.
        """
        began, context = time.perf_counter(), self.context
        method, modifiers, backbone = context.method, context.modifiers, context.backbone
        self._tried = {"train_s": 0.0, "tokens": 0.0}
        data = PhaseData(context, phase, self.world, resume is not None, self._trial_losses)
        backbone.competing_labels = tuple(phase_labels(phase)) if context.train.label_loss == "task" else ()
        begin_phase(data)
        prepared = time.perf_counter() - began - self._tried["train_s"]
        modifiers.begin_task(phase, only=len(context.phases) == 1, resumed=resume is not None)
        loader = data.loader()
        if resume is None:  # modifiers observe rows before anything is trained
            observe = partial(modifiers.observe_forward, backbone)
            modifiers.observe_rows(partial(data.compute_each, loader, observe), self.world.sum)
            modifiers.observe_gradients(data)
        by_phase = [order_of(context, other).steps for other in context.phases]
        self._check_disk(phase, by_phase, resume)
        trained = sum(parameter.numel() for parameter in backbone.parameters() if parameter.requires_grad)
        steps = loader.order.steps
        engine = self.open_engine(loader.accumulation, steps, phase.name)
        start, spent = self._restore(engine, resume)
        spent["prepare_s"] = prepared + (resume.spent.get("prepare_s", 0.0) if resume else 0.0)
        if self.world.is_first:
            later, seconds = sum(by_phase[phase.index + 1 :]), time.perf_counter() - began
            prepared_s = 0.0 if method.config.fits_ahead else seconds
            if self.alone:
                later, prepared_s = 0, 0.0
            self.recorder.progress.begin(phase, loader.order.count, steps, start, later, prepared_s)
        self.control.progress("training", step=start, steps=steps, steps_by_phase=by_phase)
        backbone.train()
        selection = Selection(context, phase, self.world, loader.order.steps_per_epoch, engine, resume)
        if resume is not None:  # each has a whole copy
            resume.parameters, resume.optimizer = {}, {}
        mask_check = GradientMaskCheck(engine, modifiers, optimizer_kind(context.train).first_moment())
        for index in range(start, steps):
            began = time.perf_counter()
            mask_check.before_step()
            result = self._step(engine, data, loader, index, modifiers)
            mask_check.after_step()
            seconds = time.perf_counter() - began
            spent |= {"train_s": spent["train_s"] + seconds, "tokens": spent["tokens"] + result.tokens}
            self.control.progress("training", step=index + 1, steps=steps, loss=result.loss)
            self.recorder.step(phase, index + 1, steps, result, seconds)
            selection.after_step(index + 1, steps)
            self._checkpoint_if_due(phase, engine, index + 1, steps, spent, selection)
        spent |= {**selection.spent, "step_bytes": float(engine.step_bytes), "trained_parameters": float(trained)}
        share, data.parameters = self._close(engine, selection)
        done = self._checkpoint(phase, share, steps, steps, spent)
        self._end(phase, data, done)
        return done

    def _step(
        self, engine: Engine, data: PhaseData, loader: Loader, index: int, modifiers: Modifiers = NONE
    ) -> StepResult:
        """Take an optimizer step of the phase."""
        context, batches = self.context, loader.micro_batches(index)
        seed = stable_seed(context.info.seed, "step", data.phase.index, index)
        data.step = Step(index, seed, len(batches))
        with ExitStack() as stack:
            stack.push(partial(self._name_rows, loader))
            return train_step(engine, context.method, batches, self.world, seed, modifiers, self.recorder.finish_saving)

    def _trial_losses(self, data: PhaseData, steps: int) -> Tensor | None:
        """Return the losses after a trial; see `TaskContext.trial_losses`. Collective."""
        began, backbone, loader = time.perf_counter(), self.context.backbone, data.loader()
        steps = min(steps, loader.order.steps_per_epoch // 2, loader.order.steps // 2)
        if steps < LEAST_TRIAL:
            return None
        before = {name: parameter.detach().clone() for name, parameter in data.trained().items()}
        engine = self.open_engine(loader.accumulation, loader.order.steps, data.phase.name)
        backbone.train()
        losses = torch.full((steps,), torch.inf, dtype=torch.float64)
        try:
            for index in range(steps):
                self._tried["tokens"] += self._step(engine, data, loader, index).tokens
                self.control.progress("training")
        except DivergedError:
            self.control.failed_rows = []
            engine.close()
        else:
            engine.close()
            losses = data.losses_of(loader, range(steps, 2 * steps))
        data.step = Step()
        with torch.no_grad():
            for name, parameter in data.trained().items():  # an engine may have replaced the objects
                parameter.copy_(before[name])
        spent = time.perf_counter() - began
        self._tried["train_s"] += spent
        if self.world.is_first:
            line = "    a trial of %d steps: loss %.4f on the rows of the next %d (%.1f s)"
            log.info(line, steps, float(losses.mean()), steps, spent)
        return losses

    def _name_rows(self, loader: Loader, kind: object, error: BaseException | None, trace: object) -> None:
        """Name the rows of the micro-batch that failed to `control`."""
        if error is not None:
            self.control.failed_rows = loader.named(noted_rows(error))

    def _close(self, engine: Engine, selection: Selection) -> tuple[Share, dict[str, Tensor]]:
        """Close the engine after the last step: what this worker writes, and `TaskContext.parameters`. Collective.

        What a method trains of the backbone itself is written from where it lies: in the backbone, or each worker's
        part of it in the memory that the engine has kept it in. Adapters, which a method may still change, are copied.
        """
        backbone, method = self.context.backbone, self.context.method
        names = trained_names(backbone)
        kept: Share | None = None
        if method.trains_backbone and engine.separate_masters:
            kept = replace(engine.share(names), optimizer={})
        learned = {} if method.trains_backbone else engine.parameters(names)
        self.context.modifiers.end_task()
        engine.close()
        own = {name: parameter for name, parameter in backbone.named_parameters() if name in names}
        for name, part in scattered(selection.best, own, self.world).items() if selection.best else ():
            best = whole(part)
            load_parameters(backbone, {name: best})
            learned |= {} if method.trains_backbone else {name: best.cpu()}
        if not method.trains_backbone:
            return Share(learned), learned
        if kept is None:
            return weights_of(backbone, names, self.world), {name: own[name].detach() for name in names}
        kept = selection.best or kept
        return kept, scattered(kept, own, self.world)

    def _restore(self, engine: Engine, resume: Checkpoint | None) -> tuple[int, dict[str, float]]:
        if resume is None:
            return 0, dict(self._tried)
        with activate_trainable(self.context.method, 1):
            engine.restore(resume.parameters, resume.optimizer, resume.step)
        return resume.step, {key: resume.spent[key] for key in ("train_s", "tokens")}

    def _check_disk(self, phase: Phase, steps: list[int], resume: Checkpoint | None) -> None:
        """Warn once, before the first phase of this attempt is trained, if a disk will not hold what is written."""
        if self.world.is_first and not self._disk_is_checked:
            needed = growth(plan_of(self.context, phase, steps), phase.index, resume.step if resume else 0)
            storage = self.recorder.storage
            if warning := shortage(storage, open_bank(self.context.bank, storage).storage, needed):
                log.warning("%s", warning)
        self._disk_is_checked = True

    def _checkpoint_if_due(
        self, phase: Phase, engine: Engine, step: int, steps: int, spent: dict[str, float], selection: Selection
    ) -> None:
        """Write a checkpoint inside the phase where one is due, or the run is to stop."""
        if step == steps:
            return
        stops, every = self.control.stop.requested(), self.context.checkpoint.every_steps
        if stops or (every is not None and step % every == 0):
            share = engine.share(trained_names(self.context.backbone))
            share = replace(share, optimizer={**share.optimizer, **selection.tensors()})
            now = self._checkpoint(phase, share, step, steps, spent | selection.spent)
            self.recorder.save(now, beside=self.context.checkpoint.asynchronous and not stops)
        if stops:
            engine.close()
            raise StopRequested

    def _checkpoint(self, phase: Phase, share: Share, step: int, steps: int, spent: dict[str, float]) -> Checkpoint:
        method, modifiers = self.context.method, self.context.modifiers
        values, tensors = method.state_dict()
        return Checkpoint(
            phase.index,
            step,
            steps,
            values,
            dict(share.parameters),
            dict(share.optimizer),
            spent,
            frozen_state=tensors | modifiers.tensors(),
            modifiers=modifiers.state(),
            places=share.places,
            is_part=share.is_part,
        )

    def _end(self, phase: Phase, task_context: TaskContext, done: Checkpoint) -> None:
        """End the phase: the method keeps what it learned and publishes it, and the last checkpoint is written."""
        context = self.context
        learn_texts(context.method, task_context)
        learned: Learned | None = context.method.end_task(task_context)
        if not context.method.trains_backbone:  # a method may have changed what it trained
            done.parameters = dict(task_context.parameters)
        keep_learned(context, phase, learned, done)
        done.spent["kept_bytes"] = kept_bytes(done, self.world)
        if learned is not None:
            self.recorder.publish(phase, context.schedule.published(phase, context.method, learned), done)
        self.recorder.save(done)
        done.parameters = {}  # they may be the engine's own memory, which evaluation can use


def begin_phase(data: PhaseData) -> None:
    """Let the method begin a phase with its context. Collective."""
    data.encode()
    method = data.context.method
    if not data.resumed:
        data.context.schedule.begin(method)
    method.begin_task(data.phase, data)


def learn_texts(method: Method, context: TaskContext) -> None:
    """Add the phase's texts to `Method.bare`, where its router is to know them; the same on all workers."""
    config, learner = method.config, method.learner
    if not config.knows_texts or config.own_statistics or learner.task_id_given:
        return
    queries_ND = bare_queries(context, learner.backbone, learner.seed)
    if len(queries_ND):
        dev_MD = bare_queries(context, learner.backbone, learner.seed, "dev")
        learner.bare.add(context.phase.name, queries_ND, dev_MD)


TOLERANCE = 1e-5
"""Share of the decayed moment's largest entry; exactly 0 where it was zero before, as at the start of every task."""

STEPS = 20
"""Steps that are checked until one proves it; below a new label head, and for LoRA's A, gradients are 0 at first."""


class GradientMaskCheck:
    """First moments of a few parameters around a step. Collective: every worker looks at the same ones.

    Attributes:
        steps_left: steps that may still be checked; 0 if the check has passed, or there is nothing to check.
    """

    def __init__(self, engine: Engine, modifiers: Modifiers, moment: tuple[str, float] | None) -> None:
        """Create the check of one task's engine.

        Args:
            moment: name and decay rate of the optimizer's running average of gradients; None: it has none, and nothing
                is checked.
        """
        self.engine = engine
        self.modifiers = modifiers
        self.moment, self.decay = moment or ("", 0.0)
        self.names: list[str] = _sampled_names(modifiers.parameter_names) if moment else []
        self.steps_left = STEPS if self.names else 0
        self._before: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Read the moments."""
        if self.steps_left:
            self._before = self.engine.optimizer_state(self.names)

    def after_step(self) -> None:
        """Compare moments with the mask.

        Raises:
            RunError: the optimizer saw a gradient where there should be none.
        """
        if not self.steps_left:
            return
        after = self.engine.optimizer_state(self.names)
        masked = [name for name in self.names if self.modifiers.masked(name) is not None]
        conclusive = [
            self._is_conclusive(name, *(state[f"{name}/{self.moment}"] for state in (self._before, after)))
            for name in masked
        ]
        self.steps_left = 0 if any(conclusive) or not masked else self.steps_left - 1

    def _is_conclusive(self, name: str, before: Tensor, after: Tensor) -> bool:
        """Return whether there was a gradient at all, so that its absence in the masked rows proves something."""
        masked, held = self.modifiers.masked(name), self.modifiers.held(name)
        assert masked is not None
        expected = before * self.decay
        if held is not None:
            expected = torch.where(held.cpu(), before, expected)
        updated = (after - expected).abs() > TOLERANCE * float(expected.abs().max())
        masked = masked.cpu().expand_as(updated)
        wrong, all_masked = int((updated & masked).sum()), int(masked.sum())
        if wrong:
            raise RunError(
                f"the optimizer saw a gradient in {wrong} of {all_masked} masked weights of '{name}': this engine "
                "ignores edited gradients, so its modifiers would do nothing; use engine=torch or another "
                "engine.zero_stage, or take gradient accumulation types out of engine.extra"
            )
        return bool((updated & ~masked).any())


def _sampled_names(names: list[str]) -> list[str]:
    """Return two neighbours (A and B of LoRA, whose A has no gradient at first) at start, middle and end."""
    middle = len(names) // 2
    indices = {0, 1, middle, middle + 1, len(names) - 2, len(names) - 1}
    return [name for index, name in enumerate(names) if index in indices]
