"""Plans: what they say of tiny models is what these really train, keep and sum; of LLaMA 7B what can be had by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sizes_table import sizes_table
from tiny import VARIANTS, Lab
from torch import Tensor

from raycl import config as configs
from raycl.cli.commands import parsed
from raycl.cli.runs import train
from raycl.errors import BackboneError, ConfigError, RayclError
from raycl.methods.base import activate_batch
from raycl.operations.plan.arithmetic import (
    GPUS,
    PROCESS,
    Cluster,
    EngineLoad,
    ModelLoad,
    RunLoad,
    StepLoad,
    activations,
    host_memory,
)
from raycl.operations.plan.numbers import longest_of, numbers, opened
from raycl.operations.plan.report import plan, text
from raycl.operations.plan.tables import records, row
from raycl.training.assembly import build
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.engine import TorchEngine
from raycl.training.phase.data import PhaseData
from raycl.training.phase.step import train_step
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import RunConfig
from raycl.training.workers.distributed import DistributedContext, ensure_process_group
from raycl.types import Batch


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("plan"))


def begun(config: RunConfig, world: DistributedContext | None = None) -> tuple[TrainingContext, list[Batch]]:
    """Return a run in its first phase, with the micro-batches of its first step."""
    alone = DistributedContext.alone(torch.device("cpu"))
    context, _ = build(config, alone)
    phase = context.phases[0]
    task = PhaseData(context, phase, alone)
    if context.method.encoder is not None:  # any queries do
        draws = torch.randn(8, context.method.encoder.width, generator=torch.Generator().manual_seed(0))
        task.queries, task.phases = {0: {"train": draws, "dev": draws[:0]}}, (phase,)
    context.method.begin_task(phase, task)
    task.world = world or alone
    context.backbone.train()
    return context, task.loader().micro_batches(0)


def sized(config: RunConfig) -> tuple[ModelLoad, StepLoad]:
    model, step, _, _ = numbers(opened(config))
    return model, step


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("llama", "lora"),
        ("llama", "inflora"),
        ("llama", "sapt"),
        ("t5", "slm"),
        ("t5", "gainlora"),
        ("bert", "sdlora"),
        ("llama", "moelora"),
        ("t5", "finetune"),
        ("bert", "inclora"),
        ("bert", "l2p"),
        ("llama", "epi"),
        ("bert", "replay"),
        ("llama", "lora-dora"),
        ("llama", "lora-pissa"),
        ("llama", "lora-copies"),
        ("t5", "inclora-patterns"),
    ],
)
def test_the_model_and_what_is_trained_have_the_real_sizes(lab: Lab, kind: str, method: str) -> None:
    config = lab.config(kind, VARIANTS.get(method, method))
    model, _ = sized(config)
    context, _ = begun(config)
    real = {name: p.numel() for name, p in context.backbone.named_parameters() if p.requires_grad}
    assert model.trained[0] == sum(real.values())
    weights = {name: p.numel() for name, p in context.backbone.model.named_parameters() if ".lora_" not in name}
    assert model.parameters == sum(weights.values())
    assert model.trained_base[0] == (model.parameters if method == "finetune" else 0)


def test_tasks_of_their_own_sizes_add_up(lab: Lab) -> None:
    """SAPT on a LLaMA of width 32 with two layers, query and value: 2 x 2 linears, values half as wide."""
    model, step = sized(lab.config("llama", {"name": "sapt", "r": 2, "r_by_task": {"animal": 5}}))
    per_rank = 2 * ((32 + 32) + (32 + 32))
    attention = 100 * 32 * 2 + 2 * 32
    assert model.trained == (2 * per_rank + attention + 32, 5 * per_rank + attention + 32)
    assert model.adapters == 7 * per_rank + attention + 2 * 32
    assert (model.rows, model.pool) == (7, 2 * per_rank)
    assert model.mapped and step.micro == 4  # float32 in the files and in the run: a node has the weights once
    weights = 4 * model.parameters
    assert host_memory(model, EngineLoad("torch", 8), RunLoad((), 2), 8)["loading"] == 8 * PROCESS + weights


@pytest.mark.parametrize(
    ("kind", "method"), [("llama", "lora"), ("llama", "finetune"), ("t5", "sapt"), ("bert", "lora")]
)
def test_activations_are_those_that_autograd_keeps(lab: Lab, kind: str, method: str) -> None:
    config = lab.config(kind, method)
    context, batches = begun(config)
    weights = {p.untyped_storage().data_ptr() for p in context.backbone.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = batches[0]
    with activate_batch(context.method, batch), torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item):
        output = context.backbone(batch)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    model, step = sized(config)
    source, target = batch.source_ids.shape[1], batch.target_ids.shape[1]
    longest = {"source": source + (target if kind == "llama" else 0), "target": target}
    log_probabilities = 0 if kind == "bert" else 4 * output.logits.numel()
    expected = activations(model, replace(step, micro=len(batch), longest=longest)) + log_probabilities
    assert expected == pytest.approx(real, rel=0.12)


def test_two_workers_sum_the_bytes_that_the_plan_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two workers, alone in its group: every sum that it asks for is counted."""
    config, summed = lab.config("llama", "lora"), []
    alone = DistributedContext.alone(torch.device("cpu"))
    ensure_process_group(alone)
    context, batches = begun(config)
    world = replace(alone, size=2)
    engine, real = TorchEngine(context.backbone, context.train, 4, world), dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        summed.append(tensor.nbytes)
        return real(tensor, *arguments, **named)

    monkeypatch.setattr(dist, "all_reduce", counted)
    train_step(engine, context.method, batches[:1], world, 0)
    result = plan(config, Cluster(GPUS["l4-24"], gpus=2))
    trained = 4 * result.model.trained[0]
    assert result.traffic.gradients == trained == engine.step_bytes and result.traffic.parameters == 0
    assert sum(summed) == trained + 24  # and the counts of tokens and the loss, in float64
    assert result.traffic.sent == 2 * (1 / 2) * trained
    assert plan(config, Cluster(GPUS["l4-24"])).traffic.sent == 0


