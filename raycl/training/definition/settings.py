"""Settings of engines, checkpoints, the bank, workers and folders, and which ones change nothing that is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from raycl.bank.branches import MAIN, BranchName
from raycl.config import PathOrUri, Section
from raycl.config.names import FolderName

EXEMPT = (
    *("launch", "tracking", "output", "bank.dir", "bank.publish", "bank.branch", "bank.sample_days", "bank.copies"),
    "bank.allow_storage",
    *("eval.other_row", "checkpoint.asynchronous", "stream.on_bad_row"),
)
"""Settings that cannot change what a run learns; they may differ on resume and are not in the fingerprint. (A task that
was read without unusable rows is the same with `on_bad_row=skip`; rows have fingerprints of their own.)"""


class EngineConfig(Section):
    """Base of the engines' settings; `name` picks the engine."""

    name: str

    keeps_masters: ClassVar[bool] = True
    """True if trained weights stay in float32 between tasks, whatever dtype the backbone computes in."""

    @property
    def sharding(self) -> str:
        """The setting by which no worker has whole weights while it trains; "": each has them."""
        return ""


class TorchConfig(EngineConfig):
    """Plain PyTorch: gradients summed over workers at the step boundary."""

    name: Literal["torch"] = "torch"


class FSDPConfig(EngineConfig):
    """PyTorch's FSDP2: the model's layers are shared out over the workers from loading on, in evaluation too."""

    name: Literal["fsdp"] = "fsdp"

    @property
    def sharding(self) -> str:
        """Layers are shared out, in evaluation too."""
        return "engine=fsdp"


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

    @property
    def sharding(self) -> str:
        """ZeRO 3 shares out parameters."""
        return "engine.zero_stage=3" if self.zero_stage == 3 else ""

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


class LaunchConfig(Section):
    """Workers, and the Ray cluster that they run on."""

    mode: Literal["ray", "local"] = Field(
        "ray",
        description="ray: workers of Ray Train; local: this process is the only worker, without Ray: it starts in "
        "seconds, and a debugger stops in it. Tasks that are learned at the same time (parallel_tasks) are learned in "
        "processes that it starts",
    )
    workers: int = Field(1, ge=1, description="processes that train together")
    parallel_tasks: int = Field(
        1,
        ge=1,
        description="tasks that are learned at the same time, each by worker groups of its own, by methods whose tasks "
        "do not depend on each other; they are joined in the stream's order, and the results are those of one task "
        "after another. 1: one after another",
    )
    cpus_per_worker: float | None = Field(
        None, gt=0, description="CPUs of a worker; null: the cluster's CPUs shared evenly by all workers"
    )
    gpus_per_worker: float | None = Field(
        None, ge=0, description="GPUs of a worker; null: 1 if the cluster has one for each worker"
    )
    address: str | None = Field(None, description="Ray cluster to join; null: $RAY_ADDRESS, else one is started here")
    max_failures: int = Field(3, ge=-1, description="restarts of the worker group after crashes; -1: no limit")
    wait_for_nodes: bool = Field(
        False, description="wait for workers that the cluster cannot hold yet, because it grows"
    )
    grace_s: float = Field(
        110.0,
        ge=0,
        description="seconds after SIGTERM or Ctrl-C in which workers may write a checkpoint, before the command ends",
    )
    hang_s: float | None = Field(
        None,
        gt=0,
        description="a worker that makes no progress for so many seconds is ended, and the group starts again; null: "
        "never. Longer than its longest step: an optimizer step, the evaluation of one task, preparing one",
    )

    @property
    def at_once(self) -> int:
        """Return the number of workers that a run has at the same time, in all its groups."""
        return self.workers * self.parallel_tasks

    @model_validator(mode="after")
    def _one_worker_in_this_process(self) -> Self:
        if self.mode == "local" and self.workers > 1:
            raise ValueError(
                f"launch.workers is {self.workers}, and with launch.mode=local this process is the only worker: set "
                "launch.workers to 1, or launch.mode to ray"
            )
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield what is about Ray, and about other processes, in a run of this process alone."""
        if self.mode == "local":
            names = ("address", "max_failures", "wait_for_nodes", "hang_s")
            yield from ((name, "mode=local") for name in names)


class OutputConfig(Section):
    """The folder of the run."""

    dir: str | None = Field(
        None,
        description="folder or s3:// URI that every worker reaches; null: $RAYCL_RUNS, else ~/raycl-runs in a "
        "submitted job (whose own folder is temporary), else ./runs",
    )
    name: FolderName | None = Field(
        None,
        description="folder of this run, a plain name in any script; null: $RAYCL_RUN_NAME, else made from stream, "
        "backbone, method, seed",
    )
    retry_s: float = Field(
        180.0, ge=0, description="seconds for which operations of a store that does not answer are retried"
    )
    exists: str = Field(
        "error",
        pattern="^(error|resume)$",
        description="what happens if the run is there already. error: stop; resume: continue it",
    )
