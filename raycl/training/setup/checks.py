"""Checks of a run's config before any worker starts.

Does not depend on Ray.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from raycl import config as configs
from raycl.backbone import Backbone, load_codec, load_skeleton
from raycl.bank import Bank
from raycl.bank.branches import Branch
from raycl.config import Tree
from raycl.data.lengths import lines_of_cuts
from raycl.data.loader import GlobalOrder, check_batch
from raycl.data.mistakes import MOST_COMPARED, mistakes_of
from raycl.data.prepare import MIN_TEXT_TOKENS
from raycl.data.settings import USUAL_LENGTHS
from raycl.data.stream import Stream, open_stream
from raycl.errors import ConfigError, ResumeError, RunError, some
from raycl.methods.base import Method
from raycl.methods.modifier import Modifiers
from raycl.methods.registry import method_class, modifier_class
from raycl.metrics.per_example import check_labels, check_metric, taken_for_same
from raycl.metrics.run_results import finished_results
from raycl.scoring.general_ability import check_general
from raycl.training.definition.settings import DeepSpeedConfig
from raycl.training.definition.task_order import SCHEDULES, epochs_of
from raycl.training.optimizers.settings import USUAL_EPOCHS
from raycl.training.records.bank_start import check_snapshot_inputs
from raycl.training.records.named_bank import snapshot_at
from raycl.training.setup.fingerprints import inputs_of
from raycl.training.setup.lengths import with_lengths
from raycl.training.setup.method_checks import (
    check_adaptation,
    check_chosen,
    check_compiled,
    check_dropout,
    check_engine,
    check_false_alarms,
    check_forms,
    check_objective,
    check_optimizer,
    check_packing,
    check_parallel,
    check_prompt_positions,
    check_quantized,
    check_roles,
    check_unknown,
)
from raycl.training.setup.run_config import RunConfig
from raycl.training.setup.snapshot_start import BY_LEARNED_TASK, BY_TASK, LIMITS
from raycl.types import Phase, Task, TextCodec

PER_LABEL, PER_TASK = 5, 20
"""Stored samples of a label, or of a task without labels, below which little of a task is kept."""

log: logging.Logger = logging.getLogger(__name__)

data_log: logging.Logger = logging.getLogger(f"{__name__}.data")
"""Lines about rows, which are equal for runs of the same data."""


def check(config: RunConfig) -> Stream:
    """Check everything that can be known before any worker starts; return the stream, read and validated, with its
    token lengths.

    Raises:
        RayclError: the first thing that is wrong.
    """
    codec = load_codec(config.backbone, 8, 2)  # their limits may follow from the data
    skeleton = load_skeleton(config.backbone, codec)
    method = check_settings(config, skeleton)
    config, stream = with_lengths(config, open_stream(config.stream, config.seed), skeleton)
    check_stream(config, stream, method)
    for line in _own_tasks(config, stream, codec):
        log.info("%s", line)
    for line in (*_warmup(config, stream, codec), *_samples(config, stream), *_epochs(config, stream, codec)):
        log.warning("%s", line)
    return stream


def check_settings(config: RunConfig, backbone: Backbone) -> Method:
    """Check what needs no data, settings against one another and against the backbone; return the method on it.

    Args:
        backbone: on the meta device; it is changed.

    Raises:
        RayclError: the first thing that is wrong.
    """
    check_engine(config)
    check_optimizer(config)
    check_dropout(config)
    if config.train.label_loss != "seen" and not backbone.codec.needs_labels:
        raise ConfigError(
            f"train.label_loss is '{config.train.label_loss}', but backbone '{config.backbone.name}' writes its "
            "answers and has no label head: leave it at seen, or use an encoder-only backbone"
        )
    workers = config.launch.workers
    check_batch(config.train.batch_size, config.train.examples_per_pass(workers), workers)
    if config.backbone.attention != "auto":
        backbone.use_attention(config.backbone.attention)
    check_roles(config, backbone)
    backbone.packs = config.train.packing
    method = method_class(config.method.name)(config.method, backbone, config.seed)
    SCHEDULES[config.stream.schedule]().attach(method, backbone)
    check_parallel(config, method)
    check_quantized(config, method)
    check_adaptation(config, method)
    make_modifiers(config, method)
    check_packing(config, method)
    check_compiled(config, method)
    check_unknown(config, backbone.codec)
    return method


def check_stream(config: RunConfig, stream: Stream, method: Method) -> None:
    """Check the tasks and their rows against the settings and the backbone's tokenizer.

    Raises:
        RayclError: the first thing that is wrong.
    """
    backbone, codec = method.backbone, method.backbone.codec
    method.check(stream.tasks)
    check_prompt_positions(config, backbone, len(stream.tasks))
    check_objective(config, stream.tasks)
    check_data(config, stream)
    check_selection(config, stream)
    check_unseen(config, stream, codec)
    check_general(config.eval.general, codec, config.backbone.name)
    check_false_alarms(config, stream)
    check_forms(config, backbone, stream.tasks)
    check_chosen(config, [stream.prompt(task, codec) for task in stream.tasks])
    check_instructions(config, stream, codec)
    for task in (*stream.tasks, *stream.unseen):
        check_scoring(task)
        if task.objective == "answer":
            same = taken_for_same(task.labels or ()) if task.metric == "exact_match" else None
            if same:
                data_log.info(
                    "task '%s': answers are compared as they are, since '%s' and '%s' are equal without case and "
                    "punctuation",
                    *(task.name, *same),
                )
    own = (f"method.{path}" for path in config.method.settings_by_task())
    _check_names(config, (*BY_LEARNED_TASK, *own), stream.tasks)
    _check_names(config, BY_TASK, (*stream.tasks, *stream.unseen))


def check_scoring(task: Task) -> None:
    """Check that the task's metric exists and fits its labels.

    Raises:
        ConfigError: it does not.
    """
    if task.objective == "answer":
        check_metric(task.metric)
        check_labels(task.metric, task.name, task.labels)


def _check_names(config: RunConfig, settings: Iterable[str], tasks: Sequence[Task]) -> None:
    names = [task.name for task in tasks]
    for setting in settings:
        if unknown := set(attrgetter(setting)(config)) - set(names):
            listed = ", ".join(names)
            raise ConfigError(f"{setting} names {sorted(unknown)}, which the stream lacks: expected some of {listed}")


def check_instructions(config: RunConfig, stream: Stream, codec: TextCodec) -> None:
    """Check that prompts have the instructions that a generator writes, and room for inputs after them.

    Raises:
        ConfigError: no task's prompt has one, or an instruction is as long as what is written.
    """
    generator = config.method.sample_generator
    if generator is None or generator.writes == "input":
        return
    instructions = {task.name: stream.instruction(task, codec) for task in stream.tasks}
    if not any(instructions.values()):
        raise ConfigError(
            "method.generator.writes=instruction_and_input, but no task has an instruction in its prompt: choose a "
            "prompt that has (stream.prompt=superni or long), or method.generator.writes=input"
        )
    reads = codec if generator.backbone is None else load_codec(generator.backbone, 1, 1)
    for name, instruction in instructions.items():
        needed = len(reads.encode_target([instruction])[0]) + MIN_TEXT_TOKENS
        if instruction and needed > generator.max_tokens:
            raise ConfigError(
                f"the instruction of task '{name}' leaves no room for an input in method.generator.max_tokens="
                f"{generator.max_tokens}: expected at least {needed}, or method.generator.writes=input"
            )


def warn_of_mistakes(stream: Stream, newest: int | None = None) -> None:
    """Log a line for each kind of mistake in the data of a task, and for what is cut of it.

    Args:
        newest: so many tasks at the end of the stream alone; None: all of them, and unseen ones.
    """
    for task in (*stream.tasks, *stream.unseen) if newest is None else stream.tasks[-newest:]:
        for mistake in (*mistakes_of(stream, task, MOST_COMPARED), *lines_of_cuts(stream, task)):
            data_log.warning("%s: %s", task.name, mistake)
        prompt, answer = stream.config.limits_of(task.name)
        if prompt > USUAL_LENGTHS[0] or answer > USUAL_LENGTHS[1]:
            data_log.info("%s: up to %d tokens of a prompt and %d of an answer", task.name, prompt, answer)


def check_new_run(config: RunConfig) -> tuple[Stream, dict[str, float] | None]:
    """Check a new run: its branch of a shared bank must be new. Also returns `eval.singles`' scores.

    Raises:
        RunError: another run's snapshots are on that branch, or the run starts from a snapshot of a method that
            takes no more tasks. BankError: it starts from one of other data. RayclError: see `check`.
    """
    stream = check(config)
    config = config.model_copy(update={"stream": stream.config})
    warn_of_mistakes(stream)
    start = None
    if config.bank.start:
        check_takes_more_tasks(config)
        snapshot = snapshot_at(config.bank.start)[1]
        check_snapshot_inputs(snapshot, inputs_of(config, stream), config.bank.revise)
        start = snapshot.number
    if config.bank.publish and config.bank.dir:
        bank, name = Bank.at(config.bank.dir), config.bank.branch
        head = Branch(bank, name).head()
        if head not in (None, start):
            here = f"branch '{name}' of the bank '{bank.storage.uri}'"
            what = f"points at snapshot {head}, not at {start}, from which" if start else f"is at snapshot {head}, and"
            begins = "this run starts" if start else "this run starts from none"
            raise RunError(
                f"{here} {what} {begins}: publish onto another branch with bank.branch=NAME, or start from its head "
                f"with bank.start={bank.storage.address}@{name}"
            )
    return stream, read_singles(config)


def check_takes_more_tasks(config: RunConfig) -> None:
    """Check that a run that has learned some of its tasks can learn further ones.

    Raises:
        ResumeError: its method or schedule used all tasks from the start.
    """
    codec = load_codec(config.backbone, *config.stream.token_limits)
    kind = method_class(config.method.name)
    if config.stream.schedule == "joint":
        raise ResumeError("stream.schedule=joint trains all tasks in one phase: start a new run instead")
    kind(config.method, load_skeleton(config.backbone, codec), config.seed)
    if config.method.fits_ahead:
        raise ResumeError("this run read its whole stream before the first task: start a new run instead")


def check_data(config: RunConfig, stream: Stream) -> None:
    """Check data; a learned task may be without data where nothing is trained on its rows again.

    Raises:
        ConfigError: the method trains on rows of earlier tasks, or the task is to be trained.
    """
    missing = [task.name for task in stream.tasks if not stream.has_data(task)]
    if missing and config.method.rereads_rows:
        raise ConfigError(
            f"method '{config.method.name}' trains on rows of {', '.join(missing)} again, and their data is out of "
            "reach: say where it is now (stream.root), or restore it"
        )
    if missing and not config.bank.start:
        raise ConfigError(f"tasks {', '.join(missing)} have no data: `recorded` is for runs with bank.start")


def check_selection(config: RunConfig, stream: Stream) -> None:
    """Weights are chosen by dev rows, with whole weights on every worker.

    Raises:
        ConfigError: a task without dev rows, or an engine that shards the weights.
    """
    inside = {
        f"eval.at_epochs={config.eval.at_epochs}": config.eval.at_epochs is not None,
        f"eval.select={config.eval.select}": config.eval.select != "last",
    }
    is_partitioned = isinstance(config.engine, DeepSpeedConfig) and config.engine.zero_stage == 3
    for setting in [name for name, is_set in inside.items() if is_set and is_partitioned]:
        raise ConfigError(
            f"{setting} evaluates inside a task, where engine.zero_stage=3 has no whole weights: use zero_stage 0, 1 "
            "or 2, or engine=torch"
        )
    if config.eval.select == "last":
        return
    without = [task.name for task in stream.tasks if stream.has_data(task) and not len(stream.rows(task, "dev"))]
    if without:
        raise ConfigError(
            f"eval.select=best_dev, but {', '.join(without)} has no dev rows: raise stream.dev_fraction, give dev "
            "files with stream.dev=file, or use eval.select=last"
        )


def check_unseen(config: RunConfig, stream: Stream, codec: TextCodec) -> None:
    """Check that unseen tasks have rows, and that a label head knows the labels of what it has not learned.

    Raises:
        ConfigError: a task without dev rows where `eval.split` is dev, or with labels that no task teaches; or
            `eval.untrained` asks for answers by labels.
    """
    learned = {label for task in stream.tasks for label in task.labels or ()}
    for task in stream.unseen:
        if not len(stream.rows(task, config.eval.split)):
            raise ConfigError(
                f"unseen task '{task.name}' has no {config.eval.split} rows and eval.split is {config.eval.split}: "
                "leave it out of stream.unseen, or use eval.split=test"
            )
        foreign = [label for label in task.labels or () if label not in learned]
        if codec.needs_labels and foreign:
            raise ConfigError(
                f"unseen task '{task.name}' has labels that no task of the stream has ({', '.join(foreign)}), and "
                f"encoder-only backbone '{config.backbone.name}' answers with learned labels alone: leave it out of "
                "stream.unseen, add a task with these labels to the stream, or use a backbone that writes its answers"
            )
    if config.eval.shots and stream.learns_texts:
        raise ConfigError(
            f"eval.shots is {config.eval.shots} and stream.objective is {config.stream.objective}: examples are texts "
            "with answers, expected shots 0, or objective answer"
        )
    bare = [name for name in ("untrained", "shots") if getattr(config.eval, name)]
    if bare and codec.needs_labels and not stream.learns_texts:
        raise ConfigError(
            f"eval.{bare[0]} is set and encoder-only backbone '{config.backbone.name}' answers with labels that it has "
            "learned: leave it out, or use a backbone that writes its answers"
        )


def read_singles(config: RunConfig) -> dict[str, float] | None:
    """Return the task -> score when trained alone, from `eval.singles`.

    Raises:
        ConfigError: that run had another method, modifiers, data, backbone, training or seed.
        RunError: it is not finished.
    """
    if config.eval.singles is None:
        return None
    results = finished_results(config.eval.singles)
    check_singles(config, results["config"], f"eval.singles '{config.eval.singles}'")
    last = [row for row in results["matrix"] if any(row)][-1]
    return {task: cell["value"] for task, cell in zip(results["stream"]["tasks"], last, strict=True) if cell}


def check_singles(config: RunConfig, theirs: Tree, name: str) -> None:
    """Check that a run's config is this one's with each task alone.

    Args:
        theirs: that config. name: its name in the error.

    Raises:
        ConfigError: it is not the same method and modifiers on the same data, backbone, training and seed.
    """
    mine, theirs = configs.as_tree(config), configs.as_tree(configs.validate(RunConfig, theirs))  # older runs lack keys
    schedule = theirs["stream"]["schedule"]
    if schedule != "separate":
        raise ConfigError(f"{name} is a run under stream.schedule={schedule}: expected separate")
    learner = configs.as_tree(config.method.innermost)
    shared = ("seed", "stream", "backbone", "train", "modifiers")
    expected = {"method": learner, **{key: mine[key] for key in shared}}
    result = {"method": theirs["method"], **{key: theirs[key] for key in shared}}
    differing = _single_differences(expected, result)
    if differing:
        raise ConfigError(
            f"{name} is another setting; it differs in {', '.join(differing)}: "
            "repeat the separate run with this run's settings"
        )


def _single_differences(expected: Tree, actual: Tree) -> list[str]:
    """Return dotted keys that matter for a task trained alone: the order of tasks does not."""
    unused = method_class(str(expected["method"]["name"])).Config.unused_for_single_task
    stream = ("stream.name", "stream.tasks", "stream.unseen", "stream.schedule")
    for key in LIMITS:
        if actual["stream"][key] == expected["stream"][key] == "auto":  # tasks that one lacks are no difference
            by_task = [tree["stream"][f"{key}_by_task"] for tree in (actual, expected)]
            for tree, own in zip((actual, expected), by_task, strict=True):
                tree["stream"][f"{key}_by_task"] = {
                    name: own[name] for name in own.keys() & by_task[0].keys() & by_task[1].keys()
                }
    differing = list(configs.differences(actual, expected, without=(*(f"method.{name}" for name in unused), *stream)))
    if "method.name" in differing:  # each method has settings of its own
        return [name for name in differing if name == "method.name" or not name.startswith("method.")]
    return differing


def make_modifiers(config: RunConfig, method: Method) -> Modifiers:
    """Return the configured gradient modifiers over the method's backbone."""
    return Modifiers({name: modifier_class(name)(chosen, method) for name, chosen in config.modifiers.items()})


