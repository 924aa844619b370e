"""What Progressive Prompts and MoCL and their code say of each published row, with the place where they say it.

What it does not know: how a config file is laid out, which file extends which.
"""

from __future__ import annotations

from published_others import STANDARD
from published_sapt import Row

# ---- Progressive Prompts: arXiv 2301.12314, code github.com/arazd/ProgressivePrompts at 01572d6 ----------------------
# ---- MoCL: arXiv 2404.00790, code github.com/boschresearch/MoCL-NAACL-2024 at d2b5f1a -------------------------------

_T5_CODE = {
    "backbone.name": "google-t5/t5-large",
    "backbone.dtype": "float32",
    "backbone.dropout": 0.1,
    "train.batch_size": 8,
    "train.optimizer": "adamw",
    "train.lr_scheduler": "constant",
    "train.max_grad_norm": 0.0,
    "stream.max_source_tokens": 512,
    "eval.select": "best_dev",
    "eval.select_epochs": 1,
}
"""What both have in common: AdamW at a constant rate without clipping, weights of the best epoch."""

PROMPTS: dict[str, Row] = {
    "progprompt-long-t5-large": Row(
        "t5",
        (
            (
                "code: README.md (the command with T5-large), T5_codebase/",
                {
                    **_T5_CODE,
                    "method.name": "progprompt",
                    "method.prompt_length": 10,
                    "method.prompt_form": "plain",
                    "stream.per_class": 1000,
                    "train.epochs": 10,
                    "train.learning_rate": 0.3,
                    "train.weight_decay": 1e-5,
                },
            ),
            (
                "SAPT: table 1 and appendix D (the rows, without task ids), code: its data",
                {
                    "method.task_id": False,
                    "stream.name": "long-A",
                    "stream.prompt": "long",
                    "stream.dev": "file",
                    "stream.unlabelled": "keep",
                    "stream.references": "random",
                    "stream.max_target_tokens": 50,
                    "eval.off_task": "count",
                },
            ),
        ),
        scores=("6.14 / 74.64 / -1.65 / -69.53", "9.83 / 68.45 / -3.61 / -63.89", "7.98 / 71.55 / -2.63 / -66.71"),
    ),
    "mocl-t5-large": Row(
        "t5",
        (
            STANDARD,
            (
                "code: run_continual_script/mtl5_t5/E2_compose_prompts_orders.sh, arguments.py, key_encoder.py, "
                "tasks/mtl5/dataloader_mtl_t5.py; model/mtl_prefix_encoder.py and training/trainer_continual_mtl_t5.py "
                "(task ids)",
                {
                    **_T5_CODE,
                    "method.name": "mocl",
                    "method.value": "prefix",
                    "method.prompt_length": 50,
                    "method.weights": "softmax",
                    "method.scale": 8.0,
                    "method.pull": 1.0,
                    "method.task_id": True,
                    "stream.per_class": 16,
                    "stream.dev_per_class": 500,
                    "train.epochs": 40,
                    "train.learning_rate": 2e-2,
                    "train.learning_rate_by_task": {"amazon": 5e-2, "dbpedia": 5e-2},
                    "train.weight_decay": 0.0,
                },
            ),
        ),
        ("max_target_tokens",),
        ("75.9",),
    ),
}
