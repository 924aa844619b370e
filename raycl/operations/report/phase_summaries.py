"""Summaries of a run's phases, read from its result file: its router, its attention (`sapt`), its kept rows (`migu`).

Two tasks that update the same rows disturb each other: the share of rows that both kept, layer by layer, is their
overlap. As many of each layer belong to every task, so it is the same seen from the other; by chance it is the share of
rows that belong to a task. The similarity map of the MIGU paper is measured in the finished model instead (`probe`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raycl.config import Tree
from raycl.metrics.run_results import tasks_of
from raycl.routing.score_summary import texts_below

Value = TypeVar("Value")

KINDS = {"keys": "keys", "discriminant": "discriminant", "eq13": "eq. 13"}
"""Router of slots -> title; eq. 13 is the paper's measure of the keys, no router."""


@dataclass(frozen=True)
class Point:
    """A sub-key, or a text, in the plane of t-SNE."""

    task: str
    x: float
    y: float


@dataclass(frozen=True)
class RouterSummary:
    """Summary of one run's router.

    Attributes:
        used: the kind that chose in the evaluation of the last phase; `task` where the task id was given.
        tasks: tasks in the order in which they were learned.
        own_shares: kind -> task -> percent of its dev texts' weight that its own adapters have; tasks without dev texts
            are missing.
        confusion: kind -> task -> other task -> mean weight in percent that dev texts of the first give the adapters of
            the other; tasks with next to none are left out. Empty for runs of earlier versions, which counted texts.
        novelty: task -> how well its dev texts stood out before it was learned (AUROC in percent), if known.
        kept: number of texts that the scores of learned tasks are compared with; 0: no scores were recorded.
        learned: task -> quantiles (`QUANTILES`) of the out-of-distribution scores of its dev texts after the last task.
        outside: the same before the task was learned. false_alarms: `eval.false_alarms`.
        owners: task of each row of `cosines`, which is a slot.
        cosines: symmetric, mean over groups.
        points: may be empty: t-SNE is left out for too few keys and for too many. texts: likewise, of dev texts.
    """

    used: str
    tasks: list[str]
    own_shares: dict[str, dict[str, float]]
    confusion: dict[str, dict[str, dict[str, float]]]
    novelty: dict[str, float]
    kept: int
    learned: dict[str, list[float]]
    outside: dict[str, list[float]]
    false_alarms: float | None
    owners: list[str]
    cosines: list[list[float]]
    points: list[Point]
    texts: list[Point]

    @staticmethod
    def of(result: Tree) -> RouterSummary:
        """Read the routing of a run that has it (`has_routing`)."""
        phases: Sequence[Tree] = result["phase_summaries"]
        last, names = phases[-1], [str(name) for name in result["phases"]]
        shares_by_kind = {kind: dict(last.get("own_shares", {}).get(kind) or {}) for kind in KINDS}
        rows = [row for summary in phases for row in summary.get("slot_similarity", ())]
        places = range(len(rows))
        owners = [
            name for name, summary in zip(names, phases, strict=False) for _ in summary.get("slot_similarity", ())
        ]
        ood = [summary.get("ood") or {} for summary in phases]
        measured = [task for shares in shares_by_kind.values() for task in shares]
        return RouterSummary(
            used=str(last["router"]),
            tasks=list(dict.fromkeys([*owners, *measured])),
            own_shares=shares_by_kind,
            confusion=last.get("confusion", {}) if "own_shares" in last else {},
            novelty={task: share for summary in phases for task, share in summary.get("novelty", {}).items()},
            kept=int(ood[-1].get("kept", 0)),
            learned=ood[-1].get("learned", {}),
            outside={task: scores for part in ood for task, scores in part.get("outside", {}).items()},
            false_alarms=false_alarms_of(result),
            owners=owners,
            cosines=[[float(rows[max(i, j)][min(i, j)]) for j in places] for i in places],
            points=[Point(key["slot"].rpartition(".")[0], key["x"], key["y"]) for key in last.get("key_plane", ())],
            texts=[Point(text["task"], text["x"], text["y"]) for text in last.get("text_plane", ())],
        )

    @property
    def confused(self) -> dict[str, list[float]]:
        """Task with dev texts -> percent of their weight on each of `tasks` under the kind that chose, where it chooses
        by texts."""
        by_task = ordered(self.confusion.get(self.used, {}), self.tasks)
        return {task: [shares.get(other, 0.0) for other in self.tasks] for task, shares in by_task.items()}

    @property
    def rated(self) -> list[str]:
        """Tasks whose texts have out-of-distribution scores, learned or before."""
        return [task for task in self.tasks if task in {*self.learned, *self.outside, *self.novelty}]

    @property
    def threshold(self) -> float | None:
        """The out-of-distribution score from which on a text counts as one of no learned task; None: there is none."""
        if not self.kept or self.false_alarms is None:
            return None
        below = texts_below(self.kept, self.false_alarms)
        return None if below is None else below / self.kept


def ordered(by_task: Mapping[str, Value], tasks: Sequence[str]) -> dict[str, Value]:
    """Return values by task in the order of `tasks`, which records do not keep; others follow."""
    return {task: by_task[task] for task in dict.fromkeys([*tasks, *by_task]) if task in by_task}


def has_routing(result: Tree) -> bool:
    """Return whether the summary of the run's last phase has a router."""
    return "router" in (result.get("phase_summaries") or [{}])[-1]


