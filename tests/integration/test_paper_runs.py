"""Files of published rows train from end to end: tiny models and tasks stand in, every other setting is the file's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import Lab, exported, matrix, run, trace

from raycl.bank import Bank
from raycl.methods.registry import method_class
from raycl.storage import Storage
from raycl.training.setup.run_config import load_config

FOLDER = Path(__file__).resolve().parents[2] / "jobs/configs/paper"
NAMES = ("mnli", "copa")
"""The names of the two tasks: some files have settings for these."""

SMALL = (
    *("stream.max_source_tokens=56", "train.epochs=1", "train.batch_size=4", "train.micro_batch_size=2"),
    *("train.log_every_s=1000", "launch.workers=1"),
)
CARVED = ("stream.dev=carve", "stream.dev_fraction=0.25", "eval.select_epochs=1", "stream.max_target_tokens=4")
SAPT = (*CARVED, "method.generator.max_tokens=8", "method.arm.batch=2")
SLM = ("method.keys.groups=4", "method.keys.epochs=1", "method.encoder.max_tokens=64")
ANSWERS = ("stream.max_target_tokens=4",)
TRACE = (
    *("stream.max_source_tokens_by_task={}", "stream.metric_by_task={}", "train.epochs_by_task={}", *ANSWERS),
    "eval.max_new_tokens=4",
)
FEW = ("stream.per_class=4", "stream.dev_per_class=2")

ROWS = {
    "sapt-lora-long-t5-large": ("t5", (*SAPT, "method.generator.steps=2")),
    "sapt-lora-superni-llama2-7b": ("llama", (*SAPT, "method.generator.steps=2")),
    "sapt-prompt-long-t5-large": ("t5", (*SAPT, "method.generator.epochs=1")),
    "slm-bert": ("bert", SLM),
    "slm-t5-large": ("t5", (*SLM, *ANSWERS, *FEW)),
    "slm-llama2-7b": ("llama", (*SLM, *ANSWERS, "eval.max_new_tokens=4")),
    "olora-long-t5-large": ("t5", ANSWERS),
    "progprompt-long-t5-large": ("t5", CARVED),
    "l2p-long-t5-large": ("t5", CARVED),
    "lfpt5-long-t5-large": ("t5", (*CARVED, "method.max_tokens=12")),
    "mocl-t5-large": ("t5", (*ANSWERS, *FEW, "train.learning_rate_by_task={}")),
    "migu-ft-t5-large": ("t5", ANSWERS),
    "migu-lorareplay-t5-large": ("t5", ANSWERS),
    "migu-olora-t5-large": ("t5", ANSWERS),
    "migu-das-roberta": ("masked", ()),
    "das-roberta": ("masked", ()),
    "hat-adapter-das-roberta": ("masked", ()),
    "demix-das-roberta": ("masked", ()),
    "adapter-das-roberta": ("masked", ()),
    "hat-das-roberta": ("masked", ()),
    "ewc-das-roberta": ("masked", ()),
    "der-das-roberta": ("masked", ()),
    "trace-seqft-llama2-7b-chat": ("llama", TRACE),
    "trace-replay-llama2-7b-chat": ("llama", TRACE),
    "trace-olora-llama2-7b-chat": ("llama", TRACE),
    "migu-das-end-tasks": ("bert", ("train.epochs_by_task={}",)),
}


def shortened(task: dict[str, Any], folder: Path) -> Path:
    """Return a folder with the first rows of a task: two steps of training."""
    folder.mkdir()
    for split, count in (("train", 8), ("test", 4)):
        lines = (Path(task["path"]) / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]))
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_a_published_row_trains(row: str, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCL_DATA", str(lab.root))
    kind, settings = ROWS[row]
    pairs = list(zip(NAMES, lab.tasks, strict=True))
    places = {name: task["path"] if FEW[0] in settings else shortened(task, tmp_path / name) for name, task in pairs}
    tasks = [{"name": name, "path": str(place)} for name, place in places.items()]
    if row.startswith("sapt"):
        tasks = [{**task, "definition": "is the sky warm"} for task in tasks]
    given = [*SMALL, *settings, f"backbone.name={lab.model_folder(kind)}", f"stream.tasks={json.dumps(tasks)}"]
    if row.startswith("slm"):
        given.append(f"method.encoder.name={lab.model_folder('bert')}")
    config = load_config(str(FOLDER / f"{row}.yaml"), given)

    storage = Storage.at(str(tmp_path / "run"))
    run(config, storage)

    assert trace(storage)
    assert [[score is not None for score in scores] for scores in matrix(storage)] == [[True, False], [True, True]]
    learner = getattr(config.method, "learner", config.method)
    if method_class(learner.name).trains_backbone:
        assert bool(exported(storage)) == (config.checkpoint.export != "none")
    else:
        assert Bank(storage.sub("bank")).newest() is not None
