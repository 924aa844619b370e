"""Contracts of methods, routers, gradient modifiers and optimizers, as functions that raise AssertionError.

raycl's own contract suite calls the same ones. `check_method(MyMethod)` in a test of yours runs MyMethod on tiny models
for half a minute; nothing is downloaded, and no Ray is started.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raycl import plugins
from raycl.bank import Bank
from raycl.data.loader import Collate, eval_batches
from raycl.methods.base import Method, trained_names
from raycl.methods.modifier import GradientModifier
from raycl.methods.registry import method_class, modifier_class
from raycl.plugins import Kind
from raycl.routing.router import Owners, Router
from raycl.routing.routers import make_router, router_class, without
from raycl.storage import Storage
from raycl.testing.packages import on_path, write_package
from raycl.testing.runs import KINDS, TASKS, Done, Lab, Stop, exported, matrix, opened, run, trace
from raycl.training.assembly import build
from raycl.training.optimizers.base import OptimizerKind
from raycl.training.optimizers.registry import optimizer_class
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext
from raycl.types import RouterState

SUFFIXES = {"safetensors", "json", "jsonl"}
"""All that a run writes: no pickles."""

REGISTRIES: Mapping[Kind, Callable[[Any], type]] = {
    "method": method_class,
    "modifier": modifier_class,
    "optimizer": optimizer_class,
    "router": lambda name: router_class(RouterState(name)),
}
"""Kind of a part -> what finds the class of a name."""


def check_method(
    method: type[Method],
    settings: Mapping[str, Any] | None = None,
    kinds: Sequence[str] = KINDS,
    sections: Mapping[str, Any] | None = None,
) -> None:
    """Check that a method keeps its contract on each kind of backbone: learn, stop, resume, freeze, publish, serve.

    Args:
        method: it need not be installed.
        settings: settings of the method besides its name.
        kinds: supported kinds: `bert` (encoder-only), `t5` (encoder-decoder) and `llama` (decoder-only).
        sections: other settings of the run by section, for example `{"backbone": {"dropout": 0.1}}`.

    Raises:
        AssertionError: it breaks a rule, which the message or the failing line says.
    """
    name = _name_of(method.Config)
    with installed("method", name, method), tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder) / "lab")
        for kind in kinds:
            config = lab.config(kind, {**(settings or {}), "name": name}, **(sections or {}))
            check_run(config, Path(folder) / kind)


def check_modifier(
    modifier: type[GradientModifier],
    settings: Mapping[str, Any] | None = None,
    methods: Sequence[str] = ("lora", "finetune"),
    kinds: Sequence[str] = KINDS,
) -> None:
    """Check that a gradient modifier keeps its contract with methods, on each kind of backbone.

    Args:
        modifier: it need not be installed. settings: settings of the modifier besides its name.

    Raises:
        AssertionError: it breaks a rule, or changes nothing.
    """
    name = _name_of(modifier.Config)
    with installed("modifier", name, modifier), tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder) / "lab")
        for kind, method in ((kind, method) for kind in kinds for method in methods):
            plain = Storage.at(Path(folder) / f"{kind}-{method}-plain")
            run(lab.config(kind, method), plain)
            changed = lab.config(kind, method, modifiers=[{**(settings or {}), "name": name}])
            done = check_run(changed, Path(folder) / f"{kind}-{method}")
            assert trace(done.storage) != trace(plain), f"modifier '{name}' changes nothing on {kind} with {method}"


def check_optimizer(
    optimizer: type[OptimizerKind],
    name: str,
    train: Mapping[str, Any] | None = None,
    methods: Sequence[str] = ("lora", "finetune"),
) -> None:
    """Check that an optimizer trains, stops and resumes bit for bit.

    Args:
        optimizer: it need not be installed. name: value of `train.optimizer`. train: other settings of the section.

    Raises:
        AssertionError: it does not, or its `state` names other tensors than it keeps.
    """
    with installed("optimizer", name, optimizer), tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder) / "lab")
        for method in methods:
            config = lab.config("bert", method, train={**(train or {}), "optimizer": name})
            done = check_run(config, Path(folder) / method)
            losses = [step[2] for step in trace(done.storage)]
            assert len(set(losses)) > 1, f"with optimizer '{name}' the loss never changes"


def check_router(
    router: type[Router], kind: str, state: RouterState, owners: Owners, texts: Sequence[str] = ("red fire", "a cat")
) -> None:
    """Check that a router that reads texts, or nothing, gives each text weights that depend on that text alone.

    Args:
        router: it need not be installed. kind: its name in snapshots.
        state: a method's `Learned.router`. owners: adapter -> tasks that it was trained on.

    Raises:
        AssertionError: it breaks a rule.
    """
    needs_model = router.needs & {"embeddings", "hidden_states"}
    assert not needs_model, f"it reads {', '.join(sorted(needs_model))}: check it by check_method of its method"
    with installed("router", kind, router):
        state = replace(state, kind=kind)
        made = make_router(state, owners)
        tasks = [name for names in owners.values() for name in names][:1] * len(texts)
        given = tasks if "task_id" in router.needs else None
        whole = made.route(texts, given)
        assert whole.weights.shape == (len(texts), len(whole.names)) and set(whole.names) <= set(owners)
        assert bool(torch.isfinite(whole.weights).all()), "weights are finite"
        for row, text in enumerate(texts):
            alone = made.route([text], given and given[row : row + 1])
            assert alone.names == whole.names and torch.equal(alone.weights[0], whole.weights[row]), (
                f"'{text}' alone has other weights than in a batch"
            )
        again = make_router(state, owners).route(texts, given)
        assert torch.equal(again.weights, whole.weights), "restored twice from one state, it gives other weights"
        if len(owners) > 1:
            gone, *tasks_gone = next(iter(owners.values())) or ("",)
            left = {name: names for name, names in owners.items() if set(names) - {gone, *tasks_gone}}
            if left:
                make_router(without(state, gone), left)


@contextmanager
def installed(kind: Kind, name: str, what: type) -> Iterator[None]:
    """Make a class available by its name inside, like that of an installed package; an installed one stays as it is."""
    target = f"{what.__module__}:{what.__qualname__}"
    assert "<locals>" not in target, f"{target} is defined inside a function: define it at the top of a module"
    plugin = plugins.find(kind, name)
    with ExitStack() as stack:
        if not what.__module__.startswith("raycl.") and plugin is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(on_path(write_package(folder, f"under-test-{kind}", {kind: {name: target}})))
        elif plugin is not None:
            assert plugin.target == target, f"{plugin} is {plugin.target}, and {target} is checked: uninstall it first"
        named = REGISTRIES[kind](name)
        assert named is what, f"{kind} '{name}' is {named.__module__}:{named.__qualname__}, not {target}: rename yours"
        yield


def _name_of(config: Any) -> str:
    name = config.model_fields["name"].default
    assert isinstance(name, str), f"{config.__name__} has no name: give it the field name: Literal[...] = ..."
    return name


# ---- what a run must keep -------------------------------------------------------------------------------------------


def check_run(config: RunConfig, folder: Path) -> Done:
    """Check all that a run of one worker on plain torch must keep, whatever its method; returns the run."""
    storage = Storage.at(folder / "whole")
    done = Done(config, storage, run(config, storage).context)
    check_results(done)
    check_files(done)
    check_frozen(done)
    steps = len(trace(storage))
    for after in (1, steps - 1):
        check_resume(done, folder / f"stopped-{after}", after)
    check_snapshot(done)
    return done


def check_results(done: Done) -> None:
    """Check that the run is finished, and that its matrix has a score of each task after each phase from its own on."""
    results = done.storage.read_json("results.json")
    scores, schedule = matrix(done.storage), done.context.info.tree["stream"]["schedule"]
    assert results["finished"]
    assert results["phases"] == (["joint"] if schedule == "joint" else list(TASKS))
    filled = [[score is not None for score in row] for row in scores]
    assert filled == ([[True, True]] if schedule == "joint" else [[True, False], [True, True]])
    if done.context.schedule.one_model_per_task:
        assert scores[1][0] == scores[0][0], "a task's own model is evaluated once, and its score stands"
    steps = trace(done.storage)
    assert len(steps) == sum(entry["steps"] for entry in results["phase_times"])


def check_files(done: Done) -> None:
    """Check that the run wrote no pickles, and no names that move."""
    names = [path.name for path in Path(done.storage.root).rglob("*") if path.is_file()]
    assert {name.rpartition(".")[2] for name in names} <= SUFFIXES
    assert not any("latest" in name for name in names)


def check_frozen(done: Done) -> None:
    """Check that something was learned, and that what was not trained kept every bit."""
    fresh = build(done.config, DistributedContext.alone(torch.device("cpu")))[0].backbone
    learned = set(trained_names(done.context.backbone))
    first, last = dict(fresh.named_parameters()), dict(done.context.backbone.named_parameters())
    assert first.keys() == last.keys()
    frozen = [name for name in first if name not in learned]
    changed = [name for name in frozen if not torch.equal(first[name], last[name])]
    assert changed == [], f"frozen parameters changed: {', '.join(changed[:3])}"
    body = [name for name in learned if not name.startswith("head.")]
    state = done.context.method.state_dict()[1]
    slots = [value for name, value in state.items() if name.endswith("lora_B")]
    words = done.context.backbone.model.get_input_embeddings().weight  # prompts begin as some of them
    prompts = torch.cat([words[:0], *(value for name, value in state.items() if name.endswith("/prompt"))])
    moved = not bool((prompts[:, None] == words).all(2).any(1).all())
    trained = any(not torch.equal(first[name], last[name]) for name in body)
    assert trained or moved or any(bool(value.any()) for value in slots), "nothing was learned at all"
    if done.context.method.trains_backbone:
        assert any(name.startswith("model.") for name in learned), "trains_backbone is true, and none of it is trained"
    else:
        assert any(name.startswith("model.") for name in frozen), "it trains the backbone: set trains_backbone"


def check_resume(done: Done, folder: Path, after: int) -> None:
    """Check that the run, stopped after so many steps and started again, gives the same bits."""
    storage = Storage.at(folder)
    stopped = False
    try:
        run(done.config, storage, after=after)
    except Stop:
        stopped = True
    assert stopped, f"the run ended before {after} steps"
    run(done.config, storage)
    check_same(storage, done.storage)


def check_same(actual: Storage, expected: Storage) -> None:
    """Check that two runs agree in every number of every step, every score and every exported byte."""
    assert trace(actual) == trace(expected), (
        "losses, gradient norms or rates differ: is all that shapes training in state_dict?"
    )
    assert matrix(actual) == matrix(expected), "scores differ"
    assert exported(actual) == exported(expected), "what was learned differs"


def check_snapshot(done: Done) -> None:
    """Check that what is read from the bank answers each test text as the run did, alone as in a batch."""
    bank = Bank(done.storage.sub("bank"))
    snapshot = bank.newest()
    if snapshot is None:
        return  # whole models are no snapshots, and some methods say why they publish nothing (`Learned.not_served`)
    model = opened(bank, snapshot)
    codec = model.backbone.codec
    for task in done.context.stream.tasks:
        table = done.context.stream.table(task, "test", codec)
        expected = answers_of(done, task.name)
        for size in (4, 1):
            answers: dict[int, str] = {}
            for batch in eval_batches(Collate([table], codec.pad_id), size):
                rows = batch.rows.tolist()
                given = model.predict(batch, table.texts(rows), [task.name] * len(rows), 4)
                answers |= dict(zip(rows, given, strict=True))
            assert [answers[row] for row in range(len(table))] == expected, (
                f"the snapshot answers texts of '{task.name}' in batches of {size} otherwise than the run"
            )


def answers_of(done: Done, task: str) -> list[str]:
    """Return what the run itself answered after its last phase that evaluated the task."""
    for folder in reversed(done.storage.list("predictions")):
        if f"{task}.jsonl" in done.storage.list(f"predictions/{folder}"):
            lines = done.storage.read(f"predictions/{folder}/{task}.jsonl").decode().splitlines()
            return [json.loads(line)["answer"] for line in lines]
    raise AssertionError(f"no predictions of {task}")


CHECKS = (check_method, check_modifier, check_optimizer, check_router)
"""The checks that `raycl.testing` offers."""
