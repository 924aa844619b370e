"""Rows that share a mask bit: equal sizes, and the two ends, one row a cluster and one cluster a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from migu_started import Started
from tiny import Lab, Stop, run, trace

from raycl.methods.migu.clusters import CoMagnitude, balanced_kmeans, sequential, spectral, weight_clusters
from raycl.methods.migu.observed_layers import LayerUnits, Layout, observed_layers
from raycl.methods.migu.row_selection import Groups, kept, masked_count
from raycl.storage import Storage


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("rows", "count"), [(12, 4), (12, 12), (12, 1), (13, 5), (8, 100)])
def test_clusters_are_of_equal_size(rows: int, count: int) -> None:
    sizes = torch.bincount(sequential(rows, count))
    assert len(sizes) == min(rows, count) and int(sizes.max() - sizes.min()) <= 1
    for result in (balanced_kmeans(drawn(rows, 6), count, 0), spectral(drawn(rows, rows).abs(), count, 0)):
        assert torch.equal(torch.bincount(result).sort()[0], sizes.sort()[0])
    assert torch.equal(balanced_kmeans(drawn(rows, 6), count, 0), balanced_kmeans(drawn(rows, 6), count, 0))


def test_kmeans_finds_rows_of_one_direction_whatever_their_length() -> None:
    directions = torch.eye(4).repeat(3, 1) * torch.rand(12, 1, generator=torch.Generator().manual_seed(1)).add(0.1)
    viewed = balanced_kmeans(directions, 4, 3).view(3, 4)
    assert torch.equal(viewed[0], viewed[1]) and torch.equal(viewed[0], viewed[2]) and len(set(viewed[0].tolist())) == 4


def test_spectral_clusters_are_the_blocks_of_the_affinity() -> None:
    block = torch.arange(12) % 3
    affinity = (block.unsqueeze(0) == block.unsqueeze(1)).float() + 0.01
    result = spectral(affinity, 3, 0)
    assert torch.equal(result.unsqueeze(0) == result.unsqueeze(1), block.unsqueeze(0) == block.unsqueeze(1))


def test_a_cluster_has_the_sum_of_its_members() -> None:
    n, into = torch.tensor([1.0, 5.0, 2.0, 2.0, 4.0, 1.0]), torch.ones(6, dtype=torch.bool)
    groups = Groups(torch.arange(6).unsqueeze(0), torch.tensor([[0, 1, 0, 2, 1, 2]]))
    groups.choose(n, 0.4, "floor", into)  # floor(0.4 * 3) = 1 cluster: of 3 = 1 + 2 = 2 + 1 the first
    assert into.tolist() == [False, True, False, True, True, True]


def test_co_magnitude_sums_products_of_magnitudes_over_real_tokens() -> None:
    key = ("x", "output")
    layout = Layout({key: LayerUnits("x", slice(0, 3), "source", (2, 1))}, {}, 3)  # type: ignore[dict-item]
    units = CoMagnitude(layout, torch.device("cpu"))
    y = torch.tensor([[[1.0, -2.0, 3.0], [-1.0, 1.0, 1.0], [9.0, 9.0, 9.0]]])
    units.add(key, y, torch.tensor([[1.0, 1.0, 0.0]]))
    assert [affinity.tolist() for affinity in units.affinities[key]] == [[[2.0, 3.0], [3.0, 5.0]], [[10.0]]]


@pytest.mark.parametrize(
    ("method", "ways"), [("finetune", ("weight", "co_magnitude", "sequential")), ("lora", ("lora_b", "co_magnitude"))]
)
def test_one_row_a_cluster_is_no_clustering_and_one_cluster_is_plain_training(
    lab: Lab, tmp_path: Any, method: str, ways: tuple[str, ...]
) -> None:
    """Each task makes clusters of its own in the same way, so that one task shows it."""

    def losses(name: str, *modifiers: Any) -> list[Any]:
        storage, stream = Storage.at(tmp_path / name), {"tasks": lab.tasks[:1]}
        run(lab.config("bert", method, modifiers=[*modifiers], train={"max_steps": 3}, stream=stream), storage)
        return trace(storage)

    migu = {"name": "migu", "threshold": 0.5, "skip_first_task": False}
    alone, plain = losses("alone", migu), losses("plain")
    assert plain != alone
    for way in ways:
        assert losses(f"all-{way}", {**migu, "clusters": 1024, "cluster_by": way}) == alone, way
        assert losses(f"one-{way}", {**migu, "clusters": 1, "cluster_by": way}) == plain, way


@pytest.mark.parametrize("way", ["weight", "co_magnitude"])
def test_clusters_stay_for_the_task_and_survive_a_stop(lab: Lab, tmp_path: Any, way: str) -> None:
    """Those that would be others after a few steps of training."""
    migu = {"name": "migu", "clusters": 4, "cluster_by": way, "skip_first_task": False}
    config = lab.config("bert", "finetune", modifiers=[migu], stream={"tasks": lab.tasks[:1]})
    run(config, Storage.at(tmp_path / "whole"))
    with pytest.raises(Stop):
        run(config, Storage.at(tmp_path / "left"), after=3)
    run(config, Storage.at(tmp_path / "left"))
    assert trace(Storage.at(tmp_path / "left")) == trace(Storage.at(tmp_path / "whole"))


def test_rows_of_b_alone_make_other_clusters_than_the_merged_weight(lab: Lab) -> None:
    collected = {}
    for way in ("weight", "lora_b"):
        started = Started(lab, "bert", "lora", clusters=4, cluster_by=way, layers=["attention.query"])
        layers = observed_layers(started.migu.method.backbone, started.migu.config.layers, False)
        for path, layer in layers.items():
            if getattr(layer, "lora_B", None) is not None:
                draw = torch.Generator().manual_seed(len(path))
                layer.lora_B.data = torch.randn(layer.lora_B.shape, generator=draw)
        collected[way] = weight_clusters(started.migu._layout, layers, 4, 0, alone=way == "lora_b")
        units = next(units for (_, part), units in started.migu._layout.units.items() if part == "output")
        if way == "lora_b":
            assert torch.equal(collected[way][units.span], balanced_kmeans(layers[units.path].lora_B.detach(), 4, 0))
    assert not torch.equal(collected["weight"], collected["lora_b"])


def test_members_share_a_bit(lab: Lab) -> None:
    started = Started(lab, clusters=8, cluster_by="weight", threshold=0.5)
    started.step(started.batch([0, 1, 2]))
    clusters = started.migu._clusters
    assert clusters is not None
    for units in started.migu._layout.units.values():
        bits, own = started.mask()[units.span], clusters[units.span]
        of_cluster = torch.stack([bits[own == number].float().mean() for number in range(8)])
        assert set(of_cluster.tolist()) == {0.0, 1.0}
        assert int((of_cluster == 0).sum()) == masked_count(0.5, 8)
        assert not torch.equal(bits, kept(started.migu._magnitudes.sums[units.span].unsqueeze(0), 0.5, "floor")[0])
