"""The same runs in two checkouts, compared bit for bit: what a change of shape changed in what is learned.

    python tests/lab/compare_trees.py REFERENCE TREE [--only GLOB] [--folder FOLDER] [--json FILE]

The list of runs comes from this tree's registries: every method on every kind of backbone, schedules, modifiers,
optimizers, engines, readings of evaluation, two workers. Each tree has a process of its own, which calls `raycl.train`
run after run. A run that is there already is not trained again, as long as the tree's package and its config are the
same. What is compared comes from runs' folders, by what is in a file and not by its name, so that formats may change.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import hashlib
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from run_difference import RECORD, ROUTED, SERVED, STATED, compared, table

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
OPTIMIZERS = ("adafactor", "sgd")
"""The optimizers beside AdamW, which all other runs have."""

TRAIN = {"epochs": 3, "micro_batch_size": 2, "lr_scheduler": "linear", "learning_rate": 0.03, "weight_decay": 0.0}
ATTEMPTS = 5
GENERATOR = {"steps": 40, "max_tokens": 12}
ROUTES = (
    ("def _route(context", "_route"),
    ("class PublishedRouter", "PublishedRouter.mixture"),
    ("class TextAlone", "TextAlone._route"),
)
"""Line of a definition -> function of that module that routes a batch in evaluation, in either tree."""

FAULTS = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Errors of a run that leave the process able to train the next one."""


def runs(root: Path) -> dict[str, dict[str, Any]]:
    """Return the name -> config tree of every run, over models and tasks that are written to `root`."""
    from tiny import ENGINES, KINDS, RUNS_BY_KIND, VARIANTS, WRITERS, Lab, fits

    from raycl.methods.registry import METHODS, MODIFIERS, WRAPPERS, method_class

    lab = Lab(root)
    listed: dict[str, dict[str, Any]] = {}

    def add(name: str, kind: str, method: Any, engine: Any = "torch", **sections: Any) -> None:
        train, name = TRAIN | sections.pop("train", {}), f"{name}-{kind}".replace("+", "p")
        assert name not in listed, f"two runs are called {name}"
        sections = {"launch": {"workers": 1, "cpus_per_worker": 1}, **sections}
        listed[name] = lab.tree(kind, method, engine, train=train, **sections)

    for kind, method in RUNS_BY_KIND:
        add(method, kind, (VARIANTS | WRITERS).get(method, method))
    for method in METHODS:
        kind = next(kind for kind in ("t5", "llama", "bert") if fits(kind, method))
        for path, value in choices(method_class(method).Config):
            settings = functools.reduce(lambda inner, key: {key: inner}, reversed(path), value)
            quick = {"generator": GENERATOR} if value == "generated" else {}
            add(".".join((method, *path, str(value))), kind, {"name": method, **settings, **quick})
        for schedule in ("separate", "joint") if method not in WRAPPERS else ():
            add(f"{schedule}-{method}", kind, (schedule, method))
    for wrapper in WRAPPERS:
        for learner in ("finetune", "olora"):
            kind = next(kind for kind in ("t5", "llama") if fits(kind, wrapper))
            add(f"{wrapper}-{learner}", kind, {"name": wrapper, "learner": {"name": learner}})
    for kind in KINDS:
        for modifier in MODIFIERS:
            for method in ("finetune", "lora", "olora", "slm"):
                add(f"{modifier}-{method}", kind, method, modifiers=[modifier])
        for optimizer in OPTIMIZERS:
            for method in ("lora", "sapt"):
                add(f"{optimizer}-{method}", kind, method, train={"optimizer": optimizer})
    for method in ("slm", "sapt", "mocl", "epi", "l2p", "lora"):
        for kind in ("bert", "t5"):
            stream = {"tasks": lab.tasks, "unseen": [lab.unseen]}
            evaluation = {"instruction": "chosen", "untrained": kind != "bert"}  # labels are answered once learned
            add(f"chosen-{method}", kind, method, stream=stream, eval=evaluation)
            add(f"own-labels-{method}", kind, method, eval={"labels": "task", "tasks": "all", "decoding": "generate"})
    for engine in ENGINES:
        if engine != "torch":
            add(f"{engine}-lora", "t5", "lora", ENGINES[engine])
    for kind, method in (("t5", "lora"), ("bert", "slm"), ("llama", "sapt"), ("t5", "agem"), ("bert", "finetune")):
        launch = {"workers": 2, "cpus_per_worker": 1}
        add(f"two-workers-{method}", kind, method, launch=launch, modifiers=["migu"] if method == "finetune" else {})
    return listed


