"""Settings of the endpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from raycl import config as configs
from raycl.backbone.model_files import resolve_path
from raycl.bank.branches import MAIN, Branch, BranchName, is_branch_name, resolve
from raycl.config import Location, PathOrUri, Section, trust
from raycl.config.names import shown
from raycl.config.trust import Permissions, announce, check_no_secret
from raycl.config.unused import refuse, unused_written
from raycl.metrics.settings import GeneralConfig
from raycl.training.records.named_bank import bank_and_reference
from raycl.types import UnknownPolicy

log: logging.Logger = logging.getLogger(__name__)


class LimitsConfig(Section):
    """Limits of a request."""

    body_kb: int = Field(256, ge=1, description="KiB of a request's body at most; more: 413")
    text_chars: int = Field(32_768, ge=1, description="characters of one text at most; more: 400")
    prompt_tokens: int = Field(
        4096,
        ge=1,
        description="tokens of a completion's prompt at most, which is never cut; the backbone may hold less; "
        "more: 400",
    )
    inputs: int = Field(64, ge=1, description="answers per request at most: texts, times n")
    max_tokens: int = Field(512, ge=1, description="tokens of an answer at most")
    n: int = Field(8, ge=1, description="answers per prompt at most")
    queue: int = Field(256, ge=1, description="unfinished answers per replica at most; more: 429 with Retry-After")
    timeout_s: float = Field(60.0, gt=0, description="seconds for a request at most; longer: 504, for its body: 408")


Origin = Annotated[str, StringConstraints(pattern=r"^(\*|https?://[^/\s*]+)$")]
"""Scheme, host and port of a web page."""


class AuthConfig(Section):
    """API keys: one a line in a file, or separated by commas in RAYCL_API_KEYS; none: open, on loopback only.

    A line `admin:KEY` makes a key that may also activate snapshots; without such a key, snapshots are
    activated by `raycl serve activate` only.
    """

    keys_file: PathOrUri = Field(None, description="file with one API key per line; null: none")
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="origins of other web pages whose scripts may send requests (CORS): [https://app.example.org]; "
        "'*': all, only with API keys",
    )


class FollowConfig(Section):
    """Activation of new snapshots of the bank."""

    enabled: bool = Field(
        True, description="activate snapshots when they are published; false: only by POST /admin/activate"
    )
    poll_s: float = Field(0.5, gt=0, description="seconds between looks at the bank")
    gated: bool = Field(False, description="activate only what passes the gate, which runs while the endpoint answers")


class GateConfig(Section):
    """The gate that a snapshot must pass before it is activated: `raycl serve promote`, and following with
    `follow.gated`.

    Evaluating while the endpoint answers takes a second backbone, for which the gate reserves resources.
    """

    max_drop: float = Field(1.0, ge=0, description="points that a task may fall by against the active snapshot")
    max_general_drop: float | None = Field(
        None,
        ge=0,
        description="points that the mean score of `general` may fall by against the active snapshot; null: it is not "
        "measured",
    )
    general: GeneralConfig = GeneralConfig()
    split: Literal["dev", "test"] = Field("dev", description="rows that a snapshot is evaluated on")
    stream: tuple[str, ...] = Field(
        (), description="overrides of the stream that the snapshot was trained on, for data that has moved: root=..."
    )
    allow_storage: tuple[str, ...] = Field(
        (), description="addresses of storage (s3://BUCKET) at which snapshots may name data, other than the bank's own"
    )
    device: Literal["auto", "cpu", "cuda"] | None = Field(None, description="device of the gate; null: as the endpoint")
    gpus: float = Field(1.0, gt=0, le=1, description="share of a GPU that the gate reserves")
    report_after_s: float = Field(
        15.0, gt=0, description="seconds that an evaluation waits for its CPUs and GPUs before that is a problem"
    )
    timeout_s: float = Field(
        3600.0, gt=0, description="seconds for the evaluation of a snapshot at most; longer: it is tried again"
    )

    @model_validator(mode="after")
    def _general_tasks_are_named(self) -> GateConfig:
        if self.max_general_drop is not None and not self.general.tasks:
            raise ValueError(
                f"max_general_drop is {self.max_general_drop:g} and general.tasks names no task: name some, such as "
                "[arc, piqa], or leave it out"
            )
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield tasks of general ability where no drop of it is limited."""
        if self.max_general_drop is None:
            yield "general", "max_general_drop=null"


