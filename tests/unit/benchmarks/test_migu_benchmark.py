"""The benchmark of MIGU compares what it says: the same model and batches, plain, masked dense and row-sparse."""

from __future__ import annotations

import pytest
import torch
from tiny import Lab

from benchmarks.migu import CONTENDERS, Bench, encoder_batch, figures, text_batch
from raycl.backbone import BackboneConfig, load_backbone, load_codec

CPU = torch.device("cpu")


def bench(lab: Lab, method: str) -> Bench:
    config = BackboneConfig(name=str(lab.model_folder("bert")), dtype="float32")
    codec = load_codec(config, 24, 1)
    return Bench({name: load_backbone(config, codec, CPU, 0) for name in CONTENDERS}, method, 0.5, CPU)


@pytest.mark.parametrize("method", ["finetune", "lora"])
def test_one_figure_for_each_contender_and_one_target(lab: Lab, method: str) -> None:
    batches = [encoder_batch(4, 12, number, words=(5, 20)) for number in range(2)]
    result = list(figures("tiny", bench(lab, method), batches, 2, 1.0))
    names = ["tiny: masked dense over plain", "tiny: row-sparse over plain", "tiny: a measured step over plain"]
    assert [figure.name for figure in result] == names
    assert [figure.target for figure in result] == [None, 1.0, None]
    assert all(figure.value > 0 for figure in result)


def test_dense_and_sparse_twins_do_the_same_work_and_the_plain_one_another(lab: Lab) -> None:
    twins = bench(lab, "finetune").twins
    norms = {name: [] for name in twins}  # type: ignore[var-annotated]
    for number in range(4):
        batch = encoder_batch(4, 12, number, words=(5, 20))
        for name, twin in twins.items():
            norms[name].append(twin.step(batch, 1))
    assert norms["row-sparse"] == pytest.approx(norms["masked dense"], rel=1e-4)
    assert norms["plain"][-1] > norms["masked dense"][-1]


def test_batches_have_pads_and_are_the_same_for_the_same_seed() -> None:
    batch = text_batch(6, 16, 3, 1)
    lengths = batch.source_mask.sum(1)
    assert int(lengths.max()) == 16 and int(lengths.min()) >= 8 and len(set(lengths.tolist())) > 1
    assert torch.equal(batch.source_ids, text_batch(6, 16, 3, 1).source_ids) and batch.target_ids.shape == (6, 3)