def choices(config: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of every setting of a few values, but for its default."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
            yield from (((name, *path), value) for path, value in choices(field.annotation))
        values = (True, False) if field.annotation is bool else get_args(field.annotation)
        if field.annotation is bool or get_origin(field.annotation) is Literal:
            yield from (((name,), value) for value in values if value != field.default and name != "name")


class Routed:
    """Weights of every text that is routed in evaluation, in the order of evaluation."""

    def __init__(self, tree: Path) -> None:
        """Watch the functions of `ROUTES` that the tree has."""
        self.weights: dict[str, dict[str, float]] = {}
        self._seen: Counter[str] = Counter()
        self._inside = False
        for path in (tree / "raycl").rglob("*.py"):
            text = path.read_text()
            for line, function in ROUTES:
                if f"\n{line}" in text:
                    owner: Any = importlib.import_module(".".join(path.relative_to(tree).with_suffix("").parts))
                    *classes, name = function.split(".")
                    for each in classes:
                        owner = getattr(owner, each)
                    if hasattr(owner, name):
                        setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, route: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            outer, self._inside = self._inside, True
            try:
                mixture = route(*given, **named)
            finally:
                self._inside = outer
            if mixture is not None and not outer:
                batch = next(each for each in given if hasattr(each, "source_ids"))
                for number, weights in enumerate(mixture.weights.tolist()):
                    self._add(batch.source_ids[number][batch.source_mask[number] > 0].tolist(), mixture.names, weights)
            return mixture

        return watched

    def _add(self, tokens: Sequence[int], names: Sequence[str], weights: Sequence[float]) -> None:
        text = " ".join(map(str, tokens))
        self._seen[text] += 1
        self.weights[f"text [{text}] time {self._seen[text]}"] = dict(zip(names, weights, strict=True))

    def taken(self) -> dict[str, dict[str, float]]:
        """Return the weights since the last call."""
        weights, self.weights = self.weights, {}
        self._seen.clear()
        return weights


def work(tree: Path, folder: Path, listed: Mapping[str, dict[str, Any]]) -> None:
    """Train the runs that `folder` does not hold, in this process, which runs the code in `tree`."""
    import raycl
    from raycl.errors import RayclError, StoppedError

    assert tree in Path(raycl.__file__).parents, f"raycl is imported from {raycl.__file__}, not from {tree}"
    in_process = "in_process" in inspect.signature(raycl.train).parameters
    routed = Routed(tree)
    for name, config in listed.items():
        if _is_there(folder / name, config):
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        alone = config["launch"]["workers"] == 1 and "deepspeed" not in str(config["engine"])  # it runs once a process
        if in_process or not alone:
            _join_ray()
        options = {"in_process": alone} if in_process else {}
        sections = {**config, "launch": config["launch"] | ({"mode": "local"} if alone and not in_process else {})}
        begun, end = time.time(), {"trained": True}
        try:
            _train(raycl, sections, folder / name, options)
        except StoppedError:  # by a signal: the run is trained by the next call
            raise
        except RayclError as error:
            end = {"refused": str(error)}
        except FAULTS:
            end = {"failed": traceback.format_exc()}
        _write(folder / name / ROUTED, routed.taken())
        _write(folder / name / SERVED, _served(raycl, folder / name / "run", config) if "trained" in end else [])
        _write(folder / name / RECORD, {**end, "seconds": round(time.time() - begun, 2), "config": config})
        print(f"{name}: {next(iter(end), 'trained')} ({time.time() - begun:.1f} s)", flush=True)


def _train(raycl: Any, sections: dict[str, Any], folder: Path, options: Mapping[str, bool]) -> None:
    given = dict(sections)
    stream, method, backbone = (given.pop(section) for section in ("stream", "method", "backbone"))
    raycl.train(stream, method, backbone=backbone, name="run", dir=str(folder), quiet=True, **options, **given)


def _served(raycl: Any, run: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the last snapshot answers to every test text; where there is none, or it needs a task's id, the
    error."""
    from raycl.errors import RayclError

    rows = [Path(task["path"], "test.jsonl").read_text().splitlines() for task in config["stream"]["tasks"]]
    texts = [json.loads(line)["text"] for lines in rows for line in lines]
    try:
        with raycl.load(str(run / "bank")) as model:
            return [asdict(answer) for text in texts for answer in model.predict(text)]
    except (RayclError, *FAULTS) as error:
        return [{"refused": type(error).__name__}]


def _join_ray() -> None:
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)


def _is_there(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the run is there, of the same config."""
    return (folder / RECORD).exists() and _read(folder / RECORD)["config"] == config


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def source_of(tree: Path) -> str:
    """Return the hash of the package in a checkout, changes that are not committed included."""
    digest = hashlib.sha256()
    for path in sorted((tree / "raycl").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def train_all(tree: Path, folder: Path, listed: Mapping[str, dict[str, Any]], number: int) -> None:
    """Train runs by a process of the tree's own.

    Raises:
        SystemExit: it ended before it had trained them all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, log = folder / f"job-{number}.json", folder / f"log-{number}.txt"
    _write(job, listed)
    python = tree / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), __file__, str(tree), str(folder), "--work", str(job)]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tree), "RAYCL_CACHE": str(folder / f"cache-{number}")}
    with log.open("a") as output:
        for _ in range(ATTEMPTS):  # on a busy machine Ray may not start in its 30 s
            if not subprocess.run(command, env=environment, cwd=folder, stdout=output, stderr=output).returncode:
                return
    raise SystemExit(f"the process that trains by {tree} ended before it had trained all runs: see {log}")


def main(words: Sequence[str] | None = None) -> int:
    """Train, compare, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="checkout before the change")
    parser.add_argument("tree", type=Path, help="checkout after it")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of runs")
    parser.add_argument("--folder", type=Path, default=Path(".compare-trees"), help="where runs are kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all differences here")
    parser.add_argument("--change", metavar="KEY=VALUE", help="a setting of `tree` alone: shows a difference")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.work:
        work(options.reference, options.tree, _read(options.work))
        return 0
    folder = options.folder.absolute()
    shutil.rmtree(folder / "lab", ignore_errors=True)
    (folder / "lab").mkdir(parents=True)
    listed = {name: tree for name, tree in runs(folder / "lab").items() if fnmatch.fnmatch(name, options.only)}
    reference, tree = options.reference.resolve(), options.tree.resolve()
    ours = folder / f"reference-{source_of(reference)}"
    theirs = folder / f"tree-{source_of(tree)}{f'-{options.change}' if options.change else ''}"
    changed = {name: _changed(config, options.change) for name, config in listed.items()}
    shares = max(1, options.jobs // 2)
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(train_all, checkout, side, dict(list(configs.items())[number::shares]), number)
            for checkout, side, configs in ((reference, ours, listed), (tree, theirs, changed))
            for number in range(shares)
        ]
    for job in jobs:
        job.result()
    differences = {name: compared(ours / name, theirs / name) for name in listed}
    ends = {name: next(iter(_read(theirs / name / RECORD))) for name in listed}
    print(table(differences))
    for end in sorted(set(ends.values())):
        names = [name for name in ends if ends[name] == end]
        print(f"\n{len(names)} of {len(ends)} runs {end}", end="\n" if end == "trained" else f": {', '.join(names)}\n")
    if options.json:
        kinds = {name: {kind: asdict(item) for kind, item in each.items()} for name, each in differences.items()}
        _write(options.json, {"reference": ours.name, "tree": theirs.name, "ends": ends, "runs": kinds})
    differ = any(item for each in differences.values() for kind, item in each.items() if kind not in STATED)
    return int(differ or "failed" in ends.values())


def _changed(config: Mapping[str, Any], change: str | None) -> dict[str, Any]:
    """Return the config with a setting of a section changed."""
    if change is None:
        return dict(config)
    (section, _, key), value = change.partition("=")[0].partition("."), json.loads(change.partition("=")[2])
    return {**config, section: {**config[section], key: value}}


if __name__ == "__main__":
    raise SystemExit(main())
