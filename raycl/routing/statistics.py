"""Statistics fitted to the vectors of texts in closed form: a discriminant, out-of-distribution scores.

The discriminant is streaming linear discriminant analysis over tasks (Hayes and Kanan 2020). Each task leaves its
count, its mean and its scatter of normalised queries. These are sums: exact in one pass, the same for any order of
tasks, and a task is removed by leaving its sums out.

Routers that read prompts also have a discriminant over the means of bare texts' token embeddings (`BareTexts`): they
learn from texts in their tasks' prompts, and distinguish tasks mainly by the instructions. A text that comes without
one is assigned to a task by its own words, which determines its prompt. On SmolLM2 96 of 100 texts of four tasks find
theirs, and 92 of ten, with 100 rows a task. Texts of no task are found by it too.

An out-of-distribution score is the share of known texts of the tasks that are nearer to a task than a text is. A
Mahalanobis distance has no meaning by itself; its size depends on the encoder, and on the covariance that every new
task changes. A share of known texts is easy to interpret. So a few texts of each task are kept that its statistics do
not contain (those lie too near), as queries and not as distances: distances are computed again when tasks are added or
removed, and a removed task leaves no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raycl.errors import RetrievalError
from raycl.routing.code_index import SAMPLE, CodeIndex, codes_pay
from raycl.routing.score_summary import texts_below
from raycl.types import Mixture

KEPT = 64
"""The number of texts kept of each task, 98 KB at 384 dimensions; the share of one task alone is then known in steps of
1.6 %."""

COMPARED = 16_384
"""The number of kept texts that a text is compared with at most, the same number of each task: those of 256 tasks. A
share is then known in steps of 0.006 %, and what is computed once grows with the number of tasks, not with its
square."""

ROWS = 1024
"""The number of kept texts whose distances are computed together, to bound memory at many tasks."""

NEAREST = 4
"""The number of tasks whose distances are computed in double precision: the nearest of all in single precision."""


def sample_rows(count: int) -> Tensor:
    """Return at most `KEPT` of so many rows, drawn the same every time: nothing but the task itself decides."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:KEPT]


