"""Settings of a task's optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from raycl.config import Section
from raycl.errors import counted
from raycl.training.optimizers.registry import optimizer_class

DecayRate = Annotated[float, Field(ge=0, lt=1)]

POLYNOMIAL_END = 1e-7
"""The learning rate at which "polynomial" ends."""

Decay = Callable[[int, int, float], float]
"""`(step, steps, rate)` -> factor of the learning rate. Both counts begin after warm-up; `rate` is the highest one."""


def _constant(step: int, steps: int, rate: float) -> float:
    return 1.0


def _linear(step: int, steps: int, rate: float) -> float:
    return max(0.0, (steps - step) / max(1, steps))


def _cosine(step: int, steps: int, rate: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step / max(1, steps)))))


def _polynomial(step: int, steps: int, rate: float) -> float:
    """Return the factor of a polynomial of degree 1."""
    left = max(0.0, 1.0 - step / max(1, steps))
    return ((rate - POLYNOMIAL_END) * left + POLYNOMIAL_END) / rate


DECAYS: dict[str, Decay] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine,  # Hugging Face's default is one cycle: its restart would be the end
    "polynomial": _polynomial,
}
"""Name of `train.lr_scheduler` -> decay after warm-up by the formula of Hugging Face, for those that need no further
arguments. They are written here because `transformers.optimization` imports PEFT, and that bitsandbytes: a fifth of the
time from a command to its first step. A test compares every rate with that of `transformers.get_scheduler`."""


USUAL_EPOCHS, MOST_EPOCHS, LEAST_STEPS = 3, 20, 50
"""Epochs where no setting says how many, and most epochs and least steps of small tasks under a chat template: format
and wording of a few dozen conversations are learned in about 50 steps, not in 18."""


class TrainConfig(Section):
    """Training of one task. Optimizer, schedule and counters start anew at every task, as in all three papers' code."""

    epochs: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description=f"passes over a task's training rows; auto: {USUAL_EPOCHS}, and for tasks of your own under a "
        f"model's chat template as many as give {LEAST_STEPS} optimizer steps, at most {MOST_EPOCHS}",
    )
    epochs_by_task: dict[str, Annotated[int, Field(ge=1)] | Literal["auto"]] = Field(
        default_factory=dict, description="task name -> epochs, where it differs"
    )
    max_steps: int | None = Field(None, ge=1, description="optimizer steps per task at most")
    batch_size: int = Field(16, ge=1, description="examples per optimizer step, over all workers")
    micro_batch_size: int | None = Field(
        None, ge=1, description="examples per worker per forward pass; null: no accumulation"
    )
    packing: bool = Field(
        False,
        description="examples of a micro-batch share rows as long as its longest, without padding: the same losses and "
        "gradients in less time where lengths differ; decoder-only backbones",
    )
    compile: bool = Field(
        False,
        description="torch.compile for the backbone's layers in training: steps take less time, after a first one that "
        "compiles; decoder-only backbones, methods whose layers stay as they are (lora, finetune) and engine=torch",
    )
    group_by_length: bool = Field(
        False,
        description="steps of examples with prompts of similar length, from windows of 50 shuffled steps: less "
        "padding, but rows are less well mixed. Within a step micro-batches always are of similar lengths",
    )
    optimizer: str = Field(
        "adamw",
        description="adamw; adafactor: at the configured rate, without relative steps or scaling by the parameter, as "
        "in the Hugging Face trainer; sgd: with momentum; adamw_8bit: bitsandbytes', a quarter of adamw's state; "
        "muon: of torch 2.9 or newer, for weight matrices, and adamw for the rest. engine=deepspeed and engine=fsdp "
        "run adamw and sgd",
    )
    learning_rate: float = Field(1e-3, gt=0, description="learning rate at its highest")
    learning_rate_by_task: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="task name -> learning_rate, where it differs (MoCL's scripts, O-LoRA's on LLaMA)",
    )
    head_learning_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of the label head of encoder-only backbones, which starts at zero; null: "
        "learning_rate",
    )
    label_loss: Literal["seen", "task"] = Field(
        "seen",
        description="labels that compete in training of encoder-only backbones. seen: all seen so far; task: the "
        "task's own (labels of earlier tasks then keep their scores: Zeno et al. 2018, 'labels "
        "trick'; replayed rows compete with all)",
    )
    lr_scheduler: str = Field("constant", description=f"one of {', '.join(DECAYS)}")
    warmup_steps: int = Field(
        0, ge=0, description="optimizer steps in which the learning rate rises from zero; 0: warmup_ratio decides"
    )
    warmup_ratio: float = Field(
        0.0, ge=0, lt=1, description="share of the task's steps with a rising learning rate; used if warmup_steps is 0"
    )
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the optimizer")
    decay_norms_and_biases: bool = Field(
        False, description="weight decay acts on norms and biases too, which the Hugging Face trainer leaves out"
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum; null: the optimizer's own, 0 for sgd and 0.95 for muon"
    )
    betas: tuple[DecayRate, DecayRate] | None = Field(
        None, description="decay rates of running averages; null: the optimizer's own, [0.9, 0.999] for AdamW's"
    )
    epsilon: float | None = Field(
        None, gt=0, description="added to the root of the mean square; null: the optimizer's own, 1e-8 for AdamW's"
    )
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this norm; 0: no clipping")
    log_every_s: float = Field(5.0, gt=0, description="seconds between progress lines")

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        optimizer_class(value)
        return value

    @field_validator("lr_scheduler")
    @classmethod
    def _known_scheduler(cls, value: str) -> str:
        if value not in DECAYS:
            raise ValueError(f"train.lr_scheduler is '{value}': expected one of {', '.join(DECAYS)}")
        return value

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainConfig:
        if self.lr_scheduler == "constant" and (self.warmup_steps or self.warmup_ratio):
            raise ValueError(
                "train.lr_scheduler 'constant' ignores warm-up: "
                "use constant_with_warmup, or drop warmup_steps and warmup_ratio"
            )
        return self

    @model_validator(mode="after")
    def _polynomial_falls(self) -> TrainConfig:
        lowest = min([self.learning_rate, *self.learning_rate_by_task.values()])
        if self.lr_scheduler == "polynomial" and lowest <= POLYNOMIAL_END:
            raise ValueError(
                f"train.lr_scheduler 'polynomial' falls to {POLYNOMIAL_END:g}, and the learning rate is {lowest:g}: "
                "use a higher rate or another schedule"
            )
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield a share of steps that is given with their number, and settings of other optimizers."""
        reads = optimizer_class(self.optimizer).settings
        own = ("momentum", "betas", "epsilon")  # which only some optimizers read
        yield from ((name, f"optimizer={self.optimizer}") for name in own if name not in reads)
        if not self.weight_decay:
            yield "decay_norms_and_biases", "weight_decay=0"
        if self.warmup_steps:
            yield "warmup_ratio", f"warmup_steps={self.warmup_steps}"

    def chosen_epochs(self, phase: str) -> int | Literal["auto"]:
        """Return the setting of a phase by its name."""
        return self.epochs_by_task.get(phase, self.epochs)

    def epochs_of(self, phase: str, rows: int = 0) -> int:
        """Return the epochs of a phase by its name.

        Args:
            rows: its rows, where `auto` gives them `LEAST_STEPS`; 0: it does not.
        """
        if (epochs := self.chosen_epochs(phase)) != "auto":
            return epochs
        wanted = math.ceil(LEAST_STEPS / math.ceil(rows / self.batch_size)) if rows else 0
        return max(USUAL_EPOCHS, min(wanted, MOST_EPOCHS))

    def of_task(self, task: str) -> TrainConfig:
        """Return the settings of a phase by its name, with the learning rate that its optimizer gets."""
        rate = self.learning_rate_by_task.get(task, self.learning_rate)
        return self.model_copy(update={"learning_rate": rate})

    def examples_per_pass(self, workers: int) -> int:
        """Return `micro_batch_size`, or a worker's whole share of the batch."""
        return self.micro_batch_size or max(1, self.batch_size // workers)

    def batch_line(self, workers: int) -> str:
        """Return how the examples of an optimizer step are divided over workers and forward passes."""
        per_pass = self.examples_per_pass(workers)
        passes = self.batch_size // (per_pass * workers)
        shares = f"{per_pass} on each of {workers} workers" if workers > 1 else f"{per_pass} on one worker"
        return f"each optimizer step has {counted(self.batch_size, 'example')}: {shares}" + (
            f" in each of {passes} forward passes, whose gradients are summed" if passes > 1 else ""
        )

    def warmup(self, steps: int) -> int:
        """Return the warm-up steps of a task of `steps` steps."""
        return self.warmup_steps or int(steps * self.warmup_ratio)
