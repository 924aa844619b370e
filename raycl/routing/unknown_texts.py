"""Texts of no learned task: found by their distance to the tasks, answered by the rule of `eval.unknown`.

A router chooses some task for every text. A text is unknown if its out-of-distribution distance is above a threshold:
the relative Mahalanobis distance of `raycl.routing.statistics`, which grows without limit, where the score that answers
show is a share of kept texts and is 1 for all texts beyond them. The threshold is a quantile of the kept dev texts of
all tasks, which no statistics contain, so that of texts of the tasks together at most the stated share is above it
(split conformal prediction: Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World"). It is computed
from the present tasks, again with each one that is added or removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raycl.errors import BankError, RetrievalError
from raycl.routing.router import Router
from raycl.types import Mixture, UnknownPolicy


@dataclass(frozen=True)
class UnknownRule:
    """The rule for texts of no learned task.

    Attributes:
        policy: nearest: they are answered as all others; bare: by the backbone without adapters; refuse: not at all.
        threshold: the distance above which a text is unknown; None: the router cannot tell.
    """

    policy: UnknownPolicy = "nearest"
    threshold: float | None = None

    @staticmethod
    def of(router: Router, policy: UnknownPolicy, false_alarms: float, whose: str) -> UnknownRule:
        """Return the rule with the router's threshold.

        Args:
            false_alarms: the largest share of texts of the learned tasks that may count as unknown.
            whose: names the router in messages, `snapshot 3`.

        Raises:
            BankError: the policy needs a threshold, and the router has none.
        """
        try:
            threshold = router.unknown_above(false_alarms)
        except RetrievalError as error:
            if policy != "nearest":
                raise BankError(f"unknown={policy} cannot be used with {whose}: {error}; or use nearest") from error
            threshold = None
        return UnknownRule(policy, threshold)

    def applied(self, mixture: Mixture) -> Mixture:
        """Return the mixture with `unknown` set where it is known, and under `bare` without weights for such texts."""
        if self.threshold is None or mixture.ood_distances is None:
            return mixture
        unknown_B = mixture.ood_distances.cpu() > self.threshold
        if self.policy != "bare" or not bool(unknown_B.any()):
            return replace(mixture, unknown=unknown_B)

        def without(part: Mixture) -> Mixture:
            return replace(part, weights=part.weights.masked_fill(unknown_B[:, None].to(part.weights.device), 0.0))

        unpruned, by_text = (part and without(part) for part in (mixture.unpruned, mixture.by_text))
        return replace(without(mixture), unknown=unknown_B, unpruned=unpruned, by_text=by_text)

    def refuses(self, mixture: Mixture | None) -> list[int]:
        """Return the places of the texts that get no answer."""
        if self.policy != "refuse" or mixture is None or mixture.unknown is None:
            return []
        places: list[int] = mixture.unknown.nonzero().flatten().tolist()
        return places