@pytest.mark.parametrize(
    ("method", "values"),
    [("lora", 0), ("ewc", 2), ("lwf", 1), ("agem", 1), ("gem", 1), ({"name": "ogd", "rows": 7}, 21)],
)
def test_what_a_method_keeps_beside_training_is_planned(lab: Lab, method: Any, values: int) -> None:
    """The plan counts two tasks for each trained parameter; EWC and OGD are asked after both, OGD's last rows twice."""
    config = lab.config("bert", method)
    result = plan(config, Cluster(GPUS["l4-24"]))
    assert result.gpu["kept_by_method"] == 4 * values * result.model.most_trained


@pytest.mark.parametrize(
    ("method", "extra"),
    [
        ({"name": "lora"}, 0.0),
        ({"name": "mbpa++", "every": 10}, 0.1),
        ({"name": "mbpa++", "every": 0}, 0.0),
        ({"name": "epi"}, 0.25),
        ({"name": "osft"}, 0.25),
        ({"name": "osft", "least": 0.5, "most": 0.5}, 0.0),
        ({"name": "inflora"}, 0.5),
        ({"name": "lwf"}, 0.5),
    ],
)
def test_a_methods_passes_beside_its_steps_are_in_the_time(lab: Lab, method: Any, extra: float) -> None:
    result = plan(lab.config("bert", method, train={"epochs": 2}), Cluster(GPUS["a100-80"]))
    assert result.run.extra == extra
    assert result.seconds.training == pytest.approx(result.seconds.step * sum(result.run.steps) * (1 + extra))


def test_a_modifiers_passes_are_added_to_the_methods(lab: Lab) -> None:
    """FGGM computes the gradient of every row before a task, whatever epochs the task has."""
    for method, extra in (("lora", 0.5), ("epi", 0.75)):
        config = lab.config("bert", method, train={"epochs": 2}, modifiers=["fggm"])
        assert plan(config, Cluster(GPUS["a100-80"])).run.extra == extra
    train = {"epochs": 1, "epochs_by_task": {"animal": 3}}
    result = plan(lab.config("bert", "lora", train=train, modifiers=["fggm"]), Cluster(GPUS["a100-80"]))
    assert result.run.steps == (4, 12) and result.run.extra == (4 * 1 + 12 / 3) / 16


