"""General ability: what a model can do outside its stream, by tasks of EleutherAI's lm-eval.

A method that keeps all tasks of its stream may still cost what the backbone could do before. Each task's score is its
first metric of `METRICS`, in points of 100, by the rows and prompts of its own file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from raycl.backbone import Backbone
from raycl.errors import ConfigError, DataError, meant
from raycl.generation.continuous_batch import Activate
from raycl.metrics.settings import GeneralConfig
from raycl.types import Batch, Mixture, Score, TextCodec

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

log: logging.Logger = logging.getLogger("raycl")

INSTALL = "pip install 'raycl[eval]'"

SUITES: Mapping[str, tuple[str, ...]] = {
    "arc": ("arc_easy", "arc_challenge"),
    "piqa": ("piqa",),
    "winogrande": ("winogrande",),
    "hellaswag": ("hellaswag",),
    "mmlu-subset": (
        *("mmlu_formal_logic", "mmlu_world_religions", "mmlu_econometrics", "mmlu_high_school_psychology"),
        *("mmlu_nutrition", "mmlu_professional_accounting", "mmlu_astronomy", "mmlu_high_school_mathematics"),
    ),
    "ifeval": ("ifeval",),
    "slm-zero-shot": ("arc_challenge", "arc_easy", "piqa", "winogrande"),
    "migu-zero-shot": ("hellaswag", "winogrande", "arc_challenge"),
    "trace": ("mmlu", "gsm8k_cot", "bbh_cot_fewshot", "tydiqa_goldp_en", "boolq", "piqa"),
}
"""Name -> tasks of lm-eval; of MMLU two subjects of each of its four areas. slm-zero-shot: table 6 of SLM;
migu-zero-shot: figure 3 of MIGU; trace: the six of TRACE, which measures them by OpenCompass, TyDiQA in all languages
and MMLU with five examples."""

METRICS = (
    *("acc_norm", "acc", "exact_match", "em", "prompt_level_strict_acc", "pass@1", "mc2", "f1"),
    *("rougeL", "rougeL_max", "bleu", "chrf"),
)
"""Metrics that are a task's score, the first that it has; those from rougeL on are in points already."""

IN_POINTS = METRICS.index("rougeL")

CODE_ALLOWED = "HF_ALLOW_CODE_EVAL"

PERCENT = re.compile(r"(squadv2|scrolls_\w+) (em|f1)")
"""Task and metric whose number is in points too, though it is a share elsewhere."""

DATA_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, TypeError, ValueError)
"""What `datasets` and lm-eval raise where a task's rows cannot be had: no network, no such file, another format, a
package that the task needs, an unknown setting in its file; Jinja's errors, where its texts cannot be written, besides.
"""


@dataclass(frozen=True)
class RoutedModel:
    """A backbone with adapters that a router selects, on one worker.

    Attributes:
        activate: activates the mixture of a batch; None: the bare backbone.
        route: mixture of a batch of texts of no known task; it may return None, for the bare backbone.
        batch_size: texts in a forward pass.
        reserved: positions that soft prompts take beside a text.
        share: rank of this worker and number of workers, which share out the requests. gather: collects their results.
    """

    backbone: Backbone
    activate: Activate
    route: Callable[[Batch], Mixture | None]
    batch_size: int
    reserved: int = 0
    share: tuple[int, int] = (0, 1)
    gather: Callable[[Any], Sequence[Any]] = lambda value: [value]


def check_general(settings: GeneralConfig, codec: TextCodec, backbone: str) -> None:
    """Check everything about general ability that can be known before work starts; rows are fetched where they lie
    elsewhere.

    Args:
        backbone: its name, for messages.

    Raises:
        ConfigError: an encoder-only backbone, no lm-eval, an unknown task, one that runs generated code, or no chat
            template. DataError: the rows of a task cannot be read.
    """
    if not settings.tasks:
        return
    if codec.needs_labels:
        raise ConfigError(
            f"general.tasks names {settings.tasks[0]}, and encoder-only backbone '{backbone}' gives texts no "
            "likelihood: leave it out, or use a backbone that writes its answers"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"general.tasks needs the library lm-eval: {INSTALL}")
    if settings.chat_template and not codec.chat_template:
        raise ConfigError(
            f"general.chat_template is true, and backbone '{backbone}' has no chat template: leave it out, or "
            "name a template in backbone.chat_template"
        )
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise ConfigError(
            f"general.include_path '{settings.include_path}' is no folder of this machine: expected one with task "
            "files of lm-eval"
        )
    for name in names_of(settings):
        _loaded(settings, name)


def names_of(settings: GeneralConfig) -> list[str]:
    """Return the names of lm-eval's tasks, groups and tags that are evaluated, suites expanded.

    Raises:
        ConfigError: one that does not exist.
    """
    own = set(_manager(settings.include_path, False).all_tasks)
    names = list(dict.fromkeys(name for given in settings.tasks for name in SUITES.get(given, (given,))))
    known = own if own.issuperset(names) else {*_manager(settings.include_path, True).all_tasks}
    for name in names:
        if name not in known:
            near = meant(name, sorted({*SUITES, *known}))
            where = "lm-eval" if settings.include_path is None else f"lm-eval or '{settings.include_path}'"
            raise ConfigError(f"general.tasks names '{name}', which {where} does not have: {near}")
    return names


