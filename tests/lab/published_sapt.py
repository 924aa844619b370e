"""Statements of SAPT and its released code about each published row, with the place of each.

`jobs/configs/paper` is checked against a table that was written from the sources, not from those files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]

QV = ["attention.query", "attention.value"]
NOTHING: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A file of `jobs/configs/paper`.

    Attributes:
        kind: model type of its backbone.
        said: (source, settings) in turn; what a later one says replaces what an earlier one said.
        not_given: keys that the file itself marks as not given.
        scores: published figures that its header and the guide must show.
    """

    kind: str
    said: tuple[tuple[str, Settings], ...]
    not_given: tuple[str, ...] = NOTHING
    scores: tuple[str, ...] = field(default=NOTHING)

    @property
    def settings(self) -> dict[str, tuple[Any, str]]:
        """Dotted path -> value and its source."""
        return {path: (value, source) for source, settings in self.said for path, value in settings.items()}


# ---- SAPT: arXiv 2401.08295, code github.com/circle-hit/SAPT at 52a52b9 ---------------------------------------------

SAPT_DATA = (
    "code: gen_script_*.py (lengths, dev from files, no warm-up, best epoch of every fifth), src/cl_dataset.py "
    "(one reference at random, all rows), src/compute_metrics.py (no rule for labels of other tasks)",
    {
        "stream.dev": "file",
        "stream.dev_rows": None,
        "stream.unlabelled": "keep",
        "stream.references": "random",
        "stream.max_source_tokens": 512,
        "stream.max_target_tokens": 50,
        "stream.train_rows": None,
        "stream.test_rows": None,
        "eval.off_task": "count",
        "eval.labels": "all",
        "eval.select": "best_dev",
        "eval.select_epochs": 5,
        "train.lr_scheduler": "constant",
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "backbone.dtype": "bfloat16",
        "backbone.dropout": 0.1,
    },
)
SAPT_CODE = (
    "code: src/t5_prompt.py, src/cl_trainer.py (pads pooled, SiLU last, first step without reflection)",
    {
        "method.attention.pool_pads": True,
        "method.attention.proj_act": "after_up",
        "method.attention.pruning_threshold": 0.0,
        "method.arm.skip_steps": 1,
        "method.arm.every": 1,
        "method.arm.abar_split": "dev",
        "method.generator.max_tokens": 512,
        "method.generator.top_k": 20,
        "method.generator.repetition_penalty": 2.5,
    },
)
SAPT_TEXT = (
    "paper: equations 2 to 6, appendices C and E.1 (2 % of pseudo-samples, temperature sqrt(d), one sum over tasks)",
    {
        "method.name": "sapt",
        "method.ablation": "none",
        "method.attention.standardize": False,
        "method.attention.tau": None,
        "method.attention.width": 100,
        "method.arm.source": "generated",
        "method.arm.fraction": 0.02,
        "method.arm.batch": 32,
        "method.arm.kl_reduction": "sum",
        "method.arm.kl_scale_with_accum": False,
        "method.generator.batch": 16,
        "method.generator.writes": "instruction_and_input",
    },
)
SAPT_LORA = (
    "paper: appendix C (LoRA)",
    {
        "method.value": "lora",
        "method.generator.value": "lora",
        "method.generator.r": 8,
        "method.generator.steps": 5000,
        "method.generator.rate": 1e-3,
        "train.optimizer": "adamw",
        "method.attention_learning_rate": None,
    },
)
SAPT_LORA_CODE = (
    "code: gen_script_superni_t5.py; old adapters without autograd in src/t5_prompt.py",
    {
        "method.stop_grad_old_blocks": True,
        "method.lora_alpha": 32,
        "method.lora_dropout": 0.0,
        "method.target_modules": QV,
        "train.epochs": 100,
        "train.micro_batch_size": 8,
        "engine.name": "torch",
    },
)
SAPT_PROMPT = (
    "paper: appendix C (prompts)",
    {
        "method.value": "prompt",
        "method.prompt_length": 10,
        "method.generator.value": "prompt",
        "method.generator.prompt_length": 300,
        "method.generator.epochs": 80,
        "method.generator.prompt_rate": 0.5,
        "train.optimizer": "adafactor",
        "engine.name": "torch",
    },
)
T5 = ("paper: appendix C (the size; which release is not said)", {"backbone.name": "google-t5/t5-large"})
SUPERNI_T5 = (
    "paper: appendix C",
    {"method.r": 4, "method.arm.weight": 0.5, "train.batch_size": 32, "train.learning_rate": 3e-4},
)
LONG_T5 = ("paper: appendix C", {**SUPERNI_T5[1], "method.r": 8, "method.arm.weight": 0.1})
LONG_CODE = ("code: gen_script_long_t5.py", {"train.epochs": 10, "train.micro_batch_size": 16})
LLAMA_CODE = (
    "code: gen_script_superni_llama.py",
    {
        "stream.max_source_tokens": 1024,
        "train.epochs": 50,
        "train.micro_batch_size": 2,
        "engine.name": "deepspeed",
        "engine.zero_stage": 2,
        "launch.workers": 4,
        "backbone.dropout": 0.0,
    },
)
LLAMA_BOS = (
    "code: src/cl_collator.py, decoder_call (prompts are tokenized with add_special_tokens=False)",
    {"backbone.bos": "none"},
)
LLAMA = ("paper: appendix C", {"method.r": 4, "method.arm.weight": 2.0, "train.batch_size": 32})
LONG_LLAMA_CODE = ("code: gen_script_long_llama.py", {"train.epochs": 20})
FOUR = (
    "paper: appendix C (32 a GPU, four A800, DeepSpeed)",
    {"train.batch_size": 128, "method.arm.batch": 128, "launch.workers": 4, "engine.name": "deepspeed"},
)
PROMPT_SUPERNI = (
    "paper: appendix C (prompts)",
    {
        "train.epochs": 100,
        "train.learning_rate": 3e-2,
        "method.attention_learning_rate": None,
        "train.batch_size": 32,
        "method.arm.weight": 1.0,
        "method.attention.width": 100,
    },
)
PROMPT_LONG = (
    "paper: appendix C (prompts, order 3)",
    {
        "train.epochs": 10,
        "train.learning_rate": 3e-1,
        "method.attention_learning_rate": 1e-2,
        "train.batch_size": 32,
        "method.arm.weight": 1.5,
        "method.attention.width": 200,
    },
)
PROMPT_FOUR = (
    "paper: appendix C (prompts: 32 a GPU on SuperNI, four A800)",
    {"train.batch_size": 128, "method.arm.batch": 128, "launch.workers": 4},
)
PROMPT_LLAMA = (
    "code: lengths and micro-batch of gen_script_*_llama.py",
    {"stream.max_source_tokens": 1024, "train.micro_batch_size": 2, "launch.workers": 4, "backbone.dropout": 0.0},
)