# ---- what a run may do and seldom should ------------------------------------------------------------------------


def _own_tasks(config: RunConfig, stream: Stream, codec: TextCodec) -> Iterator[str]:
    """Yield what no setting of tasks of the user's own has named: their prompt, and epochs of small ones."""
    names = [f"'{task.name}'" for task in stream.tasks if stream.takes_template(task, codec)]
    if names:
        yield (
            f"{'task' if len(names) == 1 else 'tasks'} {some(names, 3)}: texts are messages under the model's chat "
            "template; stream.prompt=plain sends them as they are"
        )
    for phase in SCHEDULES[config.stream.schedule]().phases(stream):
        order = _order(config, stream, phase, codec)
        is_auto = config.train.chosen_epochs(phase.name) == "auto"
        if is_auto and order.epochs > USUAL_EPOCHS and order.steps == order.steps_per_epoch * order.epochs:
            yield (
                f"'{phase.name}' is trained for {order.epochs} epochs instead of {USUAL_EPOCHS}, since its rows are "
                "few; train.epochs names another number"
            )


def _warmup(config: RunConfig, stream: Stream, codec: TextCodec) -> Iterator[str]:
    train = config.train
    short = []
    for phase in SCHEDULES[config.stream.schedule]().phases(stream):
        steps = _order(config, stream, phase, codec).steps
        if 0 < steps <= train.warmup(steps):
            short.append(f"'{phase.name}' ({steps})")
    if short:
        yield (
            f"train.warmup_steps={train.warmup_steps} is not less than the optimizer steps of task {some(short, 3)}, "
            "so the learning rate never has its value: lower it, or give a share of the steps with train.warmup_ratio"
        )


