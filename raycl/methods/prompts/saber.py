"""SABER: Progressive Prompts, whose earlier prompts are refined on a later task that agrees with theirs.

A task trains its prompt in front of all earlier ones. In its epochs after `refine_after` that prompt is held, and the
chosen earlier prompts u_i are trained on the new task's rows, off what they have used so far:

    u_i <- u_i - rate (I - U_i U_i^T) g

Columns of U_i are the first `rank` right singular vectors of u_i's gradients on batches of its own task, at that task's
end, and the directions of all refinements since. With g_b the gradient of the new task's loss on a batch b with u_i
alone in front of texts, and g the mean of u_i's own gradients at its task's end, u_i is chosen where

    gradient:  mean over b of |U_i U_i^T g_b| / |g_b| >= overlap,  and  cos(g, mean of g_b) > 0
    loss:      W(L_i, L_t) - W(L_i^u, L_t^u) >= gap

W is the Wasserstein distance of losses on batches of the two tasks, by the bare backbone (L) and with u_i alone (L^u).
No row of an earlier task is read again. Tiwari and Ji 2026, "Turning Back Without Forgetting: Selective Backward
Refinement for Parameter-Efficient Continual Learning" (arXiv:2606.01379, ICML 2026); `criterion=gradient` is SABER-P,
and `loss` SABER-L, over the paper's frozen prompt pool (FPP). Values are the paper's thresholds, and 10 epochs, then
refinement (2 epochs), 10 batches and 3 vectors as in the authors' code (github.com/OptMN-Lab/SABER-ICML-2026 at
b483f75, `src/seq2seq/LongSequence`), whose encoder-decoder file does not parse as it is published.
Deviations:
- The overlap is of g_b, as in the paper; the code has the new prompt's own gradient there.
- Where none agrees, none is refined, as in the paper; the code then refines all earlier prompts.
- A refined prompt takes the place of the former one wherever that stood, in front of texts of later tasks too. The code
  goes on with the former prompts, and answers texts of an earlier task with its last refinement alone.
- While prompts are refined, all earlier ones are in front of texts; in the code those that were chosen alone.
- Losses of earlier tasks are kept as numbers; the code reads their rows again. A batch has `train.batch_size` rows.
- Updates are kept off U_i exactly, whatever the optimizer does; the code projects the gradients that AdamW then scales.
  U_i keeps all refinements, the code the first 6 columns. Gradients are of training rows, there of validation rows;
  their length counts in U_i, as in the code's encoder-decoder file, while the decoder file makes each of them 1.
- SPA, the paper's other pool, whose prompts attend to each other, is not built.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.adapters.soft_prompts import MixedPrompts
from raycl.backbone import Backbone
from raycl.backbone.base import evaluating
from raycl.bank.tensor_groups import TensorGroups
from raycl.errors import BankError, ConfigError
from raycl.methods.base import Learned, MethodConfig, State, activate, under
from raycl.methods.context import TaskContext
from raycl.methods.prompts.progprompt import GrowingPrompts, GrowingPromptsConfig
from raycl.types import IGNORE, Batch, Mixture, Phase, Task

PROMPTS = "prefix.trainable"
"""Name of the parameter of all prompts in training."""

BASIS, MEAN, BARE, OWN = "saber/basis", "saber/mean", "saber/bare", "saber/own"
"""Kinds of tensors of a learned task: U_i, its mean gradient, and losses of the bare backbone and with its prompt."""


class SaberConfig(GrowingPromptsConfig):
    """SABER: Progressive Prompts, of which earlier ones are refined on later tasks that agree with theirs."""

    name: Literal["saber"] = "saber"
    criterion: Literal["gradient", "loss", "both"] = Field(
        "gradient",
        description="what must agree for an earlier prompt to be refined. gradient: directions of gradients (SABER-P); "
        "loss: distributions of losses (SABER-L); both: each of them",
    )
    refine_after: int = Field(
        10, ge=1, description="epochs of a task that train its own prompt; those after them refine earlier prompts"
    )
    overlap: float = Field(
        0.1, ge=0, le=1, description="least share of a new task's gradient in directions of an earlier task's"
    )
    gap: float = Field(0.2, description="least fall of the distance of two tasks' losses, by the earlier one's prompt")
    rank: int = Field(3, ge=1, description="directions of an earlier task's gradients that no refinement follows")
    batches: int = Field(10, ge=2, description="batches of a task whose gradients are compared, at most")

    @property
    def least_epochs(self) -> int:
        return self.refine_after + 1

    needs_task: ClassVar[bool] = True
    needs_texts: ClassVar[bool] = True
    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        *("criterion", "refine_after", "overlap", "gap", "rank", "batches"),
    )

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield the threshold of the other criterion."""
        if self.criterion != "both":
            name = {"gradient": "gap", "loss": "overlap"}[self.criterion]
            yield name, f"criterion={self.criterion}"