def _model(name: str, **settings: float) -> tuple[str, Settings]:
    rates = {"train.learning_rate": settings["rate"]} if settings else {}
    return ("paper: appendix C (rate by model)", {"backbone.name": name, **rates})


def _order(name: str, prompt: str) -> tuple[str, Settings]:
    return ("paper: table 7; code: src/cl_dataset.py (template)", {"stream.name": name, "stream.prompt": prompt})


SUPERNI, LONG = _order("superni-1", "superni"), _order("long-A", "long")
XL, XXL = "google/t5-v1_1-xl", "google/t5-v1_1-xxl"
LLAMA_7B, LLAMA_13B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf"

_LORA = (SAPT_DATA, SAPT_CODE, SAPT_TEXT, SAPT_LORA, SAPT_LORA_CODE)
_LORA_SUPERNI_T5, _LORA_LONG_T5 = (*_LORA, SUPERNI, T5, SUPERNI_T5), (*_LORA, LONG, T5, LONG_T5, LONG_CODE)
_LORA_SUPERNI_LLAMA = (*_LORA, SUPERNI, LLAMA_CODE, LLAMA_BOS, LLAMA)
_LORA_LONG_LLAMA = (*_LORA, LONG, LLAMA_CODE, LLAMA_BOS, LONG_LLAMA_CODE, LLAMA)
_PROMPT = (SAPT_DATA, SAPT_CODE, SAPT_TEXT, SAPT_PROMPT)
_PROMPT_SUPERNI_T5, _PROMPT_LONG_T5 = (*_PROMPT, SUPERNI, T5, PROMPT_SUPERNI), (*_PROMPT, LONG, T5, PROMPT_LONG)
_PROMPT_LONG_FOUR = (*_PROMPT_LONG_T5, ("paper: appendix C (always 32 in all, four A800)", {"launch.workers": 4}))