def test_tasks_at_the_same_time_take_the_time_of_the_group_with_the_most_steps(lab: Lab) -> None:
    train = {"epochs": 1, "epochs_by_task": {"colour": 3}}
    launch = {"parallel_tasks": 2}
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "again"}]
    config = lab.config("bert", "epi", train=train, launch=launch, stream={"tasks": tasks})
    result = plan(config, Cluster(GPUS["a100-80"], 2))
    assert result.run.steps == (12, 4, 4) and result.run.steps_in_turn == 12
    assert result.seconds.training == pytest.approx(result.seconds.step * 12 * 1.3)
    assert "2 tasks, each on 2 GPU(s), 4 in all; 12 steps one after another" in text(result)
    with pytest.raises(ConfigError, match="with method 'sapt' and these settings a task depends on the tasks before"):
        plan(lab.config("bert", "sapt", launch=launch), Cluster(GPUS["a100-80"]))


def test_quantized_weights_have_the_real_size(lab: Lab) -> None:
    config = lab.config("llama", "lora", backbone={"quantization": "int8"})
    context, _ = begun(config)
    weights = {name: p for name, p in context.backbone.model.named_parameters() if ".lora_" not in name}
    real = sum(p.nbytes + 4 * len(p) * (p.dtype == torch.int8) for p in weights.values())
    model, _ = sized(config)
    assert model.weight_bytes * model.parameters == pytest.approx(real)


# ---- LLaMA 7B, by hand -------------------------------------------------------------------------------------------

SEVEN = {
    "stream": {"max_source_tokens": 448, "max_target_tokens": 64},
    "backbone": {"name": "meta-llama/Llama-2-7b-hf"},
    "method": {"name": "lora"},
    "train": {"batch_size": 8, "micro_batch_size": 1},
}
PARAMETERS = 2 * 32_000 * 4096 + 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
LORA = 32 * 2 * 8 * (4096 + 4096)


def seven(**sections: Any) -> RunConfig:
    return configs.validate(RunConfig, {**SEVEN, **{k: {**SEVEN.get(k, {}), **v} for k, v in sections.items()}})


def test_a_frozen_llama_of_7b_on_one_gpu() -> None:
    result = plan(seven(), Cluster(GPUS["a100-80"]))
    assert result.model.parameters == PARAMETERS == 6_738_415_616
    assert result.model.trained[0] == result.model.adapters == LORA
    gpu = result.gpu
    assert gpu["weights"] == 2 * PARAMETERS
    assert (gpu["adapters"], gpu["gradients"], gpu["optimizer"]) == (4 * LORA, 4 * LORA, 8 * LORA)
    per_token = 32 * (8 * 4096 + 4 * 2 * 4096 + 3 * 2 * 11_008 + 2 * 4096) + 4 * 4096
    assert gpu["activations"] == result.activations["kept"] == 512 * per_token
    assert result.activations["recomputed"] == 512 * (32 * 2 * 4096 + per_token / 32)
    eager = plan(seven(backbone={"attention": "eager"}), Cluster(GPUS["a100-80"])).gpu["activations"]
    assert eager - gpu["activations"] == 32 * 32 * 512**2 * (2 + 4)
    assert gpu["logits"] == 64 * 32_000 * 10
    weights = PARAMETERS - 2 * 32_000 * 4096 - 65 * 4096  # those of the layers' linears
    head = 32_000 * 4096 * 64
    scores = 32 * 3 * 4 * 512**2 * 4096
    adapters = 3 * 2 * LORA * 512
    assert result.operations == pytest.approx(8 * (4 * (weights * 512 + head) + scores + adapters), rel=2e-3)
    assert result.seconds.compute == pytest.approx(result.operations / (0.4 * 312e12))
    assert result.fits and result.bottleneck == "compute"
    assert result.host["loading"] == pytest.approx(3e9 + 2 * PARAMETERS)


def test_full_fine_tuning_of_7b_needs_16_bytes_a_parameter_and_zero_3() -> None:
    alone = plan(seven(method={"name": "finetune"}), Cluster(GPUS["a100-80"]))
    assert (alone.fits, alone.bottleneck) == (False, "memory")
    zero = seven(method={"name": "finetune"}, engine={"name": "deepspeed", "zero_stage": 3})
    result = plan(zero, Cluster(GPUS["a100-80"], gpus=8))
    states = sum(result.gpu[name] for name in ("weights", "masters", "gradients", "optimizer"))
    assert states == pytest.approx(16 * PARAMETERS / 8)
    largest = 2 * 32_000 * 4096 + 4096  # embeddings, output words and the last norm, taken as one
    assert result.host["checkpoint"] == 4 * largest < 0.05 * 4 * PARAMETERS  # masters are written where they lie
    assert result.fits and result.host["training"] == 8 * 3e9 + result.host["checkpoint"]
    assert result.gpu["gathered_weights"] == 2 * 2 * result.model.largest_layer == 2 * 2 * (PARAMETERS - largest) / 32
    parts = plan(seven(method={"name": "finetune"}, engine={"name": "fsdp"}), Cluster(GPUS["a100-80"], gpus=8))
    assert parts.host["checkpoint"] == 4 * largest
    assert result.traffic.parameters == 2 * 2 * PARAMETERS  # forward and backward, in bfloat16
    assert result.traffic.sent == pytest.approx(7 / 8 * 2 * PARAMETERS * 3)
    again = plan(
        seven(method={"name": "finetune"}, backbone={"gradient_checkpointing": True}), Cluster(GPUS["h200-141"])
    )
    once = plan(seven(method={"name": "finetune"}), Cluster(GPUS["h200-141"]))
    assert again.operations == pytest.approx(once.operations * 4 / 3)


