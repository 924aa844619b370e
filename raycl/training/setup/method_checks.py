"""Checks before any work that a run's method, engine and backbone work together."""

import logging
import math
from collections.abc import Iterator, Sequence

from raycl import config as configs
from raycl.backbone import Backbone
from raycl.backbone.linears import check_quantization
from raycl.backbone.roles import GROUPS, ROLES, without_role
from raycl.config.unused import covering, unused_in
from raycl.data.prompts import Prompt
from raycl.data.stream import Stream
from raycl.errors import ConfigError
from raycl.generation.grammars import Grammars, forms_of
from raycl.methods.base import Method
from raycl.methods.lora_settings import LoraSettings
from raycl.methods.registry import METHODS, method_class, method_config, modifier_class
from raycl.routing.statistics import KEPT
from raycl.training.definition.settings import DeepSpeedConfig, FSDPConfig
from raycl.training.optimizers.registry import optimizer_class, optimizer_names
from raycl.training.setup.run_config import RunConfig
from raycl.types import Task, TextCodec

log: logging.Logger = logging.getLogger("raycl")

WHOLE_WEIGHTS = "use engine=torch, or engine=deepspeed with zero_stage 0, 1 or 2"
"""What to do where each worker needs whole weights."""


def check_engine(config: RunConfig) -> None:
    """Refuse engines that cannot train this run.

    ZeRO 0 in bfloat16 trains without float32 masters (observed: other losses, resume not exact). ZeRO 3 shards the
    parameters, so that a method cannot compute gradients of its own, or outputs with other parameters; so does fsdp, in
    evaluation and between tasks too.

    Raises:
        ConfigError: one of these combinations.
    """
    engine = config.engine
    if isinstance(engine, DeepSpeedConfig | FSDPConfig) and not optimizer_class(config.train.optimizer).elementwise:
        able = " or ".join(name for name in optimizer_names() if optimizer_class(name).elementwise)
        raise ConfigError(
            f"train.optimizer={config.train.optimizer} updates whole parameters, which engine={engine.name} shares "
            f"out: expected {able}, or engine=torch"
        )
    for whole in _needs_whole_weights(config) if engine.sharding else ():
        raise ConfigError(f"{whole}, which {engine.sharding} does not support: {WHOLE_WEIGHTS}")
    if isinstance(engine, FSDPConfig) and config.method.generates_samples:
        raise ConfigError(
            f"method '{config.method.name}' generates pseudo-samples, for which each worker runs as many passes as its "
            "texts need, and with engine=fsdp all workers must run equally many: use engine=torch, or a source of "
            "pseudo-samples other than generated"
        )
    if isinstance(engine, DeepSpeedConfig) and engine.zero_stage == 0 and config.backbone.dtype == "bfloat16":
        raise ConfigError(
            "engine.zero_stage=0 with backbone.dtype=bfloat16 keeps no float32 copy of trained weights: "
            "use zero_stage 1, 2 or 3, or engine=torch"
        )


def _needs_whole_weights(config: RunConfig) -> Iterator[str]:
    """Yield what of a run's method and modifiers needs whole weights on every worker while it trains."""
    for name, method in _methods(config).items():
        if method.computes_gradients:
            yield f"method '{name}' computes gradients of its own"
        elif method.replaces_parameters:
            yield f"method '{name}' computes outputs with earlier parameters"
    for name in config.modifiers:
        if modifier_class(name).computes_gradients:
            yield f"modifiers.{name} computes gradients of its own"
    learner = config.method.innermost
    if learner.reads_weights:
        is_chosen = isinstance(learner, LoraSettings) and learner.reads_chosen_weights
        reason = " (use_dora, init_lora_weights, target_parameters)" if is_chosen else ""
        yield f"method '{config.method.name}' reads the backbone's weights{reason}"


