"""Statements of DAS and its released code, ContinualLM, about each published row, with the place of each."""

from __future__ import annotations

from published_sapt import Row

CONTINUAL_LM = (
    "code: ContinualLM at 57e498c (config.py, scripts/posttrain_das.sh, utils/optimize.py, approaches/posttrain.py: "
    "2580 steps; approaches/update_model.py: no clipping)",
    {
        "stream.name": "das",
        "stream.max_source_tokens": 164,
        "train.optimizer": "adamw",
        "stream.objective": "mlm",
        "stream.mask_share": 0.15,
        "stream.train_rows": None,
        "stream.train_rows_by_task": {},
        "backbone.name": "FacebookAI/roberta-base",
        "backbone.dropout": 0.1,
        "train.epochs": 2,
        "train.epochs_by_task": {},
        "train.max_steps": 640000 // 248,
        "train.batch_size": 248,
        "train.micro_batch_size": 62,
        "train.learning_rate": 1e-4,
        "train.lr_scheduler": "linear",
        "train.warmup_steps": 0,
        "train.warmup_ratio": 0.1,
        "train.weight_decay": 0.0,
        "train.epsilon": 1e-6,
        "train.max_grad_norm": 0.0,
        "launch.workers": 4,
    },
)

DAS_ROWS: dict[str, Row] = {
    "das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "paper: section 3; code: posttrain.py, networks/baselines/simcse.py",
                {
                    "method.name": "das",
                    "method.general": True,
                    "method.sample": 10000,
                    "method.contrast": "batch",
                    "method.temperature": 0.05,
                    "checkpoint.export": "last",
                },
            ),
        ),
        scores=("77.90 / 81.90", "76.59 / 81.07"),
    ),
    "hat-adapter-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "code: config.py, utils/model.py, networks/adapters/ (reduction 16, behind feed-forward blocks)",
                {
                    "method.name": "hat-adapter",
                    "method.bottleneck_size": 48,
                    "method.target_modules": ["ffn.out"],
                    "method.max_scale": 400,
                    "method.sparsity": 0.75,
                },
            ),
        ),
        scores=("74.63 / 79.78",),
    ),
    "demix-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "code: config.py, posttrain.py, networks/baselines/demix.py",
                {
                    "method.name": "demix",
                    "method.bottleneck_size": 48,
                    "method.target_modules": ["ffn.out"],
                    "method.sample": 10000,
                },
            ),
        ),
        scores=("74.70 / 79.66",),
    ),
    "adapter-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "code: config.py (reduction), utils/model.py (behind feed-forward blocks alone)",
                {
                    "method.name": "adapter",
                    "method.reduction": 16,
                    "method.target_modules": ["ffn.out"],
                    "modifiers": {},
                },
            ),
        ),
        scores=("74.05 / 79.48",),
    ),
    "hat-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "code: config.py (s_max), utils/model.py (weight of the sparsity); finetune.py (a task's own masks)",
                {
                    "method.name": "hat",
                    "method.max_scale": 400,
                    "method.sparsity": 0.75,
                    "modifiers": {},
                    "checkpoint.export": "each",
                },
            ),
        ),
    ),
}
