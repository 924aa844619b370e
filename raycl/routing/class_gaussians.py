"""EPI's router: a Gaussian for each class, and the adapter of the class that is nearest to a text.

    adapter(x) = argmin over adapters t of  min over classes c of t of  (q - mu_c)^T S^+ (q - mu_c)

q is the mean of the frozen backbone's last hidden states over the text's tokens (`mean_pooled`), mu_c the mean of a
class's training texts. S is shared: the mean over a task's classes of their covariances (divisor n - 1), then the mean
over tasks. S^+ is its pseudo-inverse, without singular values below D times the rounding error of float32, as the
authors' code computes it (Wang et al. 2023, "Rehearsal-free Continual Language Learning via Efficient Parameter
Isolation", section on task identification; model/epi.py and trainers/epi.py of the released code). Deviations: a class
with one text has no covariance and is left out of the mean; where no class has one, distances are Euclidean. Each
task's covariance is kept, and not their sum alone, so that a task can be removed. Sums are in float64. Queries of a few
dev texts are kept too: a text's distance among theirs is its out-of-distribution score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from raycl.backbone.base import mean_pooled
from raycl.routing.router import Need, Owners, PromptRouter
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.routing.statistics import OodCalibrator
from raycl.types import Mixture, RouterState

MEANS, COVARIANCE, SAMPLE = "means", "covariance", "sample"
"""Kinds of tensors of a router's state: `<kind>/<adapter>`."""


class ClassStatistics:
    """Sums over the texts of one task, from which come class means and the mean of the classes' covariances.

    The number of texts of every class is known before the first one is read. So one `[D, D]` sum is enough, to which
    each text of class c adds with the weight 1 / (classes * (n_c - 1)); sums of several workers may be added up.
    """

    def __init__(self, counts_C: Tensor, dimensions: int, device: torch.device | str = "cpu") -> None:
        """Start without texts.

        Args:
            counts_C: texts of each class, at least one.
        """
        self.counts_C: Tensor = counts_C.to(device, torch.float64)
        varied_C = self.counts_C > 1
        number = varied_C.sum().clamp(min=1)
        self._weights_C = torch.where(varied_C, 1 / ((self.counts_C - 1).clamp(min=1) * number), 0.0)
        self.sums_CD: Tensor = torch.zeros(len(counts_C), dimensions, dtype=torch.float64, device=device)
        self.products_DD: Tensor = torch.zeros(dimensions, dimensions, dtype=torch.float64, device=device)

    def add(self, queries_BD: Tensor, classes_B: Tensor) -> None:
        """Count texts with their classes."""
        queries = queries_BD.double()
        self.sums_CD.index_add_(0, classes_B, queries)
        self.products_DD += (queries * self._weights_C[classes_B, None]).T @ queries

    def result(self) -> tuple[Tensor, Tensor]:
        """Return means `[C, D]` of the classes and the mean of their covariances `[D, D]`, float32 on the CPU."""
        means_CD = self.sums_CD / self.counts_C[:, None]
        middle_DD = (means_CD * (self._weights_C * self.counts_C)[:, None]).T @ means_CD
        return means_CD.float().cpu(), (self.products_DD - middle_DD).float().cpu()


