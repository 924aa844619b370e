"""Statements of EPI and LFPT5, which learn prefixes and prompts, and their code about published rows, with places."""

from __future__ import annotations

from published_sapt import LONG, SAPT_DATA, SUPERNI, Row

# ---- EPI: ACL 2023 (2023.acl-long.612), code github.com/Dicer-Zz/EPI at 8e1e166 -------------------------------------

EPI = (
    "code: scripts/5ds.sh, README.md, run.py, utils/assets.py, trainers/epi.py",
    {
        "stream.name": "bert-4",
        "stream.per_class": 2000,
        "stream.max_source_tokens": 256,
        "backbone.name": "google-bert/bert-base-uncased",
        "backbone.pooling": "mean",
        "backbone.dropout": 0.1,
        "method.name": "epi",
        "method.value": "prefix",
        "method.prompt_length": 16,
        "method.ridge": 0.0,
        "train.epochs": 5,
        "train.batch_size": 32,
        "train.optimizer": "adamw",
        "train.learning_rate": 0.03,
        "train.lr_scheduler": "linear",
        "train.warmup_ratio": 0.1,
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 0,
        "launch.workers": 1,
    },
)

# ---- LFPT5: arXiv 2110.07298, code github.com/qcwthu/Lifelong-Fewshot-Language-Learning at cf7d17c ------------------

LFPT5 = (
    "code: Classification/Classification.sh, Classification.py, model.py, dataset.py, utils.py",
    {
        "stream.name": "std-1",
        "stream.per_class": 16,
        "stream.dev_per_class": 16,
        "stream.max_source_tokens": 128,
        "backbone.name": "google/t5-large-lm-adapt",
        "backbone.dropout": 0.1,
        "method.name": "lfpt5",
        "method.prompt_length": 300,
        "method.lm_weight": 0.25,
        "method.kd_weight": 0.01,
        "method.source": "generated",
        "method.share": 0.125,
        "method.max_tokens": 256,
        "method.draws": 50400,
        "method.top_k": 64,
        "method.repetition_penalty": 2.5,
        "train.epochs": 421,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.optimizer": "adafactor",
        "train.learning_rate": 0.5,
        "train.lr_scheduler": "constant",
        "train.weight_decay": 1e-5,
        "train.max_grad_norm": 0,
        "eval.select": "best_dev",
        "launch.workers": 1,
    },
)

LFPT5_SAPT = (
    "SAPT: appendix C (300 positions, 2 % of pseudo-samples, other settings of the code), code: as LFPT5 above",
    {
        "backbone.dtype": "float32",
        "backbone.dropout": 0.1,
        "method.name": "lfpt5",
        "method.prompt_length": 300,
        "method.share": 0.02,
        **{
            name: LFPT5[1][name]
            for name in (
                *("method.lm_weight", "method.kd_weight", "method.source", "method.top_k"),
                *("method.repetition_penalty", "train.optimizer", "train.lr_scheduler", "train.weight_decay"),
                "train.max_grad_norm",
            )
        },
    },
)

EPI_LFPT5: dict[str, Row] = {
    "epi-bert": Row("bert", (EPI,)),
    "lfpt5-t5-large": Row("t5", (LFPT5,), scores=("47.6, 52.6, 57.9", "52.7")),
    "lfpt5-long-t5-large": Row(
        "t5",
        (SAPT_DATA, LONG, LFPT5_SAPT),
        ("name", "max_tokens", "epochs", "batch_size", "learning_rate"),
        ("66.62 / 14.57 / 2.89 / -13.60", "67.40 / 13.20 / 2.06 / -11.99", "67.01 / 13.89 / 2.48 / -12.80"),
    ),
    "lfpt5-superni-t5-large": Row(
        "t5",
        (SAPT_DATA, SUPERNI, LFPT5_SAPT),
        ("epochs",),
        ("39.03 / 10.87 / -0.41 / -9.85", "29.70 / 20.72 / -0.51 / -19.08", "34.37 / 15.80 / -0.46 / -14.47"),
    ),
}
