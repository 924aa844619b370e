"""What the process that scores rows beside training holds: by hand for LLaMA 7B, and as tiny models keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Lab

from raycl import config as configs
from raycl.cli.runs import train
from raycl.generation import dynamic_cache
from raycl.operations.plan.hardware import GPUS, Cluster
from raycl.operations.plan.memory import CONTEXT, PROCESS
from raycl.operations.plan.opening import opened
from raycl.operations.plan.planning import plan
from raycl.operations.plan.scoring import cached_width
from raycl.operations.plan.shapes import numbers
from raycl.run.assembly import build
from raycl.run.config import RunConfig
from raycl.training.distributed import DistributedContext

PARAMETERS, LORA = 6_738_415_616, 32 * 2 * 8 * (4096 + 4096)
HELD = {
    "weights": 2 * PARAMETERS,
    "adapters": 2 * LORA,
    "caches": 64 * 512 * 32 * 2 * 4096 * 2,
    "reading": 16 * 512 * (4 * 4096 + 3 * 11_008) * 2,
    "logits": 64 * 32_000 * 2,
}


def seven(evaluation: dict[str, Any], launch: dict[str, Any] | None = None) -> RunConfig:
    tree = {
        "stream": {"max_source_tokens": 448, "max_target_tokens": 64},
        "backbone": {"name": "meta-llama/Llama-2-7b-hf"},
        "method": {"name": "lora"},
        "train": {"batch_size": 8, "micro_batch_size": 1},
        "eval": {"mode": "overlap", **evaluation},
        "launch": launch or {},
    }
    return configs.validate(RunConfig, tree)


def test_a_7b_on_a_gpu_of_its_own_holds_weights_adapters_and_caches_again() -> None:
    inline = plan(seven({"mode": "inline"}), Cluster(GPUS["a100-80"]))
    assert inline.scorer is None and not inline.scoring and "scoring" not in {**inline.gpu, **inline.host}
    found = plan(seven({}), Cluster(GPUS["a100-80"]))
    assert found.scoring == {**HELD, "context": CONTEXT}
    assert found.gpu == inline.gpu and found.fits
    assert found.host["training"] == inline.host["training"] + PROCESS
    many = plan(seven({"batch_size": 512}), Cluster(GPUS["a100-80"]))
    assert (many.fits, many.bottleneck) == (False, "memory") and many.scoring["caches"] == 8 * HELD["caches"]
    assert many.share == sum(many.scoring.values()) / 80e9
    one_task = configs.as_tree(seven({})) | {"stream": {"tasks": ["topic"]}}
    assert plan(configs.validate(RunConfig, one_task), Cluster(GPUS["a100-80"])).scorer is None


def test_on_a_workers_gpu_both_add_up() -> None:
    inline = plan(seven({"mode": "inline"}), Cluster(GPUS["a100-40"]))
    found = plan(seven({"overlap_gpus": 0.5}, {"gpus_per_worker": 0.5}), Cluster(GPUS["a100-40"]))
    assert found.gpu["scoring"] == sum(found.scoring.values()) == found.gpu["peak"] - inline.gpu["peak"]
    assert inline.fits and not found.fits
    fewer = plan(seven({"overlap_gpus": 0.5, "batch_size": 8}, {"gpus_per_worker": 0.5}), Cluster(GPUS["a100-40"]))
    assert fewer.fits and fewer.scoring["caches"] == HELD["caches"] / 8


def test_on_cpus_the_node_holds_it_in_float32() -> None:
    inline = plan(seven({"mode": "inline"}), Cluster(GPUS["a100-80"]))
    found = plan(seven({"overlap_gpus": 0}), Cluster(GPUS["a100-80"]))
    held = {name: 2 * size for name, size in HELD.items()}
    assert found.scoring == {**held, "process": PROCESS} and found.gpu == inline.gpu
    assert found.host["training"] == inline.host["training"] + sum(found.scoring.values())


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_caches_are_as_large_as_those_of_a_model(lab: Lab, kind: str) -> None:
    config = lab.config(kind, "lora")
    backbone = build(config, DistributedContext.alone(torch.device("cpu")))[0].backbone.eval()
    sources = backbone.codec.encode_source(["red cat blue", "red"])
    state = dynamic_cache.begin(backbone, sources)
    real = sum(t.numel() for layers in (state.layers, state.cross or []) for pair in layers for t in pair)
    source = max(map(len, sources))
    longest = {"source": source, "target": state.mask.shape[1]}
    assert len(sources) * cached_width(numbers(opened(config))[0], longest) == real


def test_the_command_shows_it(lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--plan", f"backbone.name={lab.model_folder('llama')}", "stream.name=long-A", "stream.root=/nowhere"]
    words.append("stream.max_source_tokens=96")
    assert train.run(train.arguments([*words, "eval.mode=overlap"])) == 0
    said = capsys.readouterr().out
    assert "scoring beside training (eval.mode=overlap), on a GPU of its own" in said and "2 GPUs in all" in said
