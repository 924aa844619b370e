"""A plan: what a run needs on a cluster, whether it fits, and what limits it; as JSON and as text."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raycl.errors import ConfigError
from raycl.operations.plan.arithmetic import (
    Cluster,
    EngineLoad,
    ModelLoad,
    RunLoad,
    Seconds,
    StepLoad,
    Traffic,
    activations,
    gpu_memory,
    host_memory,
    operations,
    seconds,
    traffic,
)
from raycl.operations.plan.numbers import numbers, opened
from raycl.training.setup.run_config import RunConfig

DISK_NAMES = {
    "checkpoint": "a checkpoint",
    "task_end": "a checkpoint at a task's end",
    "published_per_task": "to the bank, per task",
    "stays_per_task": "to the run's folder, per task",
    "growth": "at most, in all",
}


WITH_UNITS = {
    "gpu": "gpu_bytes",
    "host": "host_bytes",
    "activations": "activation_bytes",
    "traffic": "traffic_bytes_per_step",
    "operations": "operations_per_step",
}
"""Attribute of a report -> its name in the tree, where that says the unit."""


@dataclass(frozen=True)
class Report:
    """The resources that a run needs.

    Attributes:
        gpu, host: bytes by name (`gpu_memory`, `host_memory`).
        activations: bytes with and without gradient checkpointing, as `recomputed` and `kept`.
        fits: whether the run fits into the memory of GPU and node. bottleneck: memory, host memory, compute, network or
            loading.
        share: share of the available memory, or of the run's time (loading and training; of a step's where the number
            of steps is not known).
        notes: assumptions.
    """

    model: ModelLoad
    step: StepLoad
    engine: EngineLoad
    run: RunLoad
    cluster: Cluster
    gpu: Mapping[str, float]
    host: Mapping[str, float]
    activations: Mapping[str, float]
    traffic: Traffic
    operations: float
    seconds: Seconds
    fits: bool
    bottleneck: str
    share: float
    notes: tuple[str, ...] = ()


def report(
    model: ModelLoad, step: StepLoad, engine: EngineLoad, run: RunLoad, cluster: Cluster, notes: tuple[str, ...] = ()
) -> Report:
    """Return the plan of a run."""
    gpu = gpu_memory(model, step, engine, run)
    host = host_memory(model, engine, run, cluster.on_node)
    sent = traffic(model, step, engine)
    times = seconds(model, step, engine, run, sent, cluster)
    fits, bottleneck, share = limits(gpu, host, times, cluster)
    both = {"kept": activations(model, step, False), "recomputed": activations(model, step, True)}
    work = operations(model, step)
    return Report(model, step, engine, run, cluster, gpu, host, both, sent, work, times, fits, bottleneck, share, notes)


def limits(
    gpu: Mapping[str, float], host: Mapping[str, float], times: Seconds, cluster: Cluster
) -> tuple[bool, str, float]:
    """Return whether it fits, what limits it, and its share: memory that is short, else what takes most of the time."""
    filled = {"memory": gpu["peak"] / cluster.gpu.memory, "host memory": max(host.values()) / cluster.host}
    name = max(filled, key=lambda part: filled[part])
    if filled[name] > 1:
        return False, name, filled[name]
    loading = times.loading if times.training else 0.0
    steps = times.training / times.step if times.training else 1.0
    spent = {"compute": times.compute * steps, "network": times.network * steps, "loading": loading}
    longest = max(spent, key=lambda part: spent[part])
    return True, longest, spent[longest] / (sum(spent.values()) or 1.0)


def tree(report: Report) -> dict[str, Any]:
    """Return the plan as a JSON-able tree."""
    tree = {WITH_UNITS.get(name, name): value for name, value in asdict(report).items()}
    del tree["model"]["linears"]
    run = tree.pop("run")
    passes = {"extra_passes": run["extra"], "parallel_tasks": run["parallel_tasks"]}
    return {**tree, "steps": list(run["steps"]), **passes, "disk_bytes": run["disk"]}


def text(report: Report) -> str:
    """Return the plan as text for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    model, cluster = report.model, report.cluster
    yield (
        f"{'fits' if report.fits else 'does not fit'}; bottleneck: {report.bottleneck} ({100 * report.share:.0f} % of "
        f"{'the time' if report.fits else 'what is there'})"
    )
    yield ""
    yield "parameters"
    yield _row("backbone", _count(model.parameters))
    yield _row("trained per task", " to ".join(dict.fromkeys([_count(min(model.trained)), _count(max(model.trained))])))
    yield _row("adapters after all tasks", _count(model.adapters))
    yield ""
    gpu = f"{cluster.gpu.ray}, {_size(cluster.gpu.memory)}; another one: --gpu"
    yield f"memory of a GPU ({gpu}), {report.engine.name}, {cluster.gpus} worker(s)"
    yield from (_row(name.replace("_", " "), _size(value)) for name, value in report.gpu.items() if value)
    kept = report.activations
    yield _row("with gradient checkpointing", f"{_size(kept['recomputed'])} of activations, else {_size(kept['kept'])}")
    yield ""
    yield f"memory of a node ({_size(cluster.host)}), {cluster.on_node} worker(s)"
    yield from (_row(name, _size(value)) for name, value in report.host.items())
    yield ""
    yield "an optimizer step, each worker"
    yield _row("gradients summed", _size(report.traffic.gradients))
    yield _row("weights gathered", _size(report.traffic.parameters))
    yield _row("sent", _size(report.traffic.sent))
    yield _row("operations", f"{report.operations:.3g}")
    times = report.seconds
    yield _row("time", f"{times.step:.3g} s (compute {times.compute:.3g}, network {times.network:.3g})")
    extra = f", {report.run.extra:.0%} more with the method's extra passes" if report.run.extra else ""
    spent = f"{sum(report.run.steps)}, {_duration(times.training)}{extra}"
    yield _row("steps", spent if report.run.steps else "not known")
    if (groups := report.run.parallel_tasks) > 1:
        gpus = f"{groups} tasks, each on {cluster.gpus} GPU(s), {groups * cluster.gpus} in all"
        turn = f"; {report.run.steps_in_turn} steps one after another" if report.run.steps else ""
        yield _row("at the same time", gpus + turn)
    yield _row("loading", f"{times.loading:.3g} s at {_size(cluster.disk)}/s")
    yield ""
    yield "disk"
    yield from (_row(name, _size(report.run.disk[key])) for key, name in DISK_NAMES.items() if key in report.run.disk)
    yield from ("", *(f"note: {note}" for note in report.notes)) if report.notes else ()


