"""Statements of papers and code of methods that train on stored examples about their published rows, with places."""

from __future__ import annotations

from published_das import CONTINUAL_LM
from published_sapt import Row

BERT_DATA = (
    "SLM, section 4.1 (data and model of its BERT benchmark)",
    {
        "stream.name": "bert-4",
        "stream.train_rows": 115000,
        "stream.test_rows": 7600,
        "backbone.name": "google-bert/bert-base-uncased",
        "eval.off_task": "wrong",
    },
)

# ---- IDBR: arXiv 2104.05489, code github.com/SALT-NLP/IDBR at 7725c45 ------------------------------------------------
# ---- MbPA++: arXiv 1906.01076, code of LAMOL's authors github.com/Daikon-Sun/EM-in-LLL at 742f6e3 --------------------
# ---- SLM's replay baseline: arXiv 2404.07470, code github.com/Pbihao/SLM at bef385c ----------------------------------

REPLAY: dict[str, Row] = {
    "idbr-bert": Row(
        "bert",
        (
            BERT_DATA,
            (
                "code: src/train.py (arguments, Transformers' AdamW), src/read_data.py (256 tokens), src/model.py",
                {
                    "stream.max_source_tokens": 256,
                    "backbone.pooling": "cls",
                    "method.name": "idbr",
                    "method.width": 128,
                    "method.share": 0.01,
                    "method.selection": "kmeans",
                    "method.every": 10,
                    "method.order_weight": 1.0,
                    "method.task_weight": 1.0,
                    "method.hold": 0.5,
                    "method.hold_replayed": 5.0,
                    "train.batch_size": 8,
                    "train.optimizer": "adamw",
                    "train.learning_rate": 3e-5,
                    "method.task_learning_rate": 5e-4,
                    "train.weight_decay": 0.01,
                    "train.decay_norms_and_biases": True,
                    "train.epsilon": 1e-6,
                    "train.lr_scheduler": "constant_with_warmup",
                    "train.warmup_steps": 1000,
                    "train.max_grad_norm": 0.0,
                },
            ),
            (
                "code: README.md, Setting (Full)",
                {
                    "train.epochs": 1,
                    "train.epochs_by_task": {},
                    "method.generic_weight": 0.5,
                    "method.specific_weight": 0.5,
                },
            ),
        ),
        scores=("75.9, 76.2, 76.4, 76.7", "76.3"),
    ),
    "mbpa-bert": Row(
        "bert",
        (
            BERT_DATA,
            (
                "paper: section 3 (1 % replay, squared distance), K = 32",
                {"method.every": 100, "method.adapt.neighbours": 32, "method.learner.name": "finetune"},
            ),
            (
                "code of h3lio5/episodic-lifelong-learning: main.py:21, data_loader.py:31",
                {"stream.max_source_tokens": 128, "method.encoder.max_tokens": 128, "train.batch_size": 32},
            ),
            (
                "code: settings.py, train.py (one pass, linear schedule), test.py (SGD of the adaptation)",
                {
                    "backbone.pooling": "cls",
                    "backbone.dropout": 0.1,
                    "method.share": 1.0,
                    "method.adapt.steps": 20,
                    "method.adapt.rate": 2e-3,
                    "method.adapt.momentum": 0.9,
                    "method.adapt.weight": 1e-3,
                    "method.encoder.name": "google-bert/bert-base-uncased",
                    "train.epochs": 1,
                    "train.epsilon": 1e-8,
                    "train.learning_rate": 2e-5,
                    "train.lr_scheduler": "linear",
                    "train.weight_decay": 0.0,
                    "train.max_grad_norm": 1.0,
                },
            ),
        ),
        scores=(
            "74.9, 73.1, 74.9, 74.1",
            "74.3",
            "70.6",
            "67.2, 64.7, 64.7, 44.6",
            "57.8",
            "14.8, 27.8, 26.7, 4.5",
            "18.4",
        ),
    ),
    "slm-replay-llama2-7b": Row(
        "llama",
        (
            (
                "SLM, sections 4.1 and 4.3 (1 % of the rows), appendix A.4 (answers of at most 512 tokens)",
                {
                    "stream.name": "llama-9",
                    "stream.test_fraction": 0.15,
                    "eval.max_new_tokens": 512,
                    "eval.off_task": "wrong",
                    "launch.workers": 4,
                    "method.name": "replay",
                    "method.source": "real",
                    "method.share": 0.01,
                    "method.learner.name": "finetune",
                },
            ),
            (
                "code: Llama2_fine_tune/train.py:63-104, dataset/dataset.py, default_offload_opt_param.json",
                {
                    "stream.prompt": "llama2_chat",
                    "stream.max_source_tokens": 512,
                    "stream.max_target_tokens": 512,
                    "backbone.name": "meta-llama/Llama-2-7b-chat-hf",
                    "backbone.dtype": "bfloat16",
                    "train.epochs": 3,
                    "train.batch_size": 256,
                    "train.micro_batch_size": 8,
                    "train.optimizer": "adamw",
                    "train.learning_rate": 3e-5,
                    "train.weight_decay": 0.01,
                    "train.warmup_ratio": 0.03,
                    "train.lr_scheduler": "linear",
                    "train.max_grad_norm": 1.0,
                    "engine.name": "deepspeed",
                    "engine.zero_stage": 1,
                },
            ),
        ),
        scores=("71.5", "23.3", "85.0", "83.7", "23.6", "86.8", "62.3", "18.0", "25.5", "85.3", "38.5"),
    ),
    "der-das-roberta": Row(
        "roberta",
        (
            CONTINUAL_LM,
            (
                "DAS: one model for all domains, 16.4K tokens of each",
                {
                    "method.name": "der++",
                    "method.learner.name": "finetune",
                    "method.share": 100 / 640000,
                    "modifiers": {},
                    "checkpoint.export": "last",
                },
            ),
            (
                "code: DGA at c074732 (config.py, networks/roberta_model.py), PyContinual at 64638a6 (config.py)",
                {"method.alpha": 0.01, "method.beta": 0.03},
            ),
        ),
        scores=("75.78 / 80.46",),
    ),
}
