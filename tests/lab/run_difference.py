"""The differences of two runs of the same config, as their folders say: `compare_trees.py` prints them.

Files are read by what is in them and not by their names, so that two versions of raycl can be compared.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Values = dict[str, Any]
"""Label -> number, text or tensor."""

SCORES = ("metrics", "averages", "variants", "other_row", "unseen", "untrained", "phase_summaries")
"""Parts of the results that follow from answers, beside the matrix."""

RECORD, ROUTED, SERVED = "record.json", "routed.json", "served.json"
"""Files beside a run's folder: how it ended, the weights of every text that was routed in evaluation, and what its last
snapshot answers where it is served."""

STATED = ("kept router",)
"""Kinds whose differences are counted and are none of the run: since a phase is evaluated by the router that it
publishes, that router is kept with its checkpoint."""

SMALLEST = 5e-324
"""The difference of zeros of both signs."""


@dataclass
class Difference:
    """The differences of the values of one kind.

    Attributes:
        compared, differ: numbers of values. largest: of the differences between numbers; None: there is none.
        where: label of the largest, or of the first.
        missing: labels that one side alone has, with the side.
    """

    compared: int = 0
    differ: int = 0
    largest: float | None = None
    where: str = ""
    missing: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is a difference."""
        return bool(self.differ or self.missing)

    def add(self, label: str, item: Any, other: Any) -> None:
        """Compare two values."""
        self.compared += 1
        distance = distance_of(item, other)
        if distance == 0:
            return
        self.differ += 1
        if distance is not None and (self.largest is None or distance > self.largest):
            self.largest, self.where = distance, label
        self.where = self.where or label


def distance_of(item: Any, other: Any) -> float | None:
    """Return the largest difference of two values: 0 where they are equal bit for bit, None where they are no
    numbers."""
    if isinstance(item, torch.Tensor) and isinstance(other, torch.Tensor):
        if item.dtype != other.dtype or item.shape != other.shape:
            return None
        ours, theirs = (each.contiguous().reshape(-1).view(torch.uint8) for each in (item, other))
        distance = 0.0 if torch.equal(ours, theirs) else float((item.double() - other.double()).abs().max()) or SMALLEST
        return distance if distance == distance else float("inf")  # NaN on one side
    if item == other or (item != item and other != other):
        return 0.0
    numbers = isinstance(item, int | float) and isinstance(other, int | float)
    return abs(item - other) if numbers else None


def compared(reference: Path, tree: Path) -> dict[str, Difference]:
    """Kind -> difference of two runs, each in a folder `run` beside the files above."""
    values, other = values_of(reference), values_of(tree)
    differences: dict[str, Difference] = {}
    for kind in dict.fromkeys((*values, *other)):
        ours, theirs = values.get(kind, {}), other.get(kind, {})
        differences[kind] = difference = Difference()
        for label in ours:
            if label in theirs:
                difference.add(label, ours[label], theirs[label])
        difference.missing = [f"only in the reference: {label}" for label in ours if label not in theirs]
        difference.missing += [f"only in the tree: {label}" for label in theirs if label not in ours]
    return differences


def values_of(folder: Path) -> dict[str, Values]:
    """Return kind -> values of a run."""
    run, values = folder / "run", defaultdict[str, Values](dict)
    record = json.loads((folder / RECORD).read_text())
    values["end"] = {key: key in record for key in ("refused", "failed")}
    for path in sorted(run.rglob("*.jsonl")):
        _read_lines(path.relative_to(run).with_suffix(""), path, values)
    results = _json(run / "results.json")
    values["matrix"] = dict(_leaves(results.get("matrix"), "matrix"))
    values["scores"] = {label: value for key in SCORES for label, value in _leaves(results.get(key), key)}
    for path in sorted((run / "bank" / "snapshots").glob("*.json")):
        router = _json(path).get("record", {}).get("router", {})
        values["router"] |= dict(_leaves({key: router.get(key) for key in ("kind", "settings")}, path.stem))
    for label, tensor in _tensors(run):
        values["kept router" if " objects published/" in label else "tensors"][label] = tensor
    for text, weights in _json(folder / ROUTED).items():
        values["weights"] |= {f"{text} {name}": weight for name, weight in weights.items() if weight}
    values["served"] = dict(_leaves(_json(folder / SERVED), "served"))
    return values