def mean_overlap(gradients_MD: Tensor, basis_DK: Tensor) -> float:
    """Return the mean over gradients of the share of their length that lies in a subspace; 0 for a gradient of zero."""
    lengths_M = gradients_MD.norm(dim=1)
    inside_M = (gradients_MD @ basis_DK).norm(dim=1)
    return float((inside_M / lengths_M.clamp(min=torch.finfo(lengths_M.dtype).tiny)).mean())


def directions(gradients_MD: Tensor, rank: int) -> Tensor:
    """Return `[D, K]`: the first right singular vectors of gradients, at most `rank`."""
    rows: Tensor = torch.linalg.svd(gradients_MD, full_matrices=False).Vh[:rank]
    return rows.T.contiguous()


def extended(basis_DK: Tensor, change_D: Tensor) -> Tensor:
    """Return an orthonormal basis with the direction of a change added; the same where nothing has changed."""
    rest_D = change_D - basis_DK @ (basis_DK.T @ change_D)
    if float(rest_D.norm()) <= 1e-6 * max(1.0, float(change_D.norm())):
        return basis_DK
    columns: Tensor = torch.linalg.qr(torch.cat([basis_DK, rest_D[:, None]], dim=1)).Q
    return columns.contiguous()  # as a checkpoint gives it back: products with another layout differ in the last bits


def wasserstein(losses_M: Tensor, others_N: Tensor) -> float:
    """Return the Wasserstein distance of two samples: the area between their cumulative distributions."""
    from scipy import stats  # half a second of imports

    return float(stats.wasserstein_distance(losses_M.numpy(), others_N.numpy()))


