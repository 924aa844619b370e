"""`python jobs/benchmark.py step` on a tiny model: its contenders do different work and lose the same."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from tiny import Lab

from benchmarks import step
from raycl.backbone import BackboneConfig, load_backbone, load_codec
from raycl.types import IGNORE


def test_every_contender_has_its_figures(lab: Lab) -> None:
    parser = argparse.ArgumentParser()
    step.add_flags(parser)
    sizes = ["--batch-size", "4", "--tokens", "16", "--answer", "3", "--rounds", "1"]
    report = step.measure(parser.parse_args(["--backbone", str(lab.model_folder("llama")), *sizes]))
    values = {figure.name: figure.value for figure in report.figures}
    for name in (step.LABELLED, step.PACKED, step.CHECKPOINTED):
        assert values[f"{name}: step time over {step.EVERY}"] > 0 and f"{name}: memory over {step.EVERY}" in values
    assert values["largest relative difference of the losses"] < step.SAME_LOSS and not report.missed
    assert 0 < values["real tokens of padded rows"] < 100


def test_logits_and_rows_are_as_the_contenders_names_say(lab: Lab) -> None:
    config = BackboneConfig(name=str(lab.model_folder("llama")), dtype="float32")
    backbone = load_backbone(config, load_codec(config, 16, 3), torch.device("cpu"), 0)
    batch = step.unlike_batch(4, 16, 3, 20, seed=0)
    read: dict[str, list[tuple[int, ...]]] = {name: [] for name in (step.EVERY, step.LABELLED, step.PACKED)}
    for name, shapes in read.items():
        learner = step.Learner(backbone, name)
        model = learner.method.backbone.model
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.register_forward_hook(partial(kept, shapes))
        learner.step(batch)
    padded, labelled = read[step.EVERY][0], (1, int((batch.target_ids != IGNORE).sum()))
    assert padded[0] == 4 and read[step.EVERY] == [padded, padded] and read[step.LABELLED] == [padded, labelled]
    assert read[step.PACKED][0][0] < 4 and read[step.PACKED][1] == labelled


def kept(shapes: list[tuple[int, ...]], module: object, given: object, result: torch.Tensor) -> None:
    """A forward hook: how many rows and positions a layer gave."""
    shapes.append(tuple(result.shape[:2]))