class OodCalibrator:
    """The distances of known texts under the statistics of the current tasks."""

    def __init__(self, distances: Callable[[Tensor], Tensor], samples: Sequence[Tensor]) -> None:
        """Measure the known texts.

        Args:
            distances: returns the distances `[B]` of queries `[B, c]` to the nearest task, on the queries' device.
            samples: `[n, c]` queries of each task in an order drawn at random.

        Raises:
            RetrievalError: there are no samples.
        """
        if not samples:
            raise RetrievalError(
                "this router keeps no dev texts to compare with (its tasks have none, or an earlier version of raycl "
                "wrote it): there is no out-of-distribution score"
            )
        of_each = max(1, COMPARED // len(samples))
        parts = torch.split(torch.cat([sample[:of_each] for sample in samples]), ROWS)
        self._known = torch.cat([distances(part) for part in parts]).sort().values

    def __len__(self) -> int:
        """Return the number of known texts."""
        return len(self._known)

    def scores(self, distances_B: Tensor) -> Tensor:
        """Return `[B]` from 0 to 1: the share of known texts that are nearer to their nearest task than a text of this
        distance is to its.

        Texts of all known tasks together spread evenly over 0 to 1; one minus the share is the p-value of a text being
        known. (Texts of one task may lie lower or higher: tasks differ in how far their texts spread.) The mean share
        of a new task's texts is the area under the ROC curve (AUROC) of telling them from known ones.
        """
        self._known = self._known.to(distances_B.device)
        return torch.searchsorted(self._known, distances_B) / len(self._known)

    def threshold(self, false_alarms: float) -> float:
        """Return the distance above which a text of the tasks lies with at most this probability (`texts_below`).

        Raises:
            RetrievalError: there are too few known texts for so small a share.
        """
        count = len(self._known)
        place = texts_below(count, false_alarms)
        if place is None:
            least = math.ceil(1 / false_alarms - 1e-9) - 1
            raise RetrievalError(
                f"false_alarms={false_alarms:g} takes {least} kept dev texts, and there are {count}: use "
                f"false_alarms={math.ceil(1e3 / (count + 1)) / 1e3:g} or more, or learn with more dev rows "
                "(stream.dev_rows, stream.dev_fraction)"
            )
        return float(self._known[place - 1])


RIDGE = 0.01
"""The share of the mean variance that is added to the diagonal; 0.001 to 0.1 route the same within 0.4 points (measured
on MiniLM)."""

BACKGROUND = 0.9
"""The share of the distance to the middle of all tasks that is subtracted from the distance to the nearest (Ren et al.
2021, "A simple fix to Mahalanobis distance for improving near-OOD detection": 1, which detects nothing with one task
and little with two).

AUROC of telling texts of a task that was not learned from dev texts of k that were, mean over 12 draws from ten tasks
of Long Sequence with the packaged encoder, at k = 1, 3, 6, 9: 92, 86, 80, 78 with 0; 92, 88, 86, 86 with 0.9; rounding
alone, 82, 83, 86 with 1. Chosen on these draws, out of 0, 0.5, 0.8, 0.9 and 1."""

WIDEST = 1024
"""The number of leading dimensions of bare texts' embeddings that are read; with 384 of 576, 1 of 100 texts fewer find
their task."""

DIRECTIONS = 32
"""The number of directions in which the covariance of an adapter's bare texts is kept. All 576 find as many texts'
tasks at 100 rows a task, and 0.6 % more at 1000, but take 1.3 MB a task instead of 74 KB."""


@dataclass(frozen=True)
class Statistics:
    """Sums over one task's texts: count n, mean `[c]`, scatter `[c, c]` around the mean."""

    count: int
    mean: Tensor
    scatter: Tensor

    @staticmethod
    def of(queries_BC: Tensor) -> Statistics:
        """Compute the statistics of a task's queries.

        Raises:
            RetrievalError: no texts.
        """
        if not len(queries_BC):
            raise RetrievalError("a task without texts has no statistics")
        unit = nn.functional.normalize(queries_BC.double(), dim=1)
        mean = unit.mean(0)
        centred = unit - mean
        scatter = centred.T @ centred
        return Statistics(len(unit), mean.float(), scatter.float())  # summed in double precision, kept in single


class NearestTasks(NamedTuple):
    """The tasks that are most probable for each text, the most probable first.

    Attributes:
        scores: `[B, K]` `Discriminant.scores`. tasks: `[B, K]` numbers of the tasks.
    """

    scores: Tensor
    tasks: Tensor

    def chances(self, top_k: int, count: int) -> Tensor:
        """Return `[B, T]` softmax of the scores over the best `top_k` of `count` tasks, 0 for the others."""
        chances_BK = self.scores[:, :top_k].softmax(1)
        return chances_BK.new_zeros(len(chances_BK), count).scatter(1, self.tasks[:, :top_k], chances_BK)


class Discriminant:
    """Scores of tasks for queries, on the device where the queries are.

    Attributes:
        tasks: tasks in the order of columns.
        ridge: share of the mean variance that is added to the diagonal.
    """

    def __init__(self, statistics: Mapping[str, Statistics], ridge: float = RIDGE) -> None:
        self.tasks: tuple[str, ...] = tuple(statistics)
        self.ridge = ridge
        parts = list(statistics.values())
        means = torch.stack([task.mean for task in parts]).double()
        shared = torch.zeros_like(parts[0].scatter, dtype=torch.float64)
        for task in parts:
            shared += task.scatter
        counts = torch.tensor([task.count for task in parts], dtype=torch.float64)
        shared /= counts.sum()
        self._precision = _inverse(shared, ridge)
        self._pulled = means @ self._precision
        self._around = (self._pulled * means).sum(1)
        self._directions, self._offsets = self._pulled.float(), self._around.float() / 2
        self._means, self._shared, self._shares = means, shared, counts / counts.sum()

    def scores(self, queries_BC: Tensor) -> Tensor:
        """Return `[B, T]` log-likelihoods but for a constant per text."""
        unit = nn.functional.normalize(queries_BC.float(), dim=1)
        self._follow(unit.device)
        scores: Tensor = unit @ self._directions.T - self._offsets
        return scores

    def nearest(self, queries_BC: Tensor, count: int) -> NearestTasks:
        """Return the tasks with the largest scores, all of them where there are fewer than `count`.

        A CPU compares codes of the tasks' directions if there are thousands (`CodeIndex`).
        """
        count = min(count, len(self.tasks))
        if not codes_pay(len(self.tasks), queries_BC.device):
            return NearestTasks(*self.scores(queries_BC).topk(count, dim=1))
        padded_BC = _padded(nn.functional.normalize(queries_BC.float(), dim=1), 1.0)
        scores_gBK, tasks_gBK = self._codes.search(padded_BC[None], count)
        return NearestTasks(scores_gBK[0], tasks_gBK[0])

    @cached_property
    def _codes(self) -> CodeIndex:
        """Return codes of directions and offsets; recall is measured on texts drawn from the tasks' Gaussians."""
        draw = torch.Generator().manual_seed(0)
        near = self._means[torch.randperm(len(self._means), generator=draw)[:SAMPLE]].float()
        spread = torch.linalg.cholesky(_ridged(self._shared, self.ridge)).float()
        texts = nn.functional.normalize(near + torch.randn(near.shape, generator=draw) @ spread.T, dim=1)
        return CodeIndex(_padded(self._directions, -self._offsets)[None], _padded(texts, 1.0)[None], NEAREST)

    def _follow(self, device: torch.device) -> None:
        if self._directions.device == device:
            return
        for name in ("_precision", "_pulled", "_around", "_directions", "_offsets", "_means", "_shared", "_shares"):
            setattr(self, name, getattr(self, name).to(device))
        for name in ("_contrast", "_codes"):
            self.__dict__.pop(name, None)

    def _of_nearest(self, unit_BC: Tensor, nearest: NearestTasks) -> Tensor:
        """Return `[B]` smallest squared distance to one of the nearest tasks' means, less that to zero."""
        near_BK = nearest.tasks[:, :NEAREST]
        along_BK = torch.bmm(unit_BC[:, None], self._pulled[near_BK].transpose(1, 2))[:, 0]
        smallest_B: Tensor = (self._around[near_BK] - 2 * along_BK).min(1).values
        return smallest_B

    def relative_distances(self, queries_BC: Tensor, nearest: NearestTasks | None = None) -> Tensor:
        """Return `[B]` squared distance to the nearest task's mean, less `BACKGROUND` of that to all tasks' middle.

        A text that is unusual for the nearest task alone gets a larger value than one that is unusual for all of them.

        Args:
            nearest: `nearest` of these queries, of `NEAREST` tasks or more, where it is known.
        """
        self._follow(queries_BC.device)
        matrix_CC, vector_C, constant = self._contrast
        unit_BC = nn.functional.normalize(queries_BC.double(), dim=1)
        both_B = ((unit_BC @ matrix_CC + vector_C) * unit_BC).sum(1) - constant
        return (both_B + self._of_nearest(unit_BC, nearest or self.nearest(queries_BC, NEAREST))).float()

    @cached_property
    def _contrast(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return matrix, vector and constant of the quadratic form of a unit vector that is its squared distance to
        zero less `BACKGROUND` of that to the middle of all tasks."""
        middle = self._shares @ self._means
        apart = self._means - middle
        whole = _inverse(self._shared + (self._shares[:, None] * apart).T @ apart, self.ridge)
        pulled = BACKGROUND * (whole @ middle)
        return self._precision - BACKGROUND * whole, 2 * pulled, pulled @ middle


def _padded(rows_BC: Tensor, last_B: Tensor | float) -> Tensor:
    """Return `[B, c + 1]` or `[B, c + 2]`, whichever is even: the rows, the last values and zeros."""
    padded = rows_BC.new_zeros(len(rows_BC), rows_BC.shape[1] // 2 * 2 + 2)
    padded[:, : rows_BC.shape[1]] = rows_BC
    padded[:, rows_BC.shape[1]] = last_B
    return padded


def _ridged(covariance: Tensor, share: float) -> Tensor:
    ridge = share * covariance.diagonal().mean().clamp_min(1e-9)
    return covariance + ridge * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)


def _inverse(covariance: Tensor, share: float) -> Tensor:
    inverse: Tensor = torch.linalg.inv(_ridged(covariance, share))
    return inverse


class Outline(NamedTuple):
    """Statistics of the texts of an adapter, in few numbers.

    Attributes:
        number: number of texts, `[1]`. mean: `[c]`.
        factor: `[k, c]`; its product with itself is the scatter in the k directions where the scatter is largest.
        rest: `[1]`, mean over all dimensions of the scatter in the other directions.
        sample: `[n, c]` queries of a few dev texts, which are not among these texts.
    """

    number: Tensor
    mean: Tensor
    factor: Tensor
    rest: Tensor
    sample: Tensor

    @staticmethod
    def of(queries_NC: Tensor, sample_nC: Tensor | None = None) -> Outline:
        """Compute the outline of an adapter's texts, with dev texts of its tasks."""
        sample_nC = queries_NC[:0] if sample_nC is None else sample_nC
        known = Statistics.of(queries_NC)
        values_C, vectors_CC = torch.linalg.eigh(known.scatter.double())
        values_C = values_C.clamp_min(0)
        factor_KC = (vectors_CC * values_C.sqrt()).T[-DIRECTIONS:]
        rest = values_C[:-DIRECTIONS].sum() / len(values_C)
        number, factor_KC = torch.tensor([known.count]), factor_KC.float().contiguous()
        return Outline(number, known.mean, factor_KC, rest.float()[None], sample_nC.float().contiguous())

    def statistics(self) -> Statistics:
        """Return the statistics for a discriminant."""
        scatter_CC = self.factor.T @ self.factor + torch.eye(len(self.mean)) * self.rest
        return Statistics(int(self.number), self.mean, scatter_CC)


KINDS_OF_OUTLINES = tuple(f"bare_{part}" for part in Outline._fields)
"""Kinds of tensors of a router's state: `<kind>/<adapter>`."""


class BareTexts:
    """Outlines of the texts of all phases so far, by the names of the phases, which adapters of their own have too."""

    def __init__(self) -> None:
        self._outlines: dict[str, Outline] = {}
        self._found: tuple[tuple[str, ...], Discriminant] | None = None
        self._calibrator: OodCalibrator | None = None

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> BareTexts:
        """Restore from `tensors`, among which may be others."""
        bare, first = BareTexts(), f"{KINDS_OF_OUTLINES[0]}/"
        names = [name.removeprefix(first) for name in tensors if name.startswith(first)]
        bare._outlines = {name: Outline(*(tensors[f"{kind}/{name}"] for kind in KINDS_OF_OUTLINES)) for name in names}
        return bare

    def __bool__(self) -> bool:
        return bool(self._outlines)

    def add(self, name: str, queries_ND: Tensor, sample_nD: Tensor | None = None) -> None:
        """Add a phase's texts.

        Args:
            queries_ND: mean of each text's token embeddings. sample_nD: those of a few dev texts.
        """
        sample_nD = None if sample_nD is None else sample_nD[:, :WIDEST].cpu()
        self._outlines[name] = Outline.of(queries_ND[:, :WIDEST].cpu(), sample_nD)
        self._found = self._calibrator = None

    def join(self, other: BareTexts) -> None:
        """Add the phases of another."""
        self._outlines |= other._outlines
        self._found = self._calibrator = None

    def rated(self, mixture: Mixture, queries_BD: Tensor) -> Mixture:
        """Return a mixture with out-of-distribution distances and scores of its texts, where dev texts were kept."""
        if not self._has_samples:
            return mixture
        distances_B = self._distances(queries_BD.cpu())
        return replace(mixture, ood_distances=distances_B, ood_scores=self.calibrated().scores(distances_B))

    def calibrated(self) -> OodCalibrator:
        """Return the calibrator of the scores.

        Raises:
            RetrievalError: no dev text of any phase was kept.
        """
        if self._calibrator is None:
            samples = [outline.sample for outline in self._outlines.values() if len(outline.sample)]
            self._calibrator = OodCalibrator(self._distances, samples)
        return self._calibrator

    @property
    def _has_samples(self) -> bool:
        return any(len(outline.sample) for outline in self._outlines.values())

    def _distances(self, queries_BD: Tensor) -> Tensor:
        return self._over(tuple(self._outlines)).relative_distances(queries_BD[:, :WIDEST])

    def means(self) -> dict[str, Tensor]:
        """Return adapter -> mean of its texts, as `mean_of` has it."""
        return {name: outline.mean for name, outline in self._outlines.items()}

    @staticmethod
    def mean_of(queries_ND: Tensor) -> Tensor:
        """Return the mean of texts of which no outline is kept; zeros without texts."""
        return nn.functional.normalize(queries_ND[:, :WIDEST].cpu().double(), dim=1).sum(0).float() / max(
            1, len(queries_ND)
        )

    def weights(self, names: Sequence[str], queries_BD: Tensor) -> Mixture | None:
        """Return how probable each of these adapters is for each text, on the CPU; None: one lacks an outline."""
        if not names or any(name not in self._outlines for name in names):
            return None
        nearest = self._over(tuple(names)).nearest(queries_BD[:, :WIDEST], len(names))
        return Mixture(tuple(names), nearest.chances(len(names), len(names)).cpu())

    def _over(self, names: tuple[str, ...]) -> Discriminant:
        """Return the discriminant; its ridge grows with dimensions per text, since few texts leave it uncertain."""
        if self._found is None or self._found[0] != names:
            known = {name: self._outlines[name].statistics() for name in names}
            width, count = len(known[names[0]].mean), sum(outline.count for outline in known.values())
            self._found = names, Discriminant(known, width / count)
        return self._found[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return `<kind>/<adapter>` of `KINDS_OF_OUTLINES`."""
        return {
            f"{kind}/{name}": tensor
            for name, outline in self._outlines.items()
            for kind, tensor in zip(KINDS_OF_OUTLINES, outline, strict=True)
        }