@lru_cache(maxsize=4)
def _manager(include_path: str | None, with_defaults: bool) -> TaskManager:
    """Return lm-eval's index of tasks; that of its own 14,000 takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=with_defaults)


def _loaded(settings: GeneralConfig, name: str) -> Any:
    """Return a task, or those of a group or tag, with their rows."""
    from jinja2 import TemplateError

    own = _manager(settings.include_path, False)
    manager = own if name in own.all_tasks else _manager(settings.include_path, True)
    if (manager.task_index[name].cfg or {}).get("unsafe_code"):
        _check_code(name, settings)
    try:
        with _quiet():
            loaded = manager.load([name])
    except (*DATA_ERRORS, TemplateError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"the rows of '{name}' in general.tasks cannot be read ({type(error).__name__}: {reason}): run once "
            "where they can be fetched, or name a task file with local rows in general.include_path, or mend it"
        ) from error
    for task_name, task in loaded["tasks"].items():
        if task.config.unsafe_code:
            _check_code(task_name, settings)
        if task.get_config("num_fewshot") is None or settings.shots is not None:
            task.set_config(key="num_fewshot", value=settings.shots or 0)
        task.set_fewshot_seed(seed=0)
    return loaded


def _check_code(name: str, settings: GeneralConfig) -> None:
    if not settings.allow_code:
        raise ConfigError(
            f"task '{name}' in general.tasks runs code that the model generates: add eval.general.allow_code=true "
            "(raycl evaluate: --allow-code) to the command, in a container without anything of value"
        )


def measure(model: RoutedModel, settings: GeneralConfig) -> dict[str, Score]:
    """Return the task and its metric -> score, by all workers together.

    A group with a mean of its own, such as `mmlu`, has one score. `extra` has `unknown`, the share of the rows whose
    text counts as one of no learned task (0 to 1), where the router can tell.

    Raises:
        ConfigError, DataError: see `check_general`.
    """
    from lm_eval.evaluator import evaluate

    from raycl.scoring.harness import HarnessModel

    scores: dict[str, Score] = {}
    for name in names_of(settings):
        loaded, adapter = _loaded(settings, name), HarnessModel(model)
        with _quiet(), _same_draws(), _code_allowed(settings.allow_code):
            found = evaluate(
                adapter,
                loaded,
                limit=settings.limit,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=settings.chat_template,
                confirm_run_unsafe_code=settings.allow_code,
            )
        results, samples = found["results"], found["n-samples"]
        wanted = [name] if name in results else list(loaded["tasks"])
        for task in wanted:
            members = loaded["tasks"] if task == name else [task]
            rows = sum(samples[member]["effective"] for member in members)
            metric, value = headline(task, results[task])
            known = [unknown for (row_task, _), unknown in adapter.unknown.items() if row_task in members]
            extra = {"unknown": fmean(known)} if known else {}
            scores[f"{task} ({metric})"] = Score(value, rows, extra)
    return scores


def headline(task: str, numbers: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name of a task's score, and the score in points; a number above 1 is in points already.

    Args:
        numbers: metric and filter -> value, as lm-eval returns them.

    Raises:
        ConfigError: the task has no metric that is one.
    """
    by_metric: dict[str, float] = {}
    for key, value in numbers.items():
        if isinstance(value, float | int) and "stderr" not in key:
            by_metric.setdefault(key.partition(",")[0], float(value))
    for place, metric in enumerate(METRICS):
        if metric in by_metric:
            value = by_metric[metric]
            is_in_points = place >= IN_POINTS or value > 1 or PERCENT.fullmatch(f"{task} {metric}") is not None
            return metric, value * (1 if is_in_points else 100)
    has = ", ".join(sorted(by_metric)) or "none"
    raise ConfigError(
        f"task '{task}' in general.tasks has the metrics {has}: expected one of {', '.join(METRICS)}, by which "
        "its ability is a number of points"
    )


def line_of_ability(name: str, score: Score) -> str:
    """Return a score as logs show it."""
    unknown = score.extra.get("unknown")
    routed = "" if unknown is None else f", {unknown:.0%} of no learned task"
    return f"    {name:<36} {score.value:5.1f}  ({score.count} rows{routed})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the progress bars that lm-eval and datasets draw, and their log lines below an error."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Let tasks that shuffle draw the same each time, and a run draw what it would without them."""
    state = random.getstate()
    random.seed(0)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _code_allowed(is_allowed: bool) -> Iterator[None]:
    """Give metrics that run code the permission for which they look in the environment."""
    before = os.environ.get(CODE_ALLOWED)
    if is_allowed:
        os.environ[CODE_ALLOWED] = "1"
    try:
        yield
    finally:
        os.environ.pop(CODE_ALLOWED, None)
        os.environ |= {} if before is None else {CODE_ALLOWED: before}


def ability(scores: Mapping[str, Score] | Sequence[Score]) -> float:
    """Return the mean of scores of tasks."""
    return fmean(score.value for score in (scores.values() if isinstance(scores, Mapping) else scores))