class Saber(GrowingPrompts):
    """A growing row of prompts, of which the newest is trained first, and chosen earlier ones after it.

    Attributes:
        chosen: earlier tasks whose prompts the present one refines.
        refined: learned task -> earlier tasks whose prompts it has refined.
        scores: earlier task -> overlap, cosine and gap for the present or last task, where they are measured.
    """

    Config: ClassVar[type[MethodConfig]] = SaberConfig
    computes_gradients: ClassVar[bool] = True
    revisable: ClassVar[bool] = False  # refinements that the task has made stay

    def __init__(self, config: SaberConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed, by_task=True)
        self.chosen: list[str] = []
        self.scores: dict[str, dict[str, float]] = {}
        self.constraint = HeldPrompts(self)
        self.refined: dict[str, list[str]] = {}
        self._kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in (BASIS, MEAN, BARE, OWN)}
        self._context: TaskContext | None = None
        self._only = ""

    @property
    def prompts(self) -> MixedPrompts:
        """The prompts in front of texts."""
        assert isinstance(self.backbone.prefix, MixedPrompts), "the adapters are prompts"
        return self.backbone.prefix

    @property
    def refines(self) -> bool:
        """Return whether the present step trains earlier prompts."""
        context = self._context
        if context is None or not self.chosen:
            return False
        epoch = -(-context.count("train") // context.batch_size)
        return context.step.index >= epoch * int(self.config.refine_after)

    def check(self, tasks: Collection[Task]) -> None:
        """Check that an earlier prompt can answer a new task.

        Raises:
            ConfigError: answers are rows of a label head, of which a new task has none yet.
        """
        if self.backbone.capabilities.answers == "label":
            raise ConfigError(
                "method 'saber' measures how earlier prompts answer a new task before it is learned, and an "
                "encoder-only backbone has no label head for it then: expected an encoder-decoder or decoder-only "
                "backbone, or another method, such as progprompt"
            )

    # ---- which prompts agree ----------------------------------------------------------------------------------

    def _choose(self, context: TaskContext) -> list[str]:
        """Return the earlier tasks whose prompts agree with the present one, the newest first."""
        criterion, config = self.config.criterion, self.config
        bare = self._losses(context, None) if criterion != "gradient" else None
        self.scores = {name: {} for name in reversed(self._learned)}
        chosen = []
        for name, scores in self.scores.items():
            if criterion != "loss":
                with self._alone(name):
                    gradients_MD = self._gradients(context)
                cosine = torch.cosine_similarity(self._kept[MEAN][name], gradients_MD.mean(0), dim=0)
                scores |= {"overlap": mean_overlap(gradients_MD, self._kept[BASIS][name]), "cosine": float(cosine)}
            if bare is not None:
                before = wasserstein(self._kept[BARE][name], bare)
                scores["gap"] = before - wasserstein(self._kept[OWN][name], self._losses(context, name))
            if agrees(scores, config.overlap, config.gap):
                chosen.append(name)
        return chosen

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Have an earlier prompt in training, alone in front of texts."""
        state = self._learned[name]
        assert state.prompt is not None, "every task has a prompt"
        self.stack.drop(name)
        self.stack.begin_training({name: 0}, self.scale)
        self.prompts.begin_training(state.prompt[None].to(self.backbone.device))
        self._train_own()
        self._only = name
        try:
            yield
        finally:
            self._only = ""
            self.prompts.end_training()
            self.stack.end_training()
            self.stack.load(name, state)

    def _gradients(self, context: TaskContext) -> Tensor:
        """Return `[M, D]` on the CPU: the gradient of the first prompt in training on each of M batches. Collective."""
        size = context.batch_size
        found = []
        for task in context.phase.tasks:
            rows = context.stored_rows(task, limit=size * self.config.batches)
            for start in range(0, len(rows), size):
                found.append(context.gradients([(task, rows[start : start + size])])[PROMPTS][0].flatten().cpu())
        return torch.stack(found[: self.config.batches])

    def _losses(self, context: TaskContext, name: str | None) -> Tensor:
        """Return `[M]` on the CPU: the mean loss of each batch of the phase, with a prompt or none. Collective."""
        backbone, count = self.backbone, context.count("train")
        sums = torch.zeros(2, count, dtype=torch.float64, device=backbone.device)

        def read(batch: Batch) -> None:
            mixture = None if name is None else Mixture.same({name: 1.0}, len(batch))
            with torch.no_grad(), activate(self, mixture):
                output = backbone(batch)
            at = output.positions()
            rows = batch.rows[output.rows[at]]
            sums[0].index_add_(0, rows, output.losses()[at].double())
            sums[1].index_add_(0, rows, (output.labels[at] != IGNORE).double())

        with evaluating(backbone.model):
            context.each_batch(read)
        losses, tokens = context.sum(sums).cpu()
        pairs = zip(losses.split(context.batch_size), tokens.split(context.batch_size), strict=True)
        return torch.stack([loss.sum() / number.sum().clamp(min=1) for loss, number in pairs])

    # ---- hooks ------------------------------------------------------------------------------------------------

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Choose the earlier prompts that are refined, and train them with the task's own."""
        self._context = context
        if not context.resumed:
            earlier = [task for task in self._learned if task in self._kept[BASIS]]
            assert self.task_id_given or len(earlier) == len(self._learned), "each task has been measured"
            self.scores = {}
            self.chosen = self._choose(context) if earlier and not self.task_id_given else []
        super().begin_task(phase, context)

    def _create(self, task: str) -> None:
        for name in self.chosen:
            self.stack.drop(name)
        self._create_prompts([task, *self.chosen])
        self.prompts.fill({name: self._learned[name] for name in self.chosen})

    def route(self, batch: Batch) -> Mixture:
        """Return all prompts, or the one that is measured."""
        return Mixture.same({self._only: 1.0}, len(batch)) if self._only else super().route(batch)

    def transform_gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep what the step trains, off what earlier prompts have used."""
        own = gradients.get(PROMPTS)
        return gradients if own is None else {**gradients, PROMPTS: self.allowed(own)}

    def allowed(self, changes_MPD: Tensor) -> Tensor:
        """Return changes of the prompts in training as the present step may make them."""
        if not self.chosen:
            return changes_MPD
        result_MPD = torch.zeros_like(changes_MPD)
        if not self.refines:
            result_MPD[0] = changes_MPD[0]
            return result_MPD
        for number, name in enumerate(self.chosen, 1):
            basis_DK, change_D = self._kept[BASIS][name].to(changes_MPD), changes_MPD[number].flatten()
            result_MPD[number] = (change_D - basis_DK @ (basis_DK.T @ change_D)).view_as(changes_MPD[number])
        return result_MPD

    def end_task(self, context: TaskContext) -> Learned:
        """Freeze the task's prompt and the refined ones, and measure what later tasks are compared with."""
        task, before = self._task, {name: self._learned[name].prompt for name in self.chosen}
        gradients_MD = None if self.task_id_given else self._gradients(context)
        states = self._freeze(context)
        for name, prompt in before.items():
            after = states[name].prompt
            assert prompt is not None and after is not None, "every task has a prompt"
            basis_DK = self._kept[BASIS][name]
            self._kept[BASIS][name] = extended(basis_DK, (after - prompt).flatten().to(basis_DK))
        if gradients_MD is not None:
            self._kept[BASIS][task] = directions(gradients_MD, self.config.rank)
            self._kept[MEAN][task] = gradients_MD.mean(0)
            if self.config.criterion != "gradient":
                self._kept[BARE][task], self._kept[OWN][task] = (self._losses(context, name) for name in (None, task))
        self.refined[task] = self.chosen
        self._context, self.chosen = None, []
        return self._published(context, states)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what was measured of earlier tasks before the phase that has just ended."""
        scores = {name: {kind: round(value, 4) for kind, value in of.items()} for name, of in self.scores.items()}
        last = self.refined[next(reversed(self.refined))] if self.refined else []
        return {**super().summary(observed), **({"saber": {"refined": last, "scores": scores}} if scores else {})}

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        kept = {f"{kind}/{name}": tensor for kind, held in self._kept.items() for name, tensor in held.items()}
        own = {"chosen": self.chosen, "refined": self.refined, "scores": self.scores}
        return {**values, **own}, tensors | kept

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.chosen = list(values["chosen"])
        self.refined = {name: list(of) for name, of in values["refined"].items()}
        self.scores = {name: dict(of) for name, of in values["scores"].items()}
        self._kept = {kind: dict(under(f"{kind}/", tensors)) for kind in self._kept}
        super().load_state_dict(values, tensors)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        """Remove what later tasks are compared with.

        Raises:
            BankError: the task has refined prompts of others.
        """
        if refined := values["refined"].get(task):
            raise BankError(
                f"task '{task}' has refined the prompts of {', '.join(refined)} (method 'saber'), from which it cannot "
                "be taken out: expected a task that has refined none, or train a run without it"
            )
        kept = {kind: {name: of for name, of in values[kind].items() if name != task} for kind in ("refined", "scores")}
        kept["refined"] = {name: [other for other in of if other != task] for name, of in kept["refined"].items()}
        names = {f"{kind}/{task}" for kind in (BASIS, MEAN, BARE, OWN)}
        return {**values, **kept}, left.select(lambda name: name not in names)


def agrees(scores: Mapping[str, float], least_overlap: float, gap: float) -> bool:
    """Return whether all that was measured of an earlier task agrees with the new one."""
    geometry = "overlap" not in scores or (scores["overlap"] >= least_overlap and scores["cosine"] > 0)
    return geometry and ("gap" not in scores or scores["gap"] >= gap)


class HeldPrompts:
    """Keeps the updates of prompts to what a step may change (`Saber.allowed`)."""

    def __init__(self, method: Saber) -> None:
        self._method = method

    @property
    def names(self) -> Collection[str]:
        """Return the parameter of all prompts, where earlier ones are among them."""
        return (PROMPTS,) if self._method.chosen else ()

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return the values before with the update as far as it is allowed."""
        return before + self._method.allowed(after - before)