def test_layers_that_fsdp_shares_out_are_held_in_parts_and_gathered() -> None:
    """7B on 8 GPUs: embeddings, output words, the last norm and LoRA are whole on every worker."""
    result = plan(seven(engine={"name": "fsdp"}), Cluster(GPUS["a100-80"], gpus=8))
    outside = 2 * 32_000 * 4096 + 4096
    layers = PARAMETERS - outside
    assert (result.model.in_layers, result.model.largest_layer) == (layers, layers / 32)
    assert result.gpu["weights"] == pytest.approx(2 * layers / 8 + 2 * outside)
    assert result.gpu["adapters"] == result.gpu["gradients"] == result.gpu["optimizer"] / 2 == 4 * LORA
    assert result.gpu["gathered_weights"] == 2 * 2 * layers / 32
    assert result.traffic.parameters == 2 * 2 * layers and result.traffic.gradients == 4 * LORA
    whole = plan(seven(engine={"name": "fsdp"}, method={"name": "finetune"}), Cluster(GPUS["a100-80"], gpus=8))
    assert whole.traffic.parameters == 2 * 4 * layers and whole.traffic.gradients == 4 * PARAMETERS
    assert whole.gpu["optimizer"] == pytest.approx(8 * (layers / 8 + outside))


def test_a_13b_in_four_bits_fits_24_gb() -> None:
    config = seven(
        backbone={"name": "meta-llama/Llama-2-13b-hf", "quantization": "nf4", "gradient_checkpointing": True}
    )
    result = plan(config, Cluster(GPUS["l4-24"]))
    linears = 40 * (4 * 5120**2 + 3 * 5120 * 13_824)
    rest = 2 * 32_000 * 5120 + 81 * 5120
    assert result.gpu["weights"] == pytest.approx(linears * (0.5 + 1 / 64 + 4 / 16_384) + 2 * rest)
    assert result.fits


def test_slow_networks_and_short_runs_have_other_bottlenecks() -> None:
    zero = seven(
        engine={"name": "deepspeed", "zero_stage": 3}, train={"batch_size": 64}, stream={"max_source_tokens": 32}
    )
    far = plan(zero, Cluster(GPUS["l4-24"], gpus=64, per_node=8))
    assert far.cluster.bandwidth == 12.5e9 and far.bottleneck == "network"
    assert plan(seven(stream={"tasks": ["topic"], "train_rows": 8}), Cluster(GPUS["h100-80"])).bottleneck == "loading"
    full = plan(seven(backbone={"name": "meta-llama/Llama-2-13b-hf"}), Cluster(GPUS["l4-24"]))
    assert (full.fits, full.bottleneck) == (False, "memory") and full.share > 1