def false_alarms_of(result: Tree) -> float | None:
    """Return the largest share of texts of learned tasks that may count as unknown; None: the run has no setting."""
    rate: float | None = (result["config"].get("eval") or {}).get("false_alarms")
    return rate


def mean_of(shares: Mapping[str, float]) -> float | None:
    """Return the mean over tasks; None where no task was measured."""
    return sum(shares.values()) / len(shares) if shares else None


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of one run after its last phase.

    Attributes:
        keys: adapters in the order of learning.
        train: task -> weights over the adapters that existed when it was learned, 0 for later ones; tasks in the order
            of the stream. test: task -> weights over all adapters; of tasks that were evaluated.
        pseudo: task -> number of its pseudo-samples.
        fallback_samples: task -> how many of them are stored training inputs because the generator produced none.
    """

    keys: list[str]
    train: dict[str, list[float]]
    test: dict[str, list[float]]
    pseudo: dict[str, int]
    fallback_samples: dict[str, int]

    @staticmethod
    def of(result: Tree) -> AttentionWeights:
        """Read the attention of a run that has it (`has_attention`)."""
        summary = result["phase_summaries"][-1]["attention"]
        keys = [str(key) for key in summary["keys"]]
        train = {
            task: [*map(float, weights), *[0.0] * (len(keys) - len(weights))]
            for task, weights in summary["train"].items()
        }
        test = {task: list(map(float, weights)) for task, weights in summary["test"].items()}
        train, test = (ordered(weights, tasks_of(result)) for weights in (train, test))
        return AttentionWeights(keys, train, test, summary["pseudo"], summary.get("fallback_samples", {}))

    def moved(self) -> dict[str, float]:
        """Return task -> share of its texts' weight that is on other adapters now, in percent (total variation)."""
        return {
            task: 50 * sum(abs(now - then) for now, then in zip(self.test[task], weights, strict=True))
            for task, weights in self.train.items()
            if task in self.test
        }


def has_attention(result: Tree) -> bool:
    """Return whether the summary of the run's last phase has attention weights."""
    return "attention" in (result.get("phase_summaries") or [{}])[-1]


Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskRows:
    """Rows of each task in one model.

    Attributes:
        tasks: their names.
        layers: path -> for each task, a bit per row.
    """

    tasks: list[str]
    layers: dict[str, list[Bits]]

    @property
    def chance(self) -> float:
        """Percent of rows that belong to a task: the overlap of tasks that have nothing to do with each other."""
        kept = [bits.mean() for layer in self.layers.values() for bits in layer]
        return 100 * float(np.mean(kept)) if kept else 0.0

    def overlap(self, paths: Sequence[str] | None = None) -> list[list[float]]:
        """Return percent of the rows of task i that are rows of task j too; mean over layers (None: all)."""
        chosen = [self.layers[path] for path in (self.layers if paths is None else paths)]
        places = range(len(self.tasks))
        return [[100 * float(np.mean([_shared(bits[i], bits[j]) for bits in chosen])) for j in places] for i in places]

    def mean_overlap(self, paths: Sequence[str] | None = None) -> float | None:
        """Return the mean over all pairs of different tasks; None of fewer than two."""
        shares = np.array(self.overlap(paths))
        others = ~np.eye(len(shares), dtype=bool)
        return float(shares[others].mean()) if len(shares) > 1 else None

    @property
    def kinds(self) -> dict[str, list[str]]:
        """`encoder.block.*.layer.*.SelfAttention.q` -> paths of the layers of that kind, whatever their numbers."""
        paths_by_kind: dict[str, list[str]] = {}
        for path in self.layers:
            paths_by_kind.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", path), []).append(path)
        return paths_by_kind


def unpacked_rows(packed: Mapping[str, Any]) -> Bits:
    """Return a bit per row of `{rows, kept}`, where `kept` has them in base64."""
    packed_bits = np.frombuffer(base64.b64decode(packed["kept"]), dtype=np.uint8)
    return np.unpackbits(packed_bits)[: int(packed["rows"])].astype(bool)


def _shared(mine: Bits, other: Bits) -> float:
    """Return the share of `mine` that is in `other`; 0 of nothing."""
    return float((mine & other).sum() / max(1, mine.sum()))


@dataclass(frozen=True)
class OutputRows(TaskRows):
    """Kept rows of one run.

    Attributes:
        tasks: names of its phases, those that were evaluated.
        layers: without those that not every task observed.
        masked: the task was trained under the mask, and not only measured (as a skipped first task).
        norm_kept: share of the observed gradient's norm that the mask kept, in percent, if it was measured.
    """

    masked: list[bool]
    norm_kept: list[float | None]

    @staticmethod
    def of(result: Tree) -> OutputRows:
        """Read the kept rows of a run that has them (`has_output_rows`)."""
        summaries = [phase["modifiers"]["migu"] for phase in result["phase_summaries"]]
        paths = [path for path in summaries[0]["layers"] if all(path in summary["layers"] for summary in summaries)]
        return OutputRows(
            [str(name) for name in result["phases"][: len(summaries)]],
            {path: [unpacked_rows(summary["layers"][path]) for summary in summaries] for path in paths},
            [bool(summary["masked"]) for summary in summaries],
            [None if (share := summary["gradient_norm_kept"]) is None else 100 * share for summary in summaries],
        )


def has_output_rows(result: Tree) -> bool:
    """Return whether the summary of every phase so far has its kept rows."""
    phases = result.get("phase_summaries") or []
    return bool(phases) and all("layers" in phase.get("modifiers", {}).get("migu", {}) for phase in phases)
