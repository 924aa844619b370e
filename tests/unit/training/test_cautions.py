"""Tests of cautions: a run says in one line, before it trains, what it may do and seldom should."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TASKS, Lab, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from raycl import config as configs
from raycl.backbone import BackboneConfig, linears, load_codec
from raycl.backbone.load import wrap_model
from raycl.methods.registry import METHODS, method_class
from raycl.training.setup.checks import check
from raycl.training.setup.method_checks import check_roles
from raycl.training.setup.run_config import RunConfig


def said(lab: Lab, caplog: pytest.LogCaptureFixture, method: Any, **sections: Any) -> list[str]:
    """Return warnings of the checks of a run on two tasks of 14 rows and two labels, in batches of 4."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="raycl"):
        check(lab.config("bert", method, **sections))
    return [record.getMessage() for record in caplog.records]


def test_a_warm_up_as_long_as_a_task(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    train = {"lr_scheduler": "constant_with_warmup", "warmup_steps": 4}
    (line,) = said(lab, caplog, "lora", train=train)
    assert line.startswith("train.warmup_steps=4 is not less than the optimizer steps of task 'colour' (4), 'animal'")
    (line,) = said(lab, caplog, "lora", train={**train, "epochs_by_task": {"animal": 2}})
    assert "'colour' (4)," in line and "animal" not in line
    for shorter in ({"warmup_steps": 3}, {"warmup_steps": 0, "warmup_ratio": 0.9}, {"epochs": 2}):
        assert not said(lab, caplog, "lora", train={**train, **shorter})
    assert not said(lab, caplog, "lora", train=train, stream={"schedule": "joint"})


@pytest.mark.parametrize(
    ("method", "setting"),
    [({"name": "replay"}, "share"), ({"name": "sapt"}, "arm.fraction"), ({"name": "agem"}, "share")],
)
def test_a_share_that_keeps_a_handful(
    lab: Lab, caplog: pytest.LogCaptureFixture, method: dict[str, Any], setting: str
) -> None:
    (line,) = said(lab, caplog, method)
    assert line.startswith(f"method.{setting}=0.02 keeps a handful of training rows of task 'colour' (1 of 14): ")
    assert line.endswith(f"method.{setting}=0.72 keeps as many of each"), "5 of each of two labels"
    section, _, name = setting.rpartition(".")
    more = {section: {name: 0.72}} if section else {name: 0.72}
    assert not said(lab, caplog, {**method, **more})
    if method["name"] == "sapt":
        assert not said(lab, caplog, {**method, "ablation": "arm"}), "nothing reads samples"
        assert not said(lab, caplog, method, stream={"schedule": "separate"})


def test_every_method_with_a_share_of_rows_says_so() -> None:
    for name in METHODS:
        config = method_class(name).Config(name=name)
        assert ("share" in type(config).model_fields) <= (config.sample_share is not None), name


def test_bfloat16_on_a_cpu_without_its_instructions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (flags, is_slow) in enumerate(
        [("avx2 avx512f", True), ("avx512f avx512_bf16", False), ("bf16", False)]
    ):
        info = tmp_path / "cpuinfo"
        info.write_text(f"flags\t\t: fpu {flags} sse\n")
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="raycl"):
            for _ in range(2):
                linears.warn_of_slow_bfloat16(f"model{number}", info)
        assert len(caplog.records) == is_slow
        assert all("backbone.dtype=float32" in record.getMessage() for record in caplog.records)


def test_linears_that_roles_leave_out(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    item = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **item, num_attention_heads=2))
    backbone = wrap_model(model, tokenizer("llama"), 8, 8)
    with caplog.at_level(logging.WARNING, logger="raycl"):
        check_roles(lab.config("llama", {"name": "lora", "target_modules": ["q_proj"]}), backbone)
        check_roles(lab.config("llama", "finetune"), backbone)
        check_roles(lab.config("llama", {"name": "sapt", "value": "prompt"}), backbone)
        assert not caplog.records, "no role acts, though settings without effect name some"
        check_roles(lab.config("llama", "lora"), backbone)
        check_roles(lab.config("llama", "finetune", modifiers=["migu"]), backbone)
        check_roles(lab.config("llama", {"name": "ogd", "learner": {"name": "das", "general": False}}), backbone)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first.startswith("MixtralForCausalLM has linears that no role names, so attention.query, attention.value ")
    assert "model.layers.*.mlp.experts.gate_up_proj" in first and "so attention, ffn do not" in second
    assert "so attention, ffn do not select them" in third


def test_own_tasks_get_a_models_chat_template_and_enough_steps(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """They hold where neither prompt nor epochs are set; tasks of benchmarks and other models keep theirs."""
    template = {"chat_template": "chatml"}

    def lines(backbone: dict[str, Any], **sections: Any) -> list[str]:
        tree = lab.tree("llama", backbone=backbone, **sections)
        train = {"batch_size": 4, **sections.get("train", {})}
        tree["train"] = {name: value for name, value in train.items() if value is not None}
        tree["stream"]["max_source_tokens"] = 60
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="raycl"):
            stream = check(configs.validate(RunConfig, tree))
        (first, *_), codec = stream.tasks, load_codec(BackboneConfig(**tree["backbone"]), 60, 4)
        assert bool(stream.prompt(first, codec).chat_template) == ("chat template" in caplog.text)
        said = ("epochs instead", "chat template")
        return [text for record in caplog.records if any(part in (text := record.getMessage()) for part in said)]

    asked, first, second = lines(template)
    assert asked.startswith("tasks 'colour', 'animal': texts are messages under the model's chat template")
    assert first.startswith("'colour' is trained for 13 epochs instead of 3, since its rows are few; train.epochs ")
    assert second.startswith("'animal' is trained for 13 epochs")
    assert len(lines(template, train={"epochs_by_task": {"colour": 3}})) == 2
    assert lines(template, train={"batch_size": 1}) == [asked, *[line.replace("13", "4") for line in (first, second)]]
    assert lines(template, train={"batch_size": 16})[1].startswith("'colour' is trained for 20 epochs")
    assert lines(template, train={"epochs": 3}) == [asked]
    assert lines(template, train={"max_steps": 20}) == [asked], "steps end before epochs do"
    assert lines({}) == []
    assert lines(template, stream={"prompt": "plain"}) == []
    like = [{**task, "like": "agnews", "labels": [label for label, _ in TASKS[task["name"]]]} for task in lab.tasks]
    assert lines(template, stream={"tasks": like}) == []
    assert lines(template, stream={"tasks": ["topic"], "train_rows": 4}) == [], "a task of the built-in stream"
