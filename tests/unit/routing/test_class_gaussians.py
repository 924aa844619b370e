"""EPI's router by hand: statistics of classes, the shared covariance, the nearest class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raycl.errors import BankError, RetrievalError
from raycl.routing.class_gaussians import ClassGaussians, ClassGaussiansRouter, ClassStatistics, inverse
from raycl.routing.routers import make_router, without
from raycl.types import RouterState

OWNERS = {"a": ("a",), "b": ("b",)}


def texts(rows: int = 60, width: int = 5) -> tuple[Tensor, Tensor]:
    """Return queries far from zero with unlike variances, and their classes: one of them has a single text."""
    draw = torch.Generator().manual_seed(0)
    classes = torch.arange(rows) % 3
    classes[0] = 3
    scale = torch.tensor([3.0, 1.0, 0.3, 2.0, 0.1])[:width]
    return torch.randn(rows, width, generator=draw) * scale + 7 * classes[:, None] + 50, classes


def gaussians(ridge: float = 0.0) -> ClassGaussians:
    """Return two tasks whose classes differ along a direction of large variance (0) and one of small variance (1)."""
    class_gaussians = ClassGaussians(ridge)
    class_gaussians.add("a", torch.tensor([[0.0, 0.0], [8.0, 8.0]]), torch.diag(torch.tensor([6.0, 0.2])))
    class_gaussians.add("b", torch.tensor([[0.0, 1.0]]), torch.diag(torch.tensor([2.0, 0.0])))
    return class_gaussians


def test_means_and_the_mean_of_the_classes_covariances() -> None:
    queries, classes = texts()
    parts = [ClassStatistics(torch.bincount(classes), 5) for _ in range(2)]
    parts[0].add(queries[:25], classes[:25])
    parts[1].add(queries[25:], classes[25:])
    parts[0].sums_CD += parts[1].sums_CD  # as sums over two workers
    parts[0].products_DD += parts[1].products_DD
    means, covariance = parts[0].result()
    by_class = [queries[classes == number] for number in range(4)]
    torch.testing.assert_close(means, torch.stack([own.mean(0) for own in by_class]))
    expected = torch.stack([torch.cov(own.T) for own in by_class[:3]]).mean(0)
    torch.testing.assert_close(covariance, expected, atol=1e-4, rtol=1e-4)


def test_a_text_on_a_class_mean_goes_to_that_classs_task() -> None:
    result = gaussians()
    assert result.nearest(torch.tensor([[0.0, 0.0], [8.0, 8.0], [0.0, 1.0]])).tolist() == [0, 0, 1]


def test_the_ood_score_is_the_share_of_dev_texts_that_are_nearer_to_a_class() -> None:
    result = gaussians()
    queries = torch.tensor([[4.0, 1.0], [8.0, 8.0], [30.0, 9.0]])
    assert not result.samples, "no dev text was kept"
    dev = torch.tensor([[1.0, 0.0], [8.0, 7.0], [0.0, 1.5], [2.0, 0.4]])
    result.add("b", result.means["b"], result.covariances["b"], dev)
    shared = torch.linalg.inv(torch.diag(torch.tensor([4.0, 0.1], dtype=torch.float64)))
    means = torch.tensor([[0.0, 0.0], [8.0, 8.0], [0.0, 1.0]], dtype=torch.float64)

    def squared(rows: Tensor) -> Tensor:
        apart = rows.double()[:, None] - means
        return torch.einsum("bkd,de,bke->bk", apart, shared, apart).min(1).values

    torch.testing.assert_close(result.distances(queries), squared(queries))
    expected = [float((squared(dev) < item).float().mean()) for item in squared(queries)]
    scores = result.calibrated().scores(result.distances(queries))
    assert scores.tolist() == expected and expected[1] == 0 and expected[2] == 1
    whole = RouterState("class_gaussians", result.settings(), result.tensors())
    routed = make_router(whole, OWNERS).route_embeddings(queries[:, None], torch.ones(3, 1))
    assert routed.ood_scores is not None and routed.ood_scores.tolist() == expected
    assert set(result.tensors()) == {"means/a", "covariance/a", "means/b", "covariance/b", "sample/b"}
    alone = without(whole, "b")
    assert make_router(alone, OWNERS).route_embeddings(queries[:, None], torch.ones(3, 1)).ood_scores is None


def test_distances_are_by_the_shared_covariance() -> None:
    result = gaussians()
    shared = torch.diag(torch.tensor([4.0, 0.1]))
    queries = torch.tensor([[4.0, 1.0], [3.0, 0.6], [6.0, 0.45], [5.0, 4.3]])
    means = torch.tensor([[0.0, 0.0], [8.0, 8.0], [0.0, 1.0]])
    apart = queries[:, None] - means
    squared = torch.einsum("bkd,de,bke->bk", apart, torch.linalg.inv(shared), apart)
    assert result.nearest(queries).tolist() == torch.tensor([0, 0, 1])[squared.argmin(1)].tolist() == [1, 1, 0, 1]
    assert torch.tensor([0, 0, 1])[apart.square().sum(2).argmin(1)].tolist()[3] == 0, "Euclid would choose another"


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_scaling_the_covariance_changes_no_choice(ridge: float) -> None:
    queries = torch.randn(200, 2, generator=torch.Generator().manual_seed(1)) * 4
    result, scaled = gaussians(ridge), ClassGaussians(ridge)
    for name in result.names:
        scaled.add(name, result.means[name], result.covariances[name] * 1e4)
    assert len(set(result.nearest(queries).tolist())) == 2
    assert torch.equal(result.nearest(queries), scaled.nearest(queries))


def test_directions_that_are_rounding_errors_do_not_count() -> None:
    covariance = torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64))
    assert inverse(covariance).diagonal().tolist() == pytest.approx([1.0, 0.0])
    assert torch.equal(inverse(torch.zeros(2, 2)), torch.eye(2)), "without any variance distances are Euclidean"
    assert inverse(covariance, ridge=1.0).diagonal().tolist() == pytest.approx([1 / 1.5, 2.0])


def test_a_snapshot_without_a_task_chooses_among_the_others() -> None:
    source = gaussians(0.1)
    state = RouterState("class_gaussians", source.settings(), source.tensors())
    states = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [99.0, 99.0]], [[0.0, 2.0], [0.0, 0.0], [5.0, 5.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    router = make_router(state, OWNERS)
    assert isinstance(router, ClassGaussiansRouter) and router.gaussians.ridge == 0.1
    mixture = router.route_embeddings(states, mask)
    assert mixture.names == ("a", "b") and mixture.weights.tolist() == [[1, 0], [0, 1]]
    left = make_router(without(state, "a"), OWNERS).route_embeddings(states, mask)
    assert left.names == ("b",) and left.weights.tolist() == [[1], [1]]


def test_texts_alone_and_another_backbone_are_refused() -> None:
    router = ClassGaussiansRouter(gaussians())
    with pytest.raises(BankError, match="router is 'class_gaussians', which reads prompts with the backbone"):
        router.route(["x"], None)
    with pytest.raises(RetrievalError, match="of 2 dimensions, this backbone's have 3: use the"):
        router.route_embeddings(torch.zeros(1, 1, 3), torch.ones(1, 1))
