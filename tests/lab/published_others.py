"""Statements of SLM, O-LoRA and MIGU and their released code about each published row, with the place of each."""

from __future__ import annotations

from published_das import CONTINUAL_LM
from published_sapt import QV, Row

# ---- SLM: arXiv 2404.07470, code github.com/Pbihao/SLM at bef385c ---------------------------------------------------

SLM_TEXT = (
    "paper: algorithm 1, sections 3.2, 3.3 and 4.2, table 10, appendix A.4 (AdamW in all experiments)",
    {
        "method.name": "slm",
        "method.value": "jare",
        "method.router": "keys",
        "method.train_scope": "own",
        "method.value_layout": "shared",
        "method.target_modules": ["attention.out"],
        "method.keys.mask": 0.2,
        "method.keys.rate": 1e-3,
        "method.keys.update": "official",
        "method.retrieval.rule": "group_union",
        "method.retrieval.scope": "instance",
        "method.retrieval.task_id": False,
        "stream.max_source_tokens": 512,
        "train.optimizer": "adamw",
        "train.weight_decay": 0.01,
        "eval.off_task": "wrong",
        "eval.labels": "all",
    },
)
SLM_KEYS = (
    "paper: tables 12 and 14 (6 groups, 2 chosen); code: vectordb/ (4 slots a task, 3 epochs, semi-orthogonal start)",
    {
        "method.keys.groups": 6,
        "method.keys.slots": 4,
        "method.keys.epochs": 3,
        "method.keys.start": "orthogonal",
        "method.retrieval.top_k": 2,
        "method.encoder.layer": "last",
        "method.a_init_std": 1.0,
    },
)
MPNET = ("code: SLM-bert/models/retriever.py", {"method.encoder.name": "sentence-transformers/nli-mpnet-base-v2"})

# ---- O-LoRA: arXiv 2310.14152, code github.com/cmnfriend/O-LoRA at 07117e1 ------------------------------------------

CL_DATA = (
    "code: scripts/ of O-LoRA and MIGU (lengths, names in the prompt, no evaluation before the end)",
    {
        "stream.prompt": "olora",
        "stream.prompt_names": True,
        "stream.dev_fraction": 0.0,
        "stream.unlabelled": "keep",
        "stream.max_source_tokens": 512,
        "stream.max_target_tokens": 50,
        "stream.train_rows": None,
        "eval.off_task": "count",
        "eval.select": "last",
        "backbone.name": "google-t5/t5-large",
        "backbone.dropout": 0.1,
        "train.epochs": 1,
        "train.micro_batch_size": 8,
        "train.optimizer": "adamw",
        "train.lr_scheduler": "constant",
        "train.weight_decay": 0.0,
    },
)
STANDARD = ("MIGU, table 7", {"stream.name": "std-1"})
ADAPTER = (
    "code: src/run_uie_lora.py of both (PEFT's own layers for T5)",
    {"method.r": 8, "method.lora_alpha": 32, "method.lora_dropout": 0.1, "method.target_modules": QV},
)
OLORA = (
    "code: scripts/order_1.sh of O-LoRA",
    {
        "method.name": "olora",
        "method.lambda_1": 0.5,
        "method.lambda_2": 0.0,
        "train.learning_rate": 1e-3,
        "train.batch_size": 64,
        "engine.name": "deepspeed",
        "engine.zero_stage": 2,
        "launch.workers": 8,
        "backbone.dtype": "float32",
    },
)
OLORA_LONG = (
    "code: scripts/long.sh of O-LoRA",
    {
        "stream.name": "long-C",
        "train.epochs_by_task": {"mnli": 2},
        "method.lambda_1_by_task": {"dbpedia": 5, "agnews": 5, "yahoo": 5, "multirc": 5, "boolq": 5, "wic": 5},
        "method.lambda_2_by_task": {
            "copa": 0.1,
            "qqp": 0.1,
            "rte": 0.3,
            "sst2": 0.1,
            "yahoo": 0.1,
            "boolq": 0.1,
            "wic": 0.3,
        },
    },
)

# ---- MIGU: arXiv 2406.17245, code github.com/wenyudu/MIGU at 3f3b9f0 ------------------------------------------------

MIGU_TEXT = (
    "paper: sections 3.2 and 5.1 (formula, layers)",
    {
        "modifiers.migu.rule": "floor",
        "modifiers.migu.layers": ["attention", "ffn"],
        "modifiers.migu.include_lm_head": False,
        "modifiers.migu.random_update": False,
        "modifiers.migu.clusters": None,
    },
)
MIGU_CODE = (
    "code: scripts/full_tuning/, scripts/lora_tuning/, configs/ds_configs/stage0.config, src/uie_trainer_ft.py",
    {
        "modifiers.migu.skip_first_task": True,
        "modifiers.migu.count_pads": True,
        "modifiers.migu.mask_update": False,
        "train.epochs_by_task": {},
        "backbone.dtype": "bfloat16",
        "engine.name": "deepspeed",
    },
)
MIGU_RATE = ("code: scripts/full_tuning/, scripts/lora_tuning/", {"train.learning_rate": 1e-4})


