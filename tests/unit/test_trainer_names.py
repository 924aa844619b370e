"""Names of Transformers' TrainingArguments: what they mean here, which one wins, and how many examples a step has."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from raycl.config.trainer_names import PATHS
from raycl.errors import ConfigError
from raycl.training.setup.run_config import from_tree, load_config


def test_the_names_are_those_of_transformers() -> None:
    of_other_versions = {"group_by_length", "warmup_ratio", "activation_checkpointing"}
    assert set(PATHS) - of_other_versions <= set(TrainingArguments.__dataclass_fields__)


def test_each_name_sets_what_it_means() -> None:
    names = {"num_train_epochs": 5.0, "lr_scheduler_type": "cosine", "optim": "adamw_torch", "bf16": True}
    names |= {"learning_rate": 2e-4, "max_grad_norm": 0.5, "save_steps": 7, "activation_checkpointing": True}
    names |= {"train_sampling_strategy": "group_by_length", "warmup_steps": 0.25}
    for tree in (names, {"train": names}):
        config = from_tree(tree)
        train = config.train
        assert (train.epochs, train.lr_scheduler, train.optimizer, train.max_grad_norm) == (5, "cosine", "adamw", 0.5)
        assert train.group_by_length and (train.warmup_ratio, train.warmup_steps) == (0.25, 0)
        assert train.learning_rate == 2e-4 and config.checkpoint.every_steps == 7
        assert config.backbone.dtype == "bfloat16" and config.backbone.gradient_checkpointing
    assert names["num_train_epochs"] == 5.0, "what a caller gives stays as it is"


def test_an_override_replaces_what_a_file_says_under_either_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_train_epochs: 3\ntrain: {lr_scheduler: linear}\nbackbone: {dtype: float32}\n")
    for word in ("num_train_epochs=4", "train.epochs=4", "train.num_train_epochs=4"):
        train = load_config(str(file), [word, "lr_scheduler_type=cosine"]).train
        assert (train.epochs, train.lr_scheduler) == (4, "cosine")
    assert load_config(str(file), ["bf16=true"]).backbone.dtype == "bfloat16"
    file.write_text("num_train_epochs: 3\ntrain: {epochs: 4}\n")
    with pytest.raises(ConfigError, match=r"num_train_epochs=3 and train\.epochs=4 are the same setting"):
        load_config(str(file), [])


def test_the_examples_of_a_step_are_those_of_a_device_times_workers_times_accumulation() -> None:
    words = ["per_device_train_batch_size=4", "gradient_accumulation_steps=2", "launch.workers=3"]
    train = load_config(None, words).train
    assert (train.batch_size, train.micro_batch_size) == (24, 4)
    line = "each optimizer step has 24 examples: 4 on each of 3 workers in each of 2 forward passes"
    assert train.batch_line(3).startswith(line)
    assert load_config(None, words[:1]).train.batch_size == 4
    assert load_config(None, ["per_device_train_batch_size=4", "train.batch_size=4"]).train.batch_size == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["num_train_epoch=3"], "did you mean 'num_train_epochs'"),
        (["train.per_device_batch_size=3"], "did you mean 'train.per_device_train_batch_size'"),
        (["num_train_epochs=2.5"], "num_train_epochs is 2.5: expected whole passes"),
        (["bf16=maybe"], "bf16 is 'maybe': expected true or false"),
        (["train_sampling_strategy=sequential"], "is 'sequential': expected group_by_length or random"),
        (["gradient_accumulation_steps=2"], "per_device_train_batch_size is missing"),
        (["per_device_train_batch_size=3", "train.batch_size=10"], "train.batch_size is 10, and"),
        (["per_device_train_batch_size=none"], "per_device_train_batch_size is 'none'"),
    ],
)
def test_what_means_nothing_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, words)