def check_parallel(config: RunConfig, method: Method) -> None:
    """Refuse to learn tasks at the same time where one depends on another.

    Raises:
        ConfigError: the method or its settings couple tasks, a modifier does, or a schedule has other phases.
    """
    if config.launch.parallel_tasks == 1:
        return
    reason = ""
    if config.stream.schedule != "sequential":
        reason = f"stream.schedule={config.stream.schedule} has phases of another kind"
    elif config.modifiers:
        reason = f"modifier '{next(iter(config.modifiers))}' keeps what it has seen of earlier tasks"
    elif not config.method.independent_tasks or method.join_task is None:
        reason = f"with method '{config.method.name}' and these settings a task depends on the tasks before it"
    if reason:
        able = " or ".join(name for name in METHODS if method_config({"name": name}).independent_tasks)
        raise ConfigError(
            f"launch.parallel_tasks={config.launch.parallel_tasks} learns tasks at the same time, but {reason}: "
            f"expected launch.parallel_tasks=1, or method {able} with its default settings and without modifiers"
        )


def _methods(config: RunConfig) -> dict[str, type[Method]]:
    """Return the method and, where it is put around another, that one."""
    return {name: method_class(name) for name in (config.method.name, config.method.innermost.name)}


def check_optimizer(config: RunConfig) -> None:
    """Check the optimizer: its package, and weight decay, which moves weights whose gradient is zero.

    Raises:
        ConfigError: the package is missing, or the method holds such weights where they are.
    """
    optimizer_class(config.train.optimizer).check("")
    holding = [name for name, method in _methods(config).items() if method.holds_weights]
    if config.train.weight_decay and holding:
        raise ConfigError(
            f"train.weight_decay is {config.train.weight_decay:g}, and method '{holding[0]}' keeps weights "
            "of earlier tasks by gradients of zero, so decay would move them: set train.weight_decay to 0"
        )


def check_dropout(config: RunConfig) -> None:
    """Check dropout, since some methods compare passes that differ by dropout alone.

    Raises:
        ConfigError: there is none.
    """
    if config.method.needs_dropout and not config.backbone.dropout:
        raise ConfigError(
            f"method '{config.method.name}' compares passes with dropout to measure general knowledge, and "
            "backbone.dropout is 0: set it to 0.1, or method.general to false"
        )


def check_quantized(config: RunConfig, method: Method) -> None:
    """Quantized weights are frozen, and each worker has all of them.

    Raises:
        ConfigError: the method trains the backbone's weights, or the engine shards them. BackboneError: the library
            that quantizes is missing.
    """
    chosen = config.backbone.quantization
    check_quantization(chosen)
    if chosen == "none":
        return
    if method.trains_backbone:
        raise ConfigError(
            f"backbone.quantization={chosen} keeps the backbone's weights frozen, and method '{config.method.name}' "
            "trains them: use a method that trains adapters, such as lora, or backbone.quantization=none"
        )
    if sharding := config.engine.sharding:
        raise ConfigError(
            f"{sharding} shards the backbone's weights, which backbone.quantization={chosen} does not support: use "
            "engine=torch, engine=deepspeed with zero_stage 0, 1 or 2, or backbone.quantization=none"
        )


def check_adaptation(config: RunConfig, method: Method) -> None:
    """Check adaptation: weights adapted to each text must be complete on every worker, and are not published.

    Raises:
        ConfigError: the engine shards the weights, or a bank is named to publish to.
    """
    if method.local_adaptation is None:
        return
    name = config.method.name
    if sharding := config.engine.sharding:
        raise ConfigError(
            f"method '{name}' adapts weights to each text that is evaluated, for which each worker needs all of them, "
            f"and {sharding} shares them out: {WHOLE_WEIGHTS}"
        )
    if config.bank.publish and config.bank.dir:
        raise ConfigError(
            f"bank.dir is '{config.bank.dir}', but method '{name}' publishes nothing, since what trains while it "
            "answers cannot be served as measured: leave bank.dir out"
        )


def check_packing(config: RunConfig, method: Method) -> None:
    """Several examples share a row only where each is a text of its own in it.

    Raises:
        ConfigError: the backbone has other rows, or soft prompts stand in front of texts.
    """
    if not config.train.packing:
        return
    if not method.backbone.capabilities.one_sequence:
        raise ConfigError(
            f"train.packing is true, but backbone '{config.backbone.name}' is not decoder-only, and only such models "
            "read prompt and answer as one text: set train.packing to false (train.group_by_length pads less)"
        )
    if method.backbone.prefix is not None or method.backbone.suffix is not None:
        raise ConfigError(
            f"train.packing is true, but method '{config.method.name}' learns soft prompts, which stand beside "
            "every text and have no place inside a row: set train.packing to false, or use another method.value"
        )