def _json(path: Path) -> Any:
    """Return what a file holds; nothing where it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def _read_lines(name: Path, path: Path, values: dict[str, Values]) -> None:
    """Read the steps of a trace, or answers."""
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        if "grad_norm" in row:
            where = f"phase {row['phase']} step {row['step']}"
            for key in ("loss", "grad_norm", "learning_rate", "tokens"):
                values[key][where] = row[key]
        elif "answer" in row:
            values["answers"][f"{name} row {number}"] = row["answer"]


def _leaves(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{label}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{label}.{number}")
    else:
        yield label, value


def _tensors(run: Path) -> Iterator[tuple[str, Any]]:
    """Label -> tensor of adapters, routers, what methods keep, checkpoints and exported models."""
    objects: dict[str, Path] = {}
    for path in sorted(run.rglob("*.safetensors")):
        if re.fullmatch("[0-9a-f]{64}", path.stem):
            objects[path.stem] = path
        elif not path.name.startswith("optimizer"):  # its use shows in the losses
            yield from ((f"{_label(run, path)} {name}", tensor) for name, tensor in load_file(path).items())
    snapshots = {path.stem: path.read_text() for path in sorted((run / "bank" / "snapshots").glob("*.json"))}
    for path in sorted((*(run / "bank").rglob("*.json"), *(run / "checkpoints").rglob("manifest.json"))):
        number = next((number for number, text in snapshots.items() if path.stem in text), "")
        label = f"bank/states/{number}" if len(path.stem) == 64 else _label(run, path)
        for keys, sha256 in _objects(_json(path), ""):
            tensors = load_file(objects[sha256]) if sha256 in objects else {"lost": torch.empty(0)}
            yield from ((f"{label}{keys} {name}", tensor) for name, tensor in tensors.items())


def _label(run: Path, path: Path) -> str:
    return re.sub(r"-attempt\d+", "", str(path.relative_to(run).with_suffix("")))


def _objects(value: Any, keys: str) -> Iterator[tuple[str, str]]:
    """Yield keys -> hash of every object that a record names."""
    if isinstance(value, dict) and {"sha256", "bytes"} <= value.keys():
        yield keys, value["sha256"]
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _objects(each, keys if key == "record" else f"{keys} {key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _objects(each, f"{keys} {each.get('name', number) if isinstance(each, dict) else number}")


def table(differences: Mapping[str, Mapping[str, Difference]]) -> str:
    """Return Markdown: what differs in each run, then each kind of value in all runs."""
    lines = ["| run | differ | of | largest difference | where |", "|---|---:|---:|---:|---|"]
    for name, kinds in differences.items():
        for kind, item in kinds.items():
            if kind in STATED:
                continue
            if item.differ:
                largest = "" if item.largest is None else f"{item.largest:.3g}"
                lines.append(f"| {name} | {item.differ} {kind} | {item.compared} | {largest} | {item.where[:90]} |")
            if item.missing:
                lines.append(f"| {name} | {len(item.missing)} {kind} on one side | | | {item.missing[0][:90]} |")
    lines = lines if len(lines) > 2 else ["No run differs."]
    lines += ["", "| kind | runs | values | runs that differ | values that differ | largest |", "|---|" + "---:|" * 5]
    for kind in dict.fromkeys(kind for kinds in differences.values() for kind in kinds):
        ones = [kinds[kind] for kinds in differences.values() if kind in kinds]
        largest = max((item.largest for item in ones if item.largest is not None), default=0.0)
        counts = (
            len(ones),
            sum(item.compared for item in ones),
            sum(map(bool, ones)),
            sum(item.differ for item in ones),
        )
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {largest:.3g} |")
    return "\n".join(lines)
