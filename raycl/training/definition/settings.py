"""Settings of engines, checkpoints and the bank, and which settings change nothing that is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from raycl.bank.branches import MAIN, BranchName
from raycl.config import PathOrUri, Section

EXEMPT = (
    *("launch", "tracking", "output", "bank.dir", "bank.publish", "bank.branch", "bank.sample_days", "bank.copies"),
    "bank.allow_storage",
    *("eval.other_row", "checkpoint.asynchronous"),
)
"""Settings that cannot change what a run learns; they may differ on resume and are not in the fingerprint."""


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
        description="BANK@REF: start from a snapshot (its branch, number or hash), whose config is taken over; "
        "stream.tasks names the tasks that are learned next; null: start from the backbone",
    )
    allow_storage: tuple[str, ...] = Field(
        (),
        description="addresses of storage (s3://BUCKET) at which the snapshot may name data, other than the bank's own",
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