class UpstreamConfig(Section):
    """Another engine that answers, with the adapters of `raycl bank export --engine vllm`; what is here routes.

    A request for `auto` gets the name of the adapter that the router gives the largest weight.
    """

    url: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]",
        description="address of an OpenAI-compatible engine, http://127.0.0.1:8001; null: raycl answers itself",
    )
    export: PathOrUri = Field(
        None, description="folder or URI of the export; its snapshot routes, whatever is published later"
    )
    key_env: str = Field(
        "RAYCL_UPSTREAM_KEY", description="environment variable with the engine's API key; clients' keys stay here"
    )

    @model_validator(mode="after")
    def _url_is_no_secret(self) -> UpstreamConfig:
        check_no_secret(self.url or "")
        return self

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield all but the address, without one."""
        if self.url is None:
            yield from ((name, "url=null") for name in ("export", "key_env"))


OF_A_MODEL = (
    *("branch", "snapshot", "backbone", "device", "dtype", "gpus", "max_batch", "decoding"),
    *("labels", "max_loaded_rows", "prefix_cache_mb", "loaded_snapshots", "trust_remote_code", "follow", "gate"),
    *("examples", "keep_unsure"),
    *(f"limits.{name}" for name in ("prompt_tokens", "inputs", "max_tokens", "n")),
)
"""Settings without effect where another engine answers."""


class ServeConfig(Section):
    """The endpoint of one bank."""

    bank: Location = Field(description="folder or URI of the bank, or of the run that publishes to it")
    branch: BranchName = Field(
        MAIN,
        description="branch of the bank whose snapshots are followed; of a run's bank, the run's branch is the default",
    )
    snapshot: int | None = Field(None, ge=1, description="snapshot that answers first; null: the branch's newest")
    backbone: Annotated[str, AfterValidator(resolve_path)] | None = Field(
        None, description="where the backbone is now, if it moved after training"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="device of the model; auto: a GPU for each replica if the deploying process sees one, and a "
        "gate then runs on CPUs",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="computing precision of the backbone; auto: as in its run; bfloat16 makes CPUs that support "
        "it (AVX-512 BF16, AMX) more than twice as fast, and close decisions may differ",
    )
    host: str = Field("127.0.0.1", description="address that the endpoint listens on")
    port: int = Field(8000, ge=0, le=65535, description="port that the endpoint listens on")
    ingress: Literal["auto", "proxy", "direct"] = Field(
        "auto",
        description="what listens on host:port. proxy: Ray Serve's proxy on every node, in front of replicas "
        "anywhere; direct: the replicas themselves, on one machine, which is much faster for small "
        "models; auto: direct if raycl serve starts Ray here for one replica, else proxy, which "
        "balances by load",
    )
    route_prefix: str = Field(
        "/",
        pattern=r"^/([\w.-]+(/[\w.-]+)*)?$",
        description="path of the endpoint behind Ray Serve's proxy, for several endpoints of one cluster: /news",
    )
    replicas: int = Field(1, ge=1, description="replicas of the model; with max_replicas: the least number")
    max_replicas: int | None = Field(None, ge=1, description="largest number of replicas; null: as many as replicas")
    threads: int = Field(1, ge=1, description="torch threads of a replica on CPU")
    cpus: float | None = Field(None, ge=0, description="CPUs that a replica reserves in the cluster; null: its threads")
    gpus: float = Field(
        1.0, gt=0, le=1, description="share of a GPU that a replica reserves; with 0.5, two may share one"
    )
    wait_for_nodes: bool = Field(
        False, description="wait for replicas that the cluster cannot hold yet, because it grows"
    )
    unknown: UnknownPolicy | None = Field(
        None,
        description="texts of no learned task. nearest: answered as all others; bare: by the backbone without "
        "adapters; refuse: with an error, 422; null: as the run that made the snapshot was evaluated (eval.unknown)",
    )
    false_alarms: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="largest share of texts of the learned tasks that may count as unknown; the threshold follows from "
        "their dev rows; null: as that run was evaluated (eval.false_alarms)",
    )
    max_batch: int = Field(32, ge=1, description="rows computed together")
    decoding: Literal["auto", "dynamic", "static"] = Field(
        "auto",
        description="KV caches of texts. static: a fixed shape for max_batch rows, on GPUs one CUDA graph per "
        "step (decoder-only backbones); dynamic: caches that grow and shrink; auto: static on GPUs "
        "where possible",
    )
    labels: Literal["all", "task"] = Field(
        "all",
        description="answers of tasks with labels, where the backbone writes them. all: any text; task: the labels of "
        "the task whose prompt a text gets, as with eval.labels=task",
    )
    max_loaded_rows: int | None = Field(None, ge=1, description="ranks of adapters on the device; null: no limit")
    prefix_cache_mb: int = Field(
        256,
        ge=0,
        description="MiB on the device for keys and values of the beginnings of prompts, such as system messages, "
        "which later prompts under the same mixture do not compute again (decoder-only backbones); 0: none",
    )
    loaded_snapshots: int = Field(3, ge=1, description="snapshots kept ready for rollback and pinned requests")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the backbone; only the command line may set it"
    )
    allow_pickle: bool = Field(
        False,
        description="accept weights of the backbone and the sentence encoder that are pickles, which can run code; "
        "only the command line may set it",
    )
    model_aliases: dict[str, str] = Field(
        {},
        description="names that clients give as model -> the model that answers: {gpt-4o: auto}; they are listed too",
    )
    examples: int | None = Field(
        None,
        ge=0,
        le=10,
        description="test rows of each task that the playground offers as examples, where its data can be read here; "
        "null: 2 without API keys, when only this machine is answered, else 0",
    )
    keep_unsure: int = Field(
        0,
        ge=0,
        le=1000,
        description="texts of requests that each replica keeps in memory, those farthest from all learned tasks, as "
        "candidates for the next task: GET /admin/unsure and the page of metrics show them; 0: none",
    )
    log_prompts: bool = Field(False, description="write inputs into the log")
    access_log: bool = Field(
        False,
        description="a line in Serve's log for every request, which costs a tenth of its time; at the start Serve's "
        "lines are shown too",
    )
    limits: LimitsConfig = LimitsConfig()
    auth: AuthConfig = AuthConfig()
    follow: FollowConfig = FollowConfig()
    gate: GateConfig = GateConfig()
    upstream: UpstreamConfig = UpstreamConfig()

    def model_of(self, name: str) -> str:
        """Return the model that a client's name for it stands for; other names as they are."""
        return self.model_aliases.get(name, name)

    @property
    def permissions(self) -> Permissions:
        """The code that the bank's author may run here."""
        return Permissions(self.trust_remote_code, self.allow_pickle)

    @property
    def reserved(self) -> float:
        """CPUs of one replica."""
        return float(self.threads) if self.cpus is None else self.cpus

    @property
    def scales(self) -> bool:
        """Return whether the number of replicas follows the load."""
        return self.max_replicas is not None and self.max_replicas != self.replicas

    @property
    def gates(self) -> int:
        """The number of gates: 1 for following with a gate, else 0."""
        return int(self.follow.enabled and self.follow.gated and not self.forwards)

    @property
    def forwards(self) -> bool:
        """Return whether another engine answers."""
        return self.upstream.url is not None

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of an ingress or a way of following that is not chosen."""
        if self.ingress == "direct":
            yield "route_prefix", "ingress=direct"
        if self.forwards:
            yield from ((name, "upstream.url") for name in OF_A_MODEL)
        elif not self.follow.enabled:
            yield "follow.gated", "follow.enabled=false"

    @model_validator(mode="after")
    def _aliases_are_no_models(self) -> ServeConfig:
        taken = [name for name in self.model_aliases if name in ("auto", "base") or name.startswith("snapshot:")]
        if taken:
            raise ValueError(f"model_aliases names '{taken[0]}', which is a model itself: expected another name")
        return self

    @model_validator(mode="after")
    def _export_is_named(self) -> ServeConfig:
        if self.forwards and self.upstream.export is None:
            raise ValueError(
                "upstream.url is set and upstream.export is not: name the folder that "
                "`raycl bank export --engine vllm` wrote"
            )
        return self

    @model_validator(mode="after")
    def _replicas_fit(self) -> ServeConfig:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below replicas={self.replicas}: raise it")
        if self.ingress == "direct" and self.scales:
            raise ValueError(
                "ingress=direct hides requests from Ray Serve, which scales by them: drop max_replicas, set replicas, "
                "or use ingress=proxy"
            )
        return self


def at_bank(config: ServeConfig) -> ServeConfig:
    """Return the config with the bank and the branch or snapshot that `bank` means.

    A run means its bank and the branch that it publishes to. BANK@REF means a branch, which is followed, or a snapshot,
    which answers whatever is published later.

    Raises:
        BankError: there is no such bank or snapshot.
    """
    bank, reference = bank_and_reference(config.bank)
    update: dict[str, object] = {"bank": bank.storage.address}
    if "branch" not in config.model_fields_set and is_branch_name(reference) and Branch(bank, reference).last():
        update["branch"] = reference
    elif "branch" not in config.model_fields_set:
        update["snapshot"] = resolve(bank, reference).number
        update["follow"] = FollowConfig(enabled=False)
    return config.model_copy(update=update)


def load_serve_config(path: str | None, overrides: Sequence[str]) -> ServeConfig:
    """Return the validated tree from a file and overrides.

    Raises:
        ConfigError: see `raycl.config.load`; or the file sets what only the command may allow (`config.trust`).
    """
    config = configs.load(ServeConfig, path, overrides)
    tree = configs.as_tree(config)
    for origin in tree["auth"].pop("allowed_origins"):
        log.warning("web pages of %s may send requests (auth.allowed_origins)", shown(origin))
    announce(tree, config.bank)
    source = "the config" if path is None else f"config file '{path}'"
    trust.require(trust.requested(configs.as_tree(config)), overrides, source)
    refuse(unused_written(path, overrides, config, lambda: configs.load(ServeConfig, path)), source)
    return config