def check_prompt_positions(config: RunConfig, backbone: Backbone, tasks: int) -> None:
    """Soft prompts take positions beside the text.

    Args:
        tasks: tasks of the run.

    Raises:
        ConfigError: the backbone has too few for both.
    """
    prompts, limit = config.method.prompt_positions(tasks), backbone.max_positions
    stream, one_sequence = config.stream, backbone.capabilities.one_sequence
    source, target = stream.token_limits
    texts = source + (target if one_sequence else 0)
    if limit is not None and prompts and texts + prompts > limit:
        answer = f" + max_target_tokens {target}" if one_sequence else ""
        raise ConfigError(
            f"method '{config.method.name}' puts up to {prompts} positions of soft prompts beside a text, and with "
            f"stream.max_source_tokens {source}{answer} that is more than the {limit} positions of "
            "this backbone: lower it, or use shorter or fewer prompts"
        )


def check_compiled(config: RunConfig, method: Method) -> None:
    """torch.compile pays where each step computes the same in the layers, and has been tried.

    Raises:
        ConfigError: something else is in them.
    """
    if not config.train.compile:
        return
    reason = ""
    if not method.backbone.capabilities.one_sequence:
        reason = f"backbone '{config.backbone.name}' is not decoder-only"
    elif not method.compiles:
        reason = f"method '{config.method.name}' changes what layers compute from batch to batch or task to task"
    elif config.modifiers:
        reason = f"modifier '{next(iter(config.modifiers))}' observes the outputs of layers"
    elif config.engine.name != "torch":
        reason = f"engine={config.engine.name} gathers and sums in the layers"
    elif config.backbone.gradient_checkpointing:
        reason = "backbone.gradient_checkpointing runs layers twice"
    elif config.backbone.quantization != "none":
        reason = f"backbone.quantization={config.backbone.quantization} has linears of its own"
    if reason:
        raise ConfigError(f"train.compile is true, but {reason}: set train.compile to false")


def check_roles(config: RunConfig, backbone: Backbone) -> None:
    """Say once which linears settings by role leave out, where an architecture has linears that no role names."""
    leaves = configs.flatten(
        {"method": configs.as_tree(config.method), "modifiers": configs.as_tree(config)["modifiers"]}
    )
    unused = unused_in(config.method, "method.")
    lists = [value for path, value in leaves.items() if isinstance(value, list | tuple) and not covering(path, unused)]
    given = {str(role) for value in lists for role in value} & {*ROLES, *GROUPS}
    roles = sorted(given | {*config.method.fixed_roles})
    left = without_role(backbone.model) if roles else []
    if left:
        log.warning(
            "%s has linears that no role names, so %s do not select them: %s; where settings choose linears, "
            "regular expressions name these too, and target_parameters of method 'lora' experts that share a tensor",
            type(backbone.model).__name__,
            ", ".join(roles),
            ", ".join(left),
        )


def check_language_head(method: Method) -> None:
    """Adapters are learned beside a language head, which stays as it is: a new one would stay at random.

    Raises:
        ConfigError: the backbone came without one.
    """
    backbone = method.backbone
    if backbone.has_untrained_language_head and not method.trains_backbone:
        raise ConfigError(
            f"stream.objective is mlm and method '{method.config.name}' trains adapters alone, but the backbone has no "
            "language head: use method=finetune, or name as backbone what such a run left (RUN/learned/...) or a "
            "checkpoint with that head"
        )


