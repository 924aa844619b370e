"""Settings of training, engines and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from raycl.bank.branches import MAIN, BranchName
from raycl.config import PathOrUri, Section
from raycl.training.optimizers.registry import optimizer_class

EXEMPT = (
    *("launch", "tracking", "output", "bank.dir", "bank.publish", "bank.branch", "bank.sample_days", "bank.copies"),
    "bank.allow_storage",
    *("eval.other_row", "checkpoint.asynchronous"),
)
"""Settings that cannot change what a run learns; they may differ on resume and are not in the fingerprint."""

SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
"""Learning-rate schedules by their Hugging Face names (those that need no further arguments)."""


OPTIMIZER_SETTINGS = ("momentum", "betas", "epsilon")
"""Settings that only some optimizers read (`OptimizerKind.settings`)."""


class TrainConfig(Section):
    """Training of one task. Optimizer, schedule and counters start anew at every task, as in all three papers' code."""

    epochs: int = Field(3, ge=1, description="passes over a task's training rows")
    epochs_by_task: dict[str, int] = Field(default_factory=dict, description="task name -> epochs, where it differs")
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
    lr_scheduler: str = Field("constant", description=f"one of {', '.join(SCHEDULERS)}")
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
    momentum: float | None = Field(None, ge=0, lt=1, description="momentum of sgd (null: 0) and of muon (null: 0.95)")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay rates of AdamW's running averages")
    epsilon: float = Field(1e-8, gt=0, description="epsilon of AdamW")
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
        if value not in SCHEDULERS:
            raise ValueError(f"train.lr_scheduler is '{value}': expected one of {', '.join(SCHEDULERS)}")
        return value

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainConfig:
        if self.lr_scheduler == "constant" and (self.warmup_steps or self.warmup_ratio):
            raise ValueError(
                "train.lr_scheduler 'constant' ignores warm-up: "
                "use constant_with_warmup, or drop warmup_steps and warmup_ratio"
            )
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield A share of the steps beside their number, and what belongs to another optimizer."""
        reads = optimizer_class(self.optimizer).settings
        yield from ((name, f"optimizer={self.optimizer}") for name in OPTIMIZER_SETTINGS if name not in reads)
        if not self.weight_decay:
            yield "decay_norms_and_biases", "weight_decay=0"
        if self.warmup_steps:
            yield "warmup_ratio", f"warmup_steps={self.warmup_steps}"

    def epochs_of(self, task: str) -> int:
        """Epochs of a phase by its name."""
        return self.epochs_by_task.get(task, self.epochs)

    def of_task(self, task: str) -> TrainConfig:
        """Return the settings of a phase by its name, with the learning rate that its optimizer gets."""
        rate = self.learning_rate_by_task.get(task, self.learning_rate)
        return self.model_copy(update={"learning_rate": rate})

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a task of `steps` steps."""
        return self.warmup_steps or int(steps * self.warmup_ratio)


class EngineConfig(Section):
    """Base of the engines' settings; `name` picks the engine."""

    name: str

    keeps_masters: ClassVar[bool] = True
    """Whether what was trained stays in float32 in the backbone between tasks, whatever that computes in."""


class TorchConfig(EngineConfig):
    """Plain PyTorch: gradients summed over workers at the step boundary."""

    name: Literal["torch"] = "torch"


class FSDPConfig(EngineConfig):
    """PyTorch's FSDP2: the model's layers are shared out over the workers from loading on, in evaluation too."""

    name: Literal["fsdp"] = "fsdp"


class DeepSpeedConfig(EngineConfig):
    """DeepSpeed ZeRO: optimizer state, gradients and parameters are sharded over the workers."""

    name: Literal["deepspeed"] = "deepspeed"
    keeps_masters: ClassVar[bool] = False
    zero_stage: int = Field(
        2, ge=0, le=3, description="0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters"
    )
    offload_optimizer: bool = Field(False, description="keep optimizer state in CPU memory (ZeRO 1-3)")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="merged into DeepSpeed's own config, and overrides it"
    )

    @model_validator(mode="after")
    def _offload_fits(self) -> DeepSpeedConfig:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("engine.offload_optimizer needs engine.zero_stage 1, 2 or 3, not 0")
        return self


class CheckpointConfig(Section):
    """Settings of writing checkpoints and model folders."""

    every_steps: int | None = Field(
        200, ge=1, description="optimizer steps between checkpoints; null: at task ends only"
    )
    keep: int = Field(2, ge=1, description="checkpoints that stay on storage")
    asynchronous: bool = Field(
        True,
        description="files of a checkpoint inside a task are written during the next step's forward and backward "
        "pass, which change nothing that is trained; the update waits for them. Nothing is copied",
    )
    export: Literal["last", "each", "none"] = Field(
        "last", description="tasks after which a model folder is written, by methods that train all weights"
    )

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect Without checkpoints inside tasks."""
        if self.every_steps is None:
            yield "asynchronous", "every_steps=null"


class BankConfig(Section):
    """The bank that adapters and snapshots are published to."""

    dir: PathOrUri = Field(None, description="folder or URI of a bank; null: bank/ in the run's folder")
    publish: bool = Field(True, description="publish adapters and a snapshot at the end of every task")
    copies: bool = Field(
        False,
        description="keep what is published in the run's folder too: a bank that lost tensors is completed from there "
        "when the run continues; false: checkpoints name the bank's tensors",
    )
    start: str | None = Field(
        None,
        description="BANK@REFERENCE: start from a snapshot (its branch, number or hash), whose config is taken over; "
        "stream.tasks names the tasks that are learned next; null: start from the backbone",
    )
    allow_storage: tuple[str, ...] = Field(
        (),
        description="addresses of storage (s3://BUCKET) at which the snapshot may name data, beside the bank's own",
    )
    revise: str | None = Field(
        None,
        description="with start: a learned task that is learned again, from the data that stream.tasks gives for it "
        "(null: the data that it had); its adapters get new versions, the old snapshot stays",
    )
    revise_from: Literal["previous", "new"] = Field(
        "previous", description="weights that revise begins with: those of the task's adapters, or new ones"
    )
    sample_days: int | None = Field(
        None,
        ge=1,
        description="days that stored inputs of users (pseudo-samples) stay in the bank: `bank.py prune` then removes "
        "them, and tasks without them are not reflected on; null: as long as a snapshot names them",
    )
    branch: BranchName = Field(MAIN, description="branch of the bank that snapshots go onto")

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings without effect where nothing goes, and how nothing is learned again."""
        if not self.start:
            yield from ((name, "start=null") for name in ("allow_storage", "revise"))
        if not self.revise:
            yield "revise_from", "revise=null"
        if not self.publish:
            yield from ((name, "publish=false") for name in ("dir", "branch", "copies", "sample_days"))