SAPT: dict[str, Row] = {
    "sapt-lora-superni-t5-large": Row(
        "t5",
        _LORA_SUPERNI_T5,
        scores=("52.25 / 0.57 / 2.26 / -0.23", "50.82 / 1.24 / 1.50 / -0.90", "51.54 / 0.91 / 1.88 / -0.57"),
    ),
    "sapt-lora-superni-t5-xl": Row("t5", (*_LORA_SUPERNI_T5, FOUR, _model(XL, rate=1e-4))),
    "sapt-lora-superni-t5-xxl": Row("t5", (*_LORA_SUPERNI_T5, FOUR, _model(XXL, rate=1e-4))),
    "sapt-lora-superni-llama2-7b": Row(
        "llama", (*_LORA_SUPERNI_LLAMA, _model(LLAMA_7B, rate=5e-5)), scores=("56.23 / 1.07 / 0.81 / -0.65",)
    ),
    "sapt-lora-superni-llama2-13b": Row(
        "llama", (*_LORA_SUPERNI_LLAMA, _model(LLAMA_13B, rate=1e-5)), scores=("56.95 / 1.39 / 0.81 / -0.56",)
    ),
    "sapt-lora-long-t5-large": Row(
        "t5",
        _LORA_LONG_T5,
        scores=("83.44 / 0.75 / 1.99 / -0.66", "80.60 / 2.25 / 1.72 / -1.94", "82.02 / 1.50 / 1.86 / -1.25"),
    ),
    "sapt-lora-long-t5-xl": Row("t5", (*_LORA_LONG_T5, FOUR, _model(XL, rate=1e-4))),
    "sapt-lora-long-t5-xxl": Row("t5", (*_LORA_LONG_T5, FOUR, _model(XXL, rate=1e-4))),
    "sapt-lora-long-llama2-7b": Row(
        "llama", (*_LORA_LONG_LLAMA, _model(LLAMA_7B, rate=5e-5)), scores=("81.75 / 2.81 / 1.09 / -2.53",)
    ),
    "sapt-lora-long-llama2-13b": Row(
        "llama", (*_LORA_LONG_LLAMA, _model(LLAMA_13B, rate=1e-5)), scores=("82.32 / 1.98 / 0.78 / -1.57",)
    ),
    "sapt-prompt-superni-t5-large": Row(
        "t5",
        _PROMPT_SUPERNI_T5,
        ("dropout", "batch", "micro_batch_size"),
        ("41.88 / 1.41 / 2.83 / -0.75", "40.34 / 1.23 / 1.07 / -0.54", "41.11 / 1.32 / 1.95 / -0.65"),
    ),
    "sapt-prompt-superni-t5-xl": Row("t5", (*_PROMPT_SUPERNI_T5, PROMPT_FOUR, _model(XL))),
    "sapt-prompt-superni-t5-xxl": Row("t5", (*_PROMPT_SUPERNI_T5, PROMPT_FOUR, _model(XXL))),
    "sapt-prompt-superni-llama2-7b": Row(
        "llama",
        (*_PROMPT_SUPERNI_T5, PROMPT_FOUR, PROMPT_LLAMA, LLAMA_BOS, _model(LLAMA_7B)),
        scores=("47.39 / 2.12 / 0.92 / -2.02",),
    ),
    "sapt-prompt-superni-llama2-13b": Row(
        "llama",
        (*_PROMPT_SUPERNI_T5, PROMPT_FOUR, PROMPT_LLAMA, LLAMA_BOS, _model(LLAMA_13B)),
        scores=("52.31 / 1.57 / 1.49 / -1.41",),
    ),
    "sapt-prompt-long-t5-large": Row(
        "t5",
        _PROMPT_LONG_T5,
        scores=("80.20 / 0.91 / 3.63 / -0.76", "78.08 / 2.45 / 2.95 / -2.20", "79.14 / 1.68 / 3.29 / -1.48"),
    ),
    "sapt-prompt-long-t5-xl": Row("t5", (*_PROMPT_LONG_FOUR, _model(XL))),
    "sapt-prompt-long-t5-xxl": Row("t5", (*_PROMPT_LONG_FOUR, _model(XXL))),
    "sapt-prompt-long-llama2-7b": Row(
        "llama",
        (*_PROMPT_LONG_FOUR, PROMPT_LLAMA, LLAMA_BOS, _model(LLAMA_7B)),
        scores=("77.62 / 3.29 / 0.33 / -2.98",),
    ),
    "sapt-prompt-long-llama2-13b": Row(
        "llama",
        (*_PROMPT_LONG_FOUR, PROMPT_LLAMA, LLAMA_BOS, _model(LLAMA_13B)),
        scores=("78.54 / 3.26 / 0.14 / -2.98",),
    ),
}