def _threshold(value: float) -> tuple[str, dict[str, float]]:
    return ("paper: section 5.1, figure 4", {"modifiers.migu.threshold": value})


_MIGU = (CL_DATA, STANDARD, MIGU_TEXT, MIGU_CODE)
_LORA_LEARNER = {f"method.learner.{path.partition('.')[2]}": value for path, value in ADAPTER[1].items()}

OTHERS: dict[str, Row] = {
    "slm-bert": Row(
        "bert",
        (
            SLM_TEXT,
            SLM_KEYS,
            MPNET,
            (
                "paper: sections 4.1 and 4.2, table 10 (four GPUs)",
                {
                    "stream.name": "bert-4",
                    "stream.train_rows": 115000,
                    "stream.test_rows": 7600,
                    "backbone.name": "google-bert/bert-base-uncased",
                    "train.learning_rate": 2e-4,
                    "train.batch_size": 32,
                    "train.epochs": 5,
                    "train.warmup_steps": 100,
                    "launch.workers": 4,
                },
            ),
            (
                "code: SLM-bert/models/config.py, SLM-bert/train.py, vectordb/script.sh",
                {
                    "method.r": 12,
                    "method.head_rule": "label_count",
                    "method.keys.batch_size": 16,
                    "backbone.dropout": 0.1,
                    "backbone.dtype": "float32",
                    "backbone.pooling": "cls",
                },
            ),
        ),
        ("lr_scheduler",),
        ("79.2, 78.8, 79.0, 79.2", "79.1", "80.0"),
    ),
    "slm-t5-large": Row(
        "t5",
        (
            SLM_TEXT,
            SLM_KEYS,
            (
                "paper: sections 4.1 and 4.2, table 10 (four GPUs)",
                {
                    "stream.name": "std-1",
                    "stream.per_class": 16,
                    "stream.dev_per_class": 16,
                    "stream.answers": "words",
                    "backbone.name": "google-t5/t5-large",
                    "train.learning_rate": 2e-2,
                    "train.batch_size": 16,
                    "train.micro_batch_size": 4,
                    "train.epochs": 100,
                    "train.warmup_steps": 100,
                    "launch.workers": 4,
                },
            ),
            ("code: SLM-llama/vecordb/script.sh (keys of T5: 4 a GPU, 2 GPUs)", {"method.keys.batch_size": 8}),
        ),
        ("max_target_tokens", "dtype", "dropout", "r", "encoder", "lr_scheduler"),
        ("73.1, 72.9, 73.3", "73.1"),
    ),
    "slm-llama2-7b": Row(
        "llama",
        (
            SLM_TEXT,
            SLM_KEYS,
            (
                "paper: sections 4.1 and 4.2, table 10, appendix A.4 (answers of at most 512 tokens)",
                {
                    "stream.name": "llama-9",
                    "stream.test_fraction": 0.15,
                    "train.learning_rate": 2e-4,
                    "train.micro_batch_size": 2,
                    "train.epochs": 3,
                    "train.warmup_ratio": 0.03,
                    "launch.workers": 4,
                    "eval.max_new_tokens": 512,
                },
            ),
            (
                "code: SLM-llama/train.py, SLM-llama/models/, SLM-llama/dataset/dataset.py",
                {
                    "stream.prompt": "llama2_chat",
                    "stream.max_target_tokens": 512,
                    "backbone.name": "meta-llama/Llama-2-7b-chat-hf",
                    "backbone.dtype": "bfloat16",
                    "method.r": 8,
                    "method.encoder.name": "sentence-transformers/nli-roberta-base-v2",
                    "method.keys.batch_size": 16,
                    "train.batch_size": 64,
                    "train.lr_scheduler": "cosine",
                    "engine.name": "deepspeed",
                    "engine.zero_stage": 1,
                },
            ),
        ),
        scores=("89.0", "72.4", "85.4", "85.1", "72.5", "89.1", "82.3"),
    ),
    "olora-standard-t5-large": Row(
        "t5", (CL_DATA, STANDARD, ADAPTER, OLORA), scores=("75.8", "78.37", "68.62", "62.88")
    ),
    "olora-long-t5-large": Row(
        "t5", (CL_DATA, ADAPTER, OLORA, OLORA_LONG), scores=("69.6", "73.88", "72.17", "58.49", "32.43")
    ),
    "migu-ft-t5-large": Row(
        "t5",
        (*_MIGU, MIGU_RATE, _threshold(0.7), ("paper: section 4.1", {"method.name": "finetune"})),
        ("batch_size",),
        ("78.8 / 75.7", "73.8 / 68.3"),
    ),
    "migu-lora-t5-large": Row(
        "t5",
        (*_MIGU, MIGU_RATE, ADAPTER, _threshold(0.7), ("paper: section 4.1", {"method.name": "lora"})),
        scores=("73.3 / 67.9", "61.2 / 46.0"),
    ),
    "migu-inclora-t5-large": Row(
        "t5",
        (*_MIGU, ADAPTER, _threshold(0.7), ("paper: section 4.1", {"method.name": "inclora"})),
        ("learning_rate",),
        scores=("76.4 / 68.8", "68.7 / 64.7"),
    ),
    "migu-olora-t5-large": Row(
        "t5",
        (
            *_MIGU,
            ADAPTER,
            _threshold(0.1),
            (OLORA[0], {path: OLORA[1][path] for path in OLORA[1] if path[:7] == "method." or "rate" in path}),
        ),
        scores=("76.6 / 75.8", "70.0 / 69.6"),
    ),
    "migu-lorareplay-t5-large": Row(
        "t5",
        (
            *_MIGU,
            _threshold(0.4),
            (ADAPTER[0], _LORA_LEARNER),
            (
                "paper: section 4.1 (2 %)",
                {"method.name": "replay", "method.share": 0.02, "method.learner.name": "lora"},
            ),
        ),
        ("learning_rate",),
        scores=("76.2 / 74.5", "76.5 / 75.2"),
    ),
    "moelora-migu-t5-large": Row(
        "t5",
        (
            *(CL_DATA, STANDARD),
            ("paper: section 4.1 (as many LoRAs as tasks)", {"method.name": "moelora", "method.experts": 4}),
            (MIGU_CODE[0], {"backbone.dtype": "bfloat16", "modifiers": {}}),
        ),
        ("r", "lora_alpha", "lora_dropout", "target_modules", "learning_rate"),
        ("54.1", "27.6"),
    ),
    "migu-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            MIGU_TEXT,
            (
                "paper: section 4.2",
                {
                    "method.name": "finetune",
                    "modifiers.migu.skip_first_task": False,
                    "checkpoint.export": "last",
                },
            ),
        ),
        ("migu",),
        ("76.73 / 81.19", "76.36 / 80.77", "80.14 / 82.41", "79.69 / 82.07"),
    ),
    "migu-das-end-tasks": Row(
        "roberta",
        (
            (
                "code: ContinualLM at 57e498c (config.py, utils/model.py, approaches/finetune.py: AdamW's own epsilon, "
                "no clipping; networks/transformers/roberta.py: RobertaClassificationHead)",
                {
                    "stream.name": "das",
                    "stream.schedule": "separate",
                    "stream.max_source_tokens": 164,
                    "backbone.dropout": 0.1,
                    "backbone.pooling": "cls",
                    "method.name": "finetune",
                    "train.epochs": 5,
                    "train.epochs_by_task": {"acl": 10, "pubmed": 10, "phone": 15, "camera": 15},
                    "train.batch_size": 16,
                    "train.optimizer": "adamw",
                    "train.learning_rate": 3e-5,
                    "train.lr_scheduler": "linear",
                    "train.warmup_steps": 0,
                    "train.warmup_ratio": 0.0,
                    "train.epsilon": 1e-6,
                    "train.weight_decay": 0.01,
                    "train.decay_norms_and_biases": True,
                    "train.max_grad_norm": 0.0,
                },
            ),
        ),
    ),
    "ewc-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "code: ContinualLM, networks/baselines/ewc.py, utils/model.py, posttrain.py",
                {
                    "method.name": "ewc",
                    "method.learner.name": "finetune",
                    "method.weight": 5000,
                    "method.merge": "mean",
                    "method.rows": 10000,
                    "modifiers": {},
                    "checkpoint.export": "last",
                },
            ),
        ),
    ),
    "migu-code-llama2-7b": Row(
        "llama",
        (
            (
                "paper: section 4.3, appendix B.1",
                {
                    "backbone.name": "meta-llama/Llama-2-7b-hf",
                    "method.name": "lora",
                    "train.epochs": 32,
                },
            ),
            MIGU_TEXT,
        ),
        (
            *("prompt", "max_source_tokens", "max_target_tokens", "dtype", "r", "lora_alpha", "lora_dropout"),
            *("target_modules", "migu", "batch_size", "learning_rate", "lr_scheduler"),
        ),
        ("59.4", "58.4"),
    ),
}