def check_objective(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Check the objective: some methods learn answers alone, others texts alone.

    Raises:
        ConfigError: the stream has tasks of the other sort.
    """
    for task in tasks:
        if task.objective == "answer" and not config.method.fine_tunes:
            raise ConfigError(
                f"method '{config.method.name}' learns texts themselves, but task '{task.name}' has answers: set "
                "stream.objective to mlm or clm, or use another method"
            )
        if task.objective != "answer" and not config.method.pre_trains:
            raise ConfigError(
                f"method '{config.method.name}' learns answers, but stream.objective is {task.objective}, and task "
                f"'{task.name}' has none: set stream.objective to answer, or use another method, such as lora"
            )


def check_unknown(config: RunConfig, codec: TextCodec) -> None:
    """Check `eval.unknown`, which needs a router that knows its tasks' texts.

    Raises:
        ConfigError: it is bare or refuse, and the backbone or the method cannot follow it.
    """
    policy = config.eval.unknown
    if policy == "nearest":
        return
    if policy == "bare" and codec.needs_labels:
        raise ConfigError(
            f"eval.unknown=bare: backbone '{config.backbone.name}' is encoder-only and has no labels without adapters: "
            "use nearest or refuse"
        )
    if not config.method.knows_texts or config.stream.schedule == "separate":
        raise ConfigError(
            f"eval.unknown={policy}: method '{config.method.name}' under stream.schedule={config.stream.schedule} "
            "publishes no statistics of its tasks' texts, with which a text of none of them would be found: use "
            "nearest, or a method whose router chooses by the text, such as slm or sapt"
        )


def check_false_alarms(config: RunConfig, stream: Stream) -> None:
    """Check `eval.false_alarms`, which needs dev rows of the first task where `eval.unknown` is bare or refuse.

    Raises:
        ConfigError: there are too few.
    """
    if config.eval.unknown == "nearest":
        return
    first = stream.tasks[0]
    tasks = stream.tasks if config.stream.schedule == "joint" else (first,)
    kept = sum(min(KEPT, len(stream.rows(task, "dev"))) for task in tasks if stream.has_data(task))
    least = math.ceil(1 / config.eval.false_alarms - 1e-9) - 1
    if kept < least:
        raise ConfigError(
            f"eval.false_alarms={config.eval.false_alarms:g} takes {least} dev rows of the first task, and "
            f"'{first.name}' has {kept}: raise it, or set aside more dev rows (stream.dev_rows, stream.dev_fraction)"
        )


def check_forms(config: RunConfig, backbone: Backbone, tasks: Sequence[Task]) -> None:
    """Check `eval.response_format`, which needs answers that are written, and forms that llguidance reads.

    Raises:
        ConfigError: the backbone has label heads, or texts themselves are learned; llguidance is not installed or reads
            no such tokenizer; one is no form.
    """
    formats = config.eval.response_format
    if not formats:
        return
    if backbone.capabilities.answers == "label":
        raise ConfigError(
            f"eval.response_format names {', '.join(formats)}, but backbone '{config.backbone.name}' is encoder-only "
            "and answers with labels: leave it out, or use a backbone that writes its answers"
        )
    if any(task.objective != "answer" for task in tasks):
        raise ConfigError(
            f"eval.response_format names {', '.join(formats)}, but stream.objective is {config.stream.objective}, "
            "under which no answers are written: leave it out"
        )
    forms_of(Grammars(backbone.codec.tokenizer, backbone.end_ids), formats)


def check_chosen(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Check `eval.instruction=chosen`, which needs a published router that chooses a text's prompt.

    Args:
        prompts: prompts of the tasks.

    Raises:
        ConfigError: `eval.instruction=chosen`, and there is none.
    """
    if config.eval.instruction == "given" or len(set(prompts)) < 2:
        return
    if not config.method.chooses_task or config.stream.schedule != "sequential":
        what = f"stream.schedule={config.stream.schedule}"
        what = f"method '{config.method.name}'" if config.stream.schedule == "sequential" else what
        raise ConfigError(
            f"eval.instruction=chosen, the tasks have different prompts, and with {what} no router chooses among them "
            "by the text alone: use eval.instruction=given, or a method with a router, such as slm or sapt"
        )
    if not config.bank.publish:
        raise ConfigError(
            "eval.instruction=chosen asks the router that each task publishes, and bank.publish=false publishes none: "
            "leave bank.publish at true, or use eval.instruction=given"
        )
