"""Labels that compete, in training and in answers: all seen so far, or the task's own alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase
from tiny import TASKS, VARIANTS, Complete, Lab, run, trace

from raycl.backbone.encoder import EncoderBackbone
from raycl.data.loader import batch_of
from raycl.errors import ConfigError
from raycl.generation.batch_answers import predict
from raycl.methods.base import activate_batch
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.records.recorder import Listeners
from raycl.training.setup.checks import check
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext

ALONE = DistributedContext.alone(torch.device("cpu"))


def test_a_task_competes_alone_and_a_replayed_row_with_all(lab: Lab) -> None:
    backbone = build(lab.config("bert", "finetune"), ALONE)[0].backbone
    assert isinstance(backbone, EncoderBackbone)
    backbone.learn_labels(["old", "left", "right"])
    torch.nn.init.normal_(backbone.head.weight, generator=torch.Generator().manual_seed(0))
    batch = batch_of(backbone.codec.encode_source(["red blue cat", "a dog"]), backbone.codec.pad_id)
    batch.label_ids[:] = torch.tensor([2, 0])
    whole = backbone.train()(batch)
    backbone.competing_labels = ("left", "right")
    result = backbone(batch)
    expected = whole.logits[0, 1:].logsumexp(0) - whole.logits[0, 2] + whole.logits[1].logsumexp(0) - whole.logits[1, 0]
    torch.testing.assert_close(result.loss_sum, expected)
    assert torch.equal(result.logits, whole.logits) and result.loss_sum < whole.loss_sum
    torch.testing.assert_close(backbone.eval()(batch).loss_sum, whole.loss_sum)


def test_predictions_are_limited_to_the_allowed_labels(lab: Lab) -> None:
    backbone = build(lab.config("bert", "finetune"), ALONE)[0].backbone.eval()
    assert isinstance(backbone, EncoderBackbone)
    backbone.learn_labels(["old", "left", "right"])
    with torch.no_grad():
        backbone.head.bias.copy_(torch.tensor([2.0, 0.0, 1.0]))
    batch = batch_of(backbone.codec.encode_source(["red blue cat", "a dog"]), backbone.codec.pad_id)
    assert predict(backbone, batch, 1) == ["old", "old"]
    backbone.allowed_labels = dict.fromkeys(("left", "right"), ())
    assert predict(backbone, batch, 1) == ["right", "right"]
    backbone.allowed_labels = {"unseen": ()}
    assert predict(backbone, batch, 1) == ["", ""]


@pytest.mark.parametrize("method", ["lora", VARIANTS["sapt-prompt"]])
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_generated_answers_are_allowed_labels(
    lab: Lab, kind: str, method: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likelier one at the first token where they part; with learned positions in front of the text, too."""
    context, _ = build(lab.config(kind, method), ALONE)
    begin_phase(context)
    backbone, codec = context.backbone.eval(), context.backbone.codec
    batch = batch_of(codec.encode_source(["red blue cat", "a dog", "a"]), codec.pad_id)
    with activate_batch(context.method, batch):
        free = predict(backbone, batch, 6)
        labels = ("red cat", "red dog", "blue")
        backbone.allowed_labels = dict(zip(labels, codec.encode_target(labels), strict=True))
        told = predict(backbone, batch, 6)
        backbone.allowed_labels = dict(reversed(backbone.allowed_labels.items()))
        assert predict(backbone, batch, 6) == told
        backbone.allowed_labels = {"blue": codec.encode_target(["blue"])[0]}
        assert predict(backbone, batch, 6) == ["blue"] * 3
        if kind == "t5":
            monkeypatch.setattr(backbone.model.generation_config, "forced_bos_token_id", 0)
            assert predict(backbone, batch, 6) == ["blue"] * 3
            monkeypatch.undo()
        backbone.allowed_labels = {}
        assert predict(backbone, batch, 6) == free
    assert set(told) <= {"red cat", "red dog", "blue"} and not set(free) & set(told)


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_task_incremental_evaluation_uses_the_tasks_labels_and_changes_no_weights(
    lab: Lab, complete: Complete, tmp_path: Path, kind: str
) -> None:
    every, own = complete(kind, "lora", "torch").storage, Storage.at(tmp_path)
    run(lab.config(kind, "lora", eval={"labels": "task"}), own)

    def strange(folder: Storage) -> int:
        """Return answers that are none of their task's labels."""
        count = 0
        for task, classes in TASKS.items():
            lines = folder.read(f"predictions/001-{[*TASKS][1]}/{task}.jsonl").decode().splitlines()
            count += sum(json.loads(line)["answer"] not in dict(classes) for line in lines)
        return count

    assert strange(every) > 0 and strange(own) == 0
    assert trace(every) == trace(own)


@pytest.mark.parametrize(("label_loss", "stays"), [("seen", False), ("task", True)])
def test_weights_of_earlier_labels_do_not_change(lab: Lab, tmp_path: Path, label_loss: str, stays: bool) -> None:
    context, open_engine = build(lab.config("bert", "lora", train={"label_loss": label_loss}), ALONE)
    backbone, heads = context.backbone, []
    assert isinstance(backbone, EncoderBackbone)

    def look(record: dict[str, Any]) -> None:
        heads.append(backbone.head.weight.detach().clone())

    StreamLoop(context, open_engine, Storage.at(tmp_path), ALONE, Listeners(on_phase=look)).run()
    assert torch.equal(heads[1][:2], heads[0]) is stays
    assert not torch.equal(heads[1][2:], torch.zeros_like(heads[1][2:]))


def test_label_loss_changes_nothing_in_the_first_task(lab: Lab, complete: Complete, tmp_path: Path) -> None:
    run(lab.config("bert", "lora", train={"label_loss": "task"}), Storage.at(tmp_path))
    seen, task = trace(complete("bert", "lora", "torch").storage), trace(Storage.at(tmp_path))
    assert seen[:4] == task[:4] and seen[4:] != task[4:]


def test_generative_backbones_refuse_label_loss(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"train\.label_loss is 'task', but backbone .* has no label head"):
        check(lab.config("t5", "lora", train={"label_loss": "task"}))