def _row(name: str, value: str) -> str:
    return f"  {name:30}{value}"


def _size(value: float) -> str:
    sizes = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    return next((f"{value / size:,.1f} {unit}" for unit, size in sizes.items() if value >= size), f"{value:.0f} B")


def _count(value: float) -> str:
    sizes = {"B": 1e9, "M": 1e6, "k": 1e3}
    return next((f"{value / size:,.2f} {unit}" for unit, size in sizes.items() if value >= size), f"{value:.0f}")


def _duration(value: float) -> str:
    return f"{value / 3600:.1f} h" if value >= 3600 else f"{value / 60:.1f} min" if value >= 60 else f"{value:.1f} s"


def plan(config: RunConfig, cluster: Cluster) -> Report:
    """Return what the run needs on that cluster, with a worker on each of its GPUs.

    Raises:
        ConfigError: numbers that are out of range, or a batch that so many workers cannot share. RayclError: the
            config's own errors.
    """
    if cluster.gpus < 1 or cluster.per_node < 1:
        raise ConfigError(f"--gpus is {cluster.gpus} and --gpus-per-node {cluster.per_node}: expected at least 1 each")
    if not 0 < cluster.utilisation <= 1:
        raise ConfigError(f"--utilisation is {cluster.utilisation:g}: expected a share above 0 and at most 1")
    workers = config.launch.model_copy(update={"workers": cluster.gpus})
    parts = opened(config.model_copy(update={"launch": workers}))
    figures = numbers(parts)
    return report(*figures, cluster, tuple(parts.notes))
