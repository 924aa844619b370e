"""Statements of GainLoRA's released code about its rows and InfLoRA's, with the place of each."""

from __future__ import annotations

from published_sapt import QV, Row

# ---- GainLoRA: arXiv 2505.15424, code github.com/liangyanshuo/gainlora at a47edf4 -----------------------------------

SCRIPTS = (
    "code: gen_script_*.sh, src/run_t5.py (each fifth epoch, DeepSpeed off), src/cl_trainer_*.py (15 tasks), "
    "src/t5_*.py (earlier LoRAs under no_grad, the pretrained model's dropout)",
    {
        "stream.dev": "file",
        "stream.dev_rows": None,
        "stream.unlabelled": "keep",
        "stream.references": "random",
        "stream.max_source_tokens": 512,
        "stream.max_target_tokens": 50,
        "backbone.name": "google-t5/t5-large",
        "backbone.dtype": "float32",
        "backbone.dropout": 0.1,
        "method.lora_alpha": 32,
        "method.lora_dropout": 0.0,
        "method.target_modules": QV,
        "method.threshold": 0.995,
        "method.threshold_tasks": 15,
        "method.stop_grad_old_blocks": True,
        "train.batch_size": 32,
        "train.optimizer": "adamw",
        "train.learning_rate": 3e-4,
        "train.lr_scheduler": "constant",
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "eval.select": "best_dev",
        "eval.select_epochs": 5,
    },
)
GATED = (
    "code: gen_script_*_gainlora_inflora.sh",
    {
        "method.name": "gainlora",
        "method.base": "inflora",
        "method.gate_width": 100,
        "method.gate_threshold": 0.995,
    },
)
ALONE = (
    "code: gen_script_*_inflora.sh, src/cl_trainer_inflora.py (A as drawn, projected)",
    {"method.name": "inflora", "method.design": "random"},
)
SIZES = "code: the scripts of each benchmark"
SUPERNI = (SIZES, {"stream.name": "superni-1", "stream.prompt": "superni", "method.r": 4, "train.epochs": 100})
LONG = (SIZES, {"stream.name": "long-C", "stream.prompt": "long", "method.r": 8, "train.epochs": 10})

GAINLORA: dict[str, Row] = {
    "gainlora-superni-t5-large": Row("t5", (SCRIPTS, GATED, SUPERNI)),
    "gainlora-long-t5-large": Row("t5", (SCRIPTS, GATED, LONG)),
    "inflora-superni-t5-large": Row("t5", (SCRIPTS, ALONE, SUPERNI)),
    "inflora-long-t5-large": Row("t5", (SCRIPTS, ALONE, LONG)),
}
