"""What the papers and code of methods that train on stored examples say of their published rows, and where.

What it does not know: how a config file is laid out, which file extends which.
"""

from __future__ import annotations

from published_das import CONTINUAL_LM
from published_sapt import Row

# ---- MbPA++: arXiv 1906.01076, code of LAMOL's authors github.com/Daikon-Sun/EM-in-LLL -------------------------------

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

# ---- IDBR: arXiv 2104.05489, code github.com/SALT-NLP/IDBR at 7996e8b ------------------------------------------------

REPLAY: dict[str, Row] = {
    "idbr-bert": Row(
        "bert",
        (
            BERT_DATA,
            (
                "code: src/train.py (arguments, optimizer), src/read_data.py (256 tokens), src/model.py",
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
                    "method.generic_weight": 0.5,
                    "method.specific_weight": 0.5,
                    "method.hold": 0.5,
                    "method.hold_replayed": 5.0,
                    "train.batch_size": 8,
                    "train.optimizer": "adamw",
                    "train.learning_rate": 3e-5,
                    "train.task_learning_rate": 5e-4,
                    "train.weight_decay": 0.01,
                    "train.lr_scheduler": "constant_with_warmup",
                    "train.warmup_steps": 1000,
                    "train.max_grad_norm": 0.0,
                },
            ),
            (
                "code: README.md (epochs of a sequence of five, of its replay baseline)",
                {"train.epochs_by_task": {"agnews": 4, "yelp": 3, "amazon": 3, "yahoo": 2, "dbpedia": 1}},
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
                "code: settings.py, train.py (one pass, linear schedule), test.py",
                {
                    "method.share": 1.0,
                    "method.adapt.steps": 20,
                    "method.adapt.rate": 2e-3,
                    "method.adapt.weight": 1e-3,
                    "method.encoder.name": "google-bert/bert-base-uncased",
                    "train.epochs": 1,
                    "train.learning_rate": 2e-5,
                    "train.lr_scheduler": "linear",
                    "train.weight_decay": 0.0,
                    "train.max_grad_norm": 1.0,
                },
            ),
        ),
        ("max_source_tokens", "batch_size"),
        ("74.9, 73.1, 74.9, 74.1", "74.3", "70.6"),
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