def _epochs(config: RunConfig, stream: Stream, codec: TextCodec) -> Iterator[str]:
    """Yield tasks that have fewer epochs than the method needs to be what it is."""
    if config.stream.schedule != "sequential":
        return
    phases, least = SCHEDULES[config.stream.schedule]().phases(stream), config.method.least_epochs
    epochs = {phase.name: epochs_of(config.train, stream, phase, codec) for phase in phases}
    if short := [f"'{name}' ({count})" for name, count in epochs.items() if count < least]:
        yield (
            f"method '{config.method.name}' does what it is named for from epoch {least} of a task, which "
            f"{some(short, 3)} do not reach: raise train.epochs, or change the method's settings"
        )


def _samples(config: RunConfig, stream: Stream) -> Iterator[str]:
    """Yield tasks of which a share of the rows is a handful."""
    if config.method.sample_share is None or config.stream.schedule != "sequential":
        return
    path, share = config.method.sample_share
    short, enough = [], 0.0
    for task in stream.tasks[:-1]:  # nothing of the last one is trained on again
        rows = _rows(stream, task)
        wanted = min(rows, PER_LABEL * len(task.labels) if task.labels else PER_TASK)
        kept = max(1, int(round(share * rows, 9)))
        if kept < wanted:
            short.append(f"'{task.name}' ({kept} of {rows})")
            enough = max(enough, wanted / rows)
    if short:
        yield (
            f"method.{path}={share:g} keeps a handful of training rows of task {some(short, 3)}: with fewer than "
            f"{PER_LABEL} for each label, or {PER_TASK} without labels, little of a task is kept; "
            f"method.{path}={math.ceil(100 * enough) / 100:g} keeps as many of each"
        )


def _order(config: RunConfig, stream: Stream, phase: Phase, codec: TextCodec) -> GlobalOrder:
    rows, train = sum(_rows(stream, task) for task in phase.tasks), config.train
    return GlobalOrder(rows, train.batch_size, epochs_of(train, stream, phase, codec), 0, train.max_steps)


def _rows(stream: Stream, task: Task) -> int:
    return len(stream.rows(task, "train")) if stream.has_data(task) else 0
