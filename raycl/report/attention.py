"""How loudly each block speaks for each task's texts, read from a run's result file (method `sapt`).

Two maps, as in SAPT's figure: rows are tasks, columns blocks in the order of learning. `train`: mean weights on the
task's dev texts when it was learned; `test`: on its test texts at the end. Where the two are alike, a task's texts
are still answered by the blocks that they were learned with.
What it does not know: how weights come about, how anything is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.config import Tree
from raycl.errors import RunError
from raycl.report.results import title_of


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of one run after its last phase.

    Attributes:
        keys: blocks in the order of learning.
        train: task -> weights over the blocks that there were when it was learned, 0 for later ones.
        test: task -> weights over all blocks; of tasks that were evaluated.
        pseudo: task -> how many pseudo inputs stand for it.
        fallback_samples: task -> how many of them are stored training inputs because a generator wrote none.
    """

    keys: list[str]
    train: dict[str, list[float]]
    test: dict[str, list[float]]
    pseudo: dict[str, int]
    fallback_samples: dict[str, int]

    @staticmethod
    def of(result: Tree) -> AttentionWeights:
        """Of a run.

        Raises:
            RunError: it tells of no attention.
        """
        if not has_attention(result):
            raise RunError(f"'{title_of(result)}' tells of no attention: only runs with method=sapt do")
        summary = result["phase_summaries"][-1]["attention"]
        keys = [str(key) for key in summary["keys"]]
        train = {task: _padded(weights, len(keys)) for task, weights in summary["train"].items()}
        test = {task: list(map(float, weights)) for task, weights in summary["test"].items()}
        return AttentionWeights(keys, train, test, summary["pseudo"], summary.get("fallback_samples", {}))

    def moved(self) -> dict[str, float]:
        """Task -> how much of its texts' weight speaks through other blocks now, in percent (total variation)."""
        return {
            task: 50 * sum(abs(now - then) for now, then in zip(self.test[task], weights, strict=True))
            for task, weights in self.train.items()
            if task in self.test
        }


def has_attention(result: Tree) -> bool:
    """Whether the run's last phase tells of attention."""
    return "attention" in (result.get("phase_summaries") or [{}])[-1]


def _padded(weights: list[float], length: int) -> list[float]:
    return [*map(float, weights), *[0.0] * (length - len(weights))]
