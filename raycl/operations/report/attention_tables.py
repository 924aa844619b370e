"""Mean attention weights of each task's texts over all task adapters, read from a run's results (method `sapt`).

Two maps, as in SAPT's figure: rows are tasks, columns adapters in the order of learning. `train`: mean weights on the
task's dev texts when it was learned; `test`: on its test texts at the end. If the two agree, a task's texts still use
the adapters that they were learned with.
"""

from __future__ import annotations

from dataclasses import dataclass

from raycl.config import Tree
from raycl.errors import RunError
from raycl.metrics.run_results import title_of


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of one run after its last phase.

    Attributes:
        keys: adapters in the order of learning.
        train: task -> weights over the adapters that existed when it was learned, 0 for later ones.
        test: task -> weights over all adapters; of tasks that were evaluated.
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
        """Read the attention of a run.

        Raises:
            RunError: it has no attention weights.
        """
        if not has_attention(result):
            raise RunError(f"'{title_of(result)}' has no attention weights: only runs with method=sapt do")
        summary = result["phase_summaries"][-1]["attention"]
        keys = [str(key) for key in summary["keys"]]
        train = {task: _padded(weights, len(keys)) for task, weights in summary["train"].items()}
        test = {task: list(map(float, weights)) for task, weights in summary["test"].items()}
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


def _padded(weights: list[float], length: int) -> list[float]:
    return [*map(float, weights), *[0.0] * (length - len(weights))]
