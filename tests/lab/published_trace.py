"""Statements of TRACE and its released code about its published rows, with the place of each."""

from __future__ import annotations

from published_sapt import QV, Row, Settings

# ---- TRACE: arXiv 2310.06762, code github.com/BeyonderXX/TRACE at 462e39f -------------------------------------------

PAPER = (
    "paper (5,000 rows, 128 rows a step, prompts of 1,024 tokens and answers of 512)",
    {
        "stream.name": "trace",
        "stream.train_rows": None,
        "stream.test_rows": None,
        "stream.max_source_tokens": 1024,
        "stream.max_target_tokens": 512,
        "train.batch_size": 128,
        "eval.max_new_tokens": 512,
    },
)
CODE = (
    "code: scripts/ (seed, decay, ZeRO 3 of the runs on 8 GPUs), training/main.py (betas, constant rate, the last "
    "weights), utils/ds_utils.py (bfloat16, clipping), utils/data/data_collator.py (no chat template), evaluations/",
    {
        "stream.prompt": "auto",
        "stream.dev_fraction": 0.0,
        "stream.metric_by_task": {"MeetingBank": "rouge_l_trace", "20Minuten": "sari_trace"},
        "backbone.dtype": "bfloat16",
        "backbone.dropout": 0.0,
        "train.optimizer": "adamw",
        "train.betas": [0.9, 0.95],
        "train.lr_scheduler": "constant",
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "engine.name": "deepspeed",
        "engine.zero_stage": 3,
        "eval.select": "last",
        "eval.off_task": "count",
        "launch.workers": 8,
        "seed": 1234,
    },
)
PAPER_EPOCHS = {"train.epochs": 5, "train.epochs_by_task": {"C-STANCE": 1, "FOMC": 1, "ScienceQA": 1}}
SCRIPT_EPOCHS: Settings = {
    "train.epochs": 5,
    "train.epochs_by_task": {"C-STANCE": 5, "FOMC": 3, "MeetingBank": 7, "Py150": 5, "ScienceQA": 3, "20Minuten": 7},
}
WHOLE = {"train.learning_rate": 1e-5, "train.micro_batch_size": 2, **PAPER_EPOCHS}
ADAPTER = {"method.r": 8, "method.lora_alpha": 32, "method.lora_dropout": 0.1, "method.target_modules": QV}

ATTENTION = ["attention.query", "attention.key", "attention.value", "attention.out"]
TREE_SCRIPT: tuple[str, Settings] = (
    "code: scripts/lora_based_methods/Tree_LoRA.sh of TreeLoRA at c6a9b6d (500 rows, 4 GPUs of 8 micro-batches of 1)",
    {
        "stream.name": "trace-500",
        "train.epochs": 2,
        "train.epochs_by_task": {"C-STANCE": 2, "FOMC": 1, "MeetingBank": 3, "ScienceQA": 1, "20Minuten": 3},
        "train.batch_size": 32,
        "train.micro_batch_size": 1,
        "train.learning_rate": 1e-4,
        "train.lr_scheduler": "cosine",
        "engine.zero_stage": 2,
        "launch.workers": 4,
    },
)

KINDS: dict[str, Settings] = {
    "seqft": {"method.name": "finetune", **WHOLE},
    "lora": {
        "method.name": "lora",
        **ADAPTER,
        "train.learning_rate": 1e-4,
        "train.micro_batch_size": 1,
        **SCRIPT_EPOCHS,
    },
    "replay": {
        "method.name": "replay",
        "method.source": "real",
        "method.share": 0.1,
        "method.learner.name": "finetune",
        **WHOLE,
    },
}
"""Paper: rates, epochs (those of LoRA are the scripts' too), 10 % replayed; code: training/main.py, train_replay.sh."""

MODELS = {
    "llama2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "vicuna-7b": "lmsys/vicuna-7b-v1.5",
    "vicuna-13b": "lmsys/vicuna-13b-v1.5",
    "baichuan2-7b": "baichuan-inc/Baichuan2-7B-Chat",
}
SCORES = {
    "llama2-7b-chat": ("48.7 / -8.3", "12.7 / -45.7", "55.5 / 2.6"),
    "llama2-13b-chat": ("49.9 / -7.0", "28.0 / -36.5", "56.6 / 0.4"),
    "vicuna-7b": ("49.2 / -8.4", "33.4 / -23.7", "55.3 / 0.2"),
    "vicuna-13b": ("51.7 / -5.9", "31.6 / -28.4", "56.9 / 0.6"),
    "baichuan2-7b": ("43.4 / -15.4", "43.8 / -9.0", "51.7 / 1.1"),
}
"""The paper: overall performance and backward transfer of SeqFT, LoraSeqFT and Replay."""

MORE_SCORES = {"trace-seqft-llama2-7b-chat": ("32.9 / -22.1", "23.0 / -19")}
NOT_GIVEN = {
    "trace-seqft-baichuan2-7b": ("backbone",),
    "trace-lora-baichuan2-7b": ("backbone", "method"),
    "trace-replay-baichuan2-7b": ("backbone",),
}


def _row(kind: str, model: str, score: str) -> Row:
    name = f"trace-{kind}-{model}"
    said = [PAPER, CODE, ("paper: rates and epochs", KINDS[kind]), ("paper: models", {"backbone.name": MODELS[model]})]
    if name == "trace-lora-baichuan2-7b":
        said.append(("queries, keys and values are one linear", {"method.target_modules": ["W_pack"]}))
    return Row("llama", tuple(said), NOT_GIVEN.get(name, ()), (score, *MORE_SCORES.get(name, ())))


TRACE: dict[str, Row] = {
    f"trace-{kind}-{model}": _row(kind, model, score)
    for model, scores in SCORES.items()
    for kind, score in zip(KINDS, scores, strict=True)
} | {
    "trace-olora-llama2-7b-chat": Row(
        "llama",
        (
            PAPER,
            CODE,
            (
                "code: scripts/train_seq_cl.sh, model/Regular/O_LoRA.py; paper: table 3 (500 rows)",
                {
                    "stream.name": "trace-500",
                    "method.name": "olora",
                    "method.lambda_1": 0.5,
                    "method.lambda_2": 0.0,
                    **ADAPTER,
                    "train.learning_rate": 1e-5,
                    "train.micro_batch_size": 2,
                    **SCRIPT_EPOCHS,
                },
            ),
        ),
        scores=("41.3 / 6.2", "42.78 / 7.16"),
    ),
    "trace-treelora-llama2-7b-chat": Row(
        "llama",
        (
            PAPER,
            CODE,
            TREE_SCRIPT,
            (
                "code: training/main.py and my_peft of TreeLoRA",
                {**ADAPTER, "method.name": "treelora", "method.weight": 0.5, "method.target_modules": ATTENTION},
            ),
        ),
        scores=("43.52 / 3.46",),
    ),
    "trace-moram-llama2-7b-chat": Row(
        "llama",
        (
            PAPER,
            CODE,
            TREE_SCRIPT,
            (
                "code: TRACE/runner_moram.sh and training/main.py of MoRAM",
                {
                    **ADAPTER,
                    "method.name": "moram",
                    "method.lora_alpha": 16,
                    "method.top_k": 8,
                    "method.temperature": 0.03,
                    "method.threshold": 0.2,
                    "method.target_modules": ATTENTION,
                    "train.learning_rate": 5e-4,
                },
            ),
        ),
        scores=("44.54 / 1.37",),
    ),
}