class ClassGaussians:
    """Classes of all tasks so far.

    Attributes:
        means: adapter -> `[C, D]` means of its classes. covariances: adapter -> `[D, D]`.
        samples: adapter -> `[n, D]` queries of dev texts, of adapters that have any.
        ridge: share of the mean variance that is added to the diagonal; 0: none.
    """

    def __init__(self, ridge: float = 0.0) -> None:
        self.means: dict[str, Tensor] = {}
        self.covariances: dict[str, Tensor] = {}
        self.samples: dict[str, Tensor] = {}
        self.ridge = ridge
        self._scores: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._calibrator: OodCalibrator | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters in the order of learning."""
        return tuple(self.means)

    @property
    def dimensions(self) -> int:
        """D; 0 before the first task."""
        return next((means_CD.shape[1] for means_CD in self.means.values()), 0)

    def add(self, name: str, means_CD: Tensor, covariance_DD: Tensor, sample_ND: Tensor | None = None) -> None:
        """Add a task's classes and queries of dev texts, which replace those of the same name."""
        self.means[name], self.covariances[name] = means_CD, covariance_DD
        self.samples.pop(name, None)
        if sample_ND is not None and len(sample_ND):
            self.samples[name] = sample_ND
        self._scores = self._calibrator = None

    def join(self, other: ClassGaussians) -> None:
        """Add the tasks of another."""
        for name in other.names:
            self.add(name, other.means[name], other.covariances[name], other.samples.get(name))

    def nearest(self, queries_BD: Tensor) -> Tensor:
        """Return `[B]`, the number of the adapter with the nearest class; of equals the first."""
        directions_KD, offsets_K, _, owners_K = self._prepared(queries_BD.device)
        return owners_K[(queries_BD.double() @ directions_KD.T - offsets_K).argmax(1)]

    def distances(self, queries_BD: Tensor) -> Tensor:
        """Return `[B]`, the squared distance to the nearest class."""
        directions_KD, offsets_K, precision_DD, _ = self._prepared(queries_BD.device)
        queries = queries_BD.double()
        highest_B = (queries @ directions_KD.T - offsets_K).max(1).values
        return ((queries @ precision_DD) * queries).sum(1) - 2 * highest_B

    def calibrated(self) -> OodCalibrator:
        """Return the calibrator of out-of-distribution scores.

        Raises:
            RetrievalError: no dev text of any task was kept.
        """
        if self._calibrator is None:
            self._calibrator = OodCalibrator(self.distances, list(self.samples.values()))
        return self._calibrator

    def _prepared(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return S^+ mu `[K, D]` and mu^T S^+ mu / 2 `[K]` of all K classes, S^+, and the number of each class's
        adapter `[K]`; a distance is -2 (q S^+ mu - that), but for a term that all classes share."""
        if self._scores is None or self._scores[0].device != device:
            means_KD = torch.cat(list(self.means.values())).to(device, torch.float64)
            shared_DD = torch.stack(list(self.covariances.values())).double().mean(0).to(device)
            precision_DD = inverse(shared_DD, self.ridge)
            directions_KD = means_KD @ precision_DD
            counts = torch.tensor([len(means_CD) for means_CD in self.means.values()], device=device)
            owners_K = torch.arange(len(counts), device=device).repeat_interleave(counts)
            self._scores = directions_KD, (directions_KD * means_KD).sum(1) / 2, precision_DD, owners_K
        return self._scores

    def selected(self, queries_BD: Tensor) -> Mixture:
        """Return the nearest adapter of each text with weight 1, the others with 0; weights on the CPU."""
        nearest_B = self.nearest(queries_BD).cpu()
        return Mixture(self.names, torch.nn.functional.one_hot(nearest_B, len(self.means)).float())

    def settings(self) -> dict[str, Any]:
        """Return the JSON-able settings, everything but the tensors."""
        return {"tasks": list(self.means), "ridge": self.ridge}

    def tensors(self) -> dict[str, Tensor]:
        """Return `means/<adapter>`, `covariance/<adapter>`, and `sample/<adapter>` if it has one."""
        kinds = {MEANS: self.means, COVARIANCE: self.covariances, SAMPLE: self.samples}
        return {f"{kind}/{name}": value for kind, held in kinds.items() for name, value in held.items()}

    @staticmethod
    def of(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ClassGaussians:
        """Restore from `settings` and `tensors`; tasks whose tensors were removed are left out."""
        gaussians = ClassGaussians(settings["ridge"])
        for name in settings["tasks"]:
            if f"{MEANS}/{name}" in tensors:
                values = [tensors.get(f"{kind}/{name}") for kind in (MEANS, COVARIANCE, SAMPLE)]
                gaussians.add(name, *(value.float() for value in values if value is not None))
        return gaussians


def inverse(covariance_DD: Tensor, ridge: float = 0.0) -> Tensor:
    """Return the pseudo-inverse; with a ridge, the inverse of the covariance plus the ridge; for zero, the identity.

    A factor of the covariance is one of the inverse, so it changes no comparison of distances.
    """
    mean = covariance_DD.diagonal().mean()
    identity = torch.eye(len(covariance_DD), dtype=covariance_DD.dtype, device=covariance_DD.device)
    if not float(mean) > 0:
        return identity
    if ridge:
        inverted: Tensor = torch.linalg.inv(covariance_DD + ridge * mean * identity)
        return inverted
    smallest = len(covariance_DD) * torch.finfo(torch.float32).eps
    inverse_DD: Tensor = torch.linalg.pinv(covariance_DD, rtol=smallest, hermitian=True)
    return inverse_DD


class ClassGaussiansRouter(PromptRouter):
    """The classes of a snapshot, over the backbone's last hidden states of whole prompts."""

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden_states"})
    kind: ClassVar[str] = "class_gaussians"

    def __init__(self, gaussians: ClassGaussians) -> None:
        self.gaussians = gaussians
        self.dimensions: int = gaussians.dimensions

    def mixture(self, embeddings_BLD: Tensor, mask_BL: Tensor, tasks: Sequence[str] | None) -> Mixture:
        queries_BD = mean_pooled(embeddings_BLD, mask_BL)
        mixture = self.gaussians.selected(queries_BD)
        if not self.gaussians.samples:
            return replace(mixture, unpruned=mixture)
        distances_B = self.gaussians.distances(queries_BD)
        scores_B = self.gaussians.calibrated().scores(distances_B).cpu()
        return replace(mixture, unpruned=mixture, ood_scores=scores_B, ood_distances=distances_B.cpu())

    def unknown_above(self, false_alarms: float) -> float:
        return self.gaussians.calibrated().threshold(false_alarms)

    @classmethod
    def restored(
        cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()
    ) -> ClassGaussiansRouter:
        return cls(ClassGaussians.of(state.settings, state.tensors))
