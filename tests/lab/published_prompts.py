"""Statements of Progressive Prompts, MoCL and L2P and their code about each published row, with the place of each."""

from __future__ import annotations

from published_others import STANDARD
from published_sapt import LONG, SAPT_DATA, SUPERNI, T5, Row

# ---- Progressive Prompts: arXiv 2301.12314, code github.com/arazd/ProgressivePrompts at 01572d6 ----------------------
# ---- MoCL: arXiv 2404.00790, code github.com/boschresearch/MoCL-NAACL-2024 at d2b5f1a -------------------------------
# ---- L2P: arXiv 2112.08654, as SAPT runs it (arXiv 2401.08295) -------------------------------------------------------

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
"""Settings that both have in common: AdamW at a constant rate without clipping, weights of the best epoch."""

_PROGPROMPT = (
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
            "train.decay_norms_and_biases": True,
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
)
_L2P = (
    "SAPT: appendix C (10 positions)",
    {"method.name": "l2p", "method.prompt_length": 10, "engine.name": "torch"},
)

PROMPTS: dict[str, Row] = {
    "progprompt-long-t5-large": Row(
        "t5",
        _PROGPROMPT,
        scores=("6.14 / 74.64 / -1.65 / -69.53", "9.83 / 68.45 / -3.61 / -63.89", "7.98 / 71.55 / -2.63 / -66.71"),
    ),
    "progprompt-superni-t5-large": Row(
        "t5",
        (*_PROGPROMPT, SUPERNI, ("SAPT: code, its data (all rows)", {"stream.per_class": None})),
        ("epochs",),
        ("2.83 / 35.65 / -3.70 / -33.27", "3.85 / 35.48 / -2.87 / -33.09", "3.34 / 35.57 / -3.29 / -33.18"),
    ),
    "l2p-long-t5-large": Row(
        "t5",
        (SAPT_DATA, LONG, T5, _L2P),
        ("dropout", "pool_size", "top_k", "pull", "epochs", "batch_size", "optimizer", "learning_rate"),
        ("58.61 / 21.55 / 1.01 / -15.43", "57.34 / 23.42 / 1.70 / -17.82", "57.98 / 22.49 / 1.36 / -16.63"),
    ),
    "l2p-superni-t5-large": Row(
        "t5",
        (SAPT_DATA, SUPERNI, T5, _L2P),
        ("epochs", "learning_rate"),
        ("15.18 / 6.23 / -20.97 / -3.65", "10.27 / 17.51 / -17.30 / -12.24", "12.73 / 11.87 / -19.14 / -7.95"),
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