def test_the_command_prints_text_and_json(lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command needs config.json alone in the backbone's folder, and no data."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((lab.model_folder("llama") / "config.json").read_bytes())
    words = ["--plan", f"backbone.name={folder}", "stream.name=long-A", "stream.root=/nowhere", "--gpu", "h100-80"]
    with pytest.raises(BackboneError, match=r"128 \+ max_target_tokens 32 is more than the 128 positions"):
        train.run(parsed("train", words))
    words.append("stream.max_source_tokens=96")
    assert train.run(parsed("train", [*words, "--json"])) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["fits"] and tree["cluster"]["gpu"]["ray"] == "H100" and not tree["model"]["mapped"]
    assert tree["model"]["trained"] == [2048] * 15 and tree["steps"] == []
    assert train.run(parsed("train", words)) == 0
    assert "trained per task" in capsys.readouterr().out
    assert set(train.GPU_NAMES) == set(GPUS)
    assert train.run(parsed("train", [*words, "method=slm", "method.encoder.name=no/encoder"])) == 0
    assert "sentence encoder 'no/encoder' is not on this machine" in capsys.readouterr().out


def test_the_table_of_sizes_is_true() -> None:
    readme = (Path(__file__).resolve().parents[3] / "cluster" / "README.md").read_text()
    shown = readme.partition("<!-- sizes -->")[2].partition("<!-- /sizes -->")[0]
    assert shown.strip() == sizes_table()
    assert list(records(shown)[0])[:3] == ["backbone", "trained, engine", "GPUs"]


@pytest.mark.parametrize(
    ("method", "cells"),
    [  # T5-large: 72 attentions with two linears of 1024 x 1024, rank 8 on both sides
        ("lora", ["no", "no", "no", "yes", "yes", "2.36M", "0"]),
        ("inflora", ["no", "yes", "no", "yes", "yes", "1.18M", "2.36M"]),
        ("sapt", ["yes", "yes", "no", "yes", "yes", "2.57M", "2.36M"]),
        ("agem", ["yes", "yes", "no", "yes", "yes", "2.36M", "0"]),
        ("osft", ["no", "yes", "no", "yes", "yes", "705M", "0"]),
    ],
)
def test_the_table_of_methods_reads_the_classes(method: str, cells: list[str]) -> None:
    assert row(method)[1:] == cells


def test_rows_are_as_long_as_the_longest_of_their_batch(lab: Lab) -> None:
    assert longest_of([4], 3) == 4 and longest_of([1, 2, 3, 4], 1) == 2.5
    assert longest_of([1, 3], 2) == pytest.approx(1 * 1 / 4 + 3 * 3 / 4)
    padded, packed = (sized(lab.config("llama", train={"packing": yes}))[1] for yes in (False, True))
    assert packed.mean["source"] < padded.mean["source"] <= padded.longest["source"]


REFUSED = {
    "unknown texts": ("llama", "lora", {"eval": {"unknown": "bare"}}),
    "compiled": ("llama", "slm", {"train": {"compile": True}}),
    "packed": ("bert", "lora", {"train": {"packing": True}}),
    "label loss": ("llama", "lora", {"train": {"label_loss": "task"}}),
    "quantized": ("bert", "finetune", {"backbone": {"quantization": "nf4"}}),
    "answers of a form": ("llama", "lora", {"eval": {"response_format": {"nothing": {"regex": "a"}}}}),
    "rates by task": ("llama", "lora", {"train": {"learning_rate_by_task": {"nothing": 0.1}}}),
    "linears": ("bert", {"name": "lora", "target_modules": ["gate_proj"]}, {}),
}
"""Name -> backbone, method and sections of a config that a run refuses before it starts."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_refuses_has_no_plan(lab: Lab, name: str) -> None:
    kind, method, sections = REFUSED[name]
    config = lab.config(kind, method, **sections)
    with pytest.raises(RayclError) as refusal:
        check(config)
    with pytest.raises(RayclError, match=re.escape(str(refusal.value))):
        plan(config, Cluster(GPUS["a100-80"], 1))


def test_a_rule_for_unknown_texts_is_refused_without_the_data_too(lab: Lab) -> None:
    config = lab.config("llama", "lora", stream={"name": "long-A", "tasks": None}, eval={"unknown": "bare"})
    said = "eval.unknown=bare: method 'lora' under stream.schedule=sequential publishes no statistics"
    with pytest.raises(ConfigError, match=said):
        plan(config, Cluster(GPUS["a100-80"], 1))


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected one of a10g-24"):
        train.run(parsed("train", ["--plan", "--gpu", "k80"]))
    with pytest.raises(ConfigError, match="expected a share above 0"):
        train.run(parsed("train", ["--plan", "--utilisation", "2"]))
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size"):
        train.run(parsed("train", ["--plan", "--gpus", "7"]))
    with pytest.raises(ConfigError, match="unknown stream 'lng-A'"):
        train.run(parsed("train", ["--plan", "stream.name=lng-A"]))
    with pytest.raises(BackboneError, match=r"config.json of backbone 'no/model' is not on this machine"):
        train.run(parsed("train", ["--plan", "backbone.name=no/model"]))
    with pytest.raises(SystemExit):
        parsed("train", ["--plan", "--resume", "runs/x"])
