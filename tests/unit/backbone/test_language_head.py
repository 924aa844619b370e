"""Predicting tokens: a language head apart from its encoder equals Hugging Face's own model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from phases import bare
from tiny import Lab, tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from raycl.backbone import Backbone, BackboneConfig, BackboneOptions, load_backbone, load_codec
from raycl.backbone.encoder import EncoderBackbone
from raycl.errors import ConfigError
from raycl.methods.finetune import Finetune
from raycl.storage import Storage
from raycl.testing.tiny_models import SIZES, tiny_model
from raycl.training.assembly import build
from raycl.training.records.checkpoint import write_model
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch, Phase, Task

CPU = torch.device("cpu")
STAGE = Phase(0, "texts", (Task("texts", None, "token_accuracy", "mlm"),))


def loaded(folder: Path, kind: str = "encoder") -> Backbone:
    config = BackboneConfig(name=str(folder), dtype="float32")
    codec = load_codec(config, 24, 4)
    assert codec.kind == kind
    return load_backbone(config, codec, CPU, 0, BackboneOptions(learns_texts=True)).eval()


def hidden_batch(mask_id: int) -> Batch:
    """Return two texts of different lengths, two hidden words in the first and one in the second."""
    ids = torch.tensor([[2, 7, mask_id, 9, mask_id, 3], [2, mask_id, 8, 3, 0, 0]])
    target = torch.full_like(ids, IGNORE)
    target[0, 2], target[0, 4], target[1, 1] = 10, 11, 12
    return batch_of(ids, (ids != 0).long(), target)


def batch_of(ids: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> Batch:
    count = len(ids)
    return Batch(ids, mask, target, torch.full((count,), IGNORE), torch.ones(count), torch.arange(count))


def save(folder: Path, kind: str) -> Path:
    words = tokenizer("masked")
    words.save_pretrained(folder)
    torch.manual_seed(1)
    if kind == "bert":
        tiny_model("masked", len(words), seed=1).save_pretrained(folder)
    elif kind == "roberta":
        sizes = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 66, "pad_token_id": 0}
        RobertaForMaskedLM(RobertaConfig(**sizes)).save_pretrained(folder)
    else:
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64}
        DistilBertForMaskedLM(DistilBertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_masked_tokens_are_predicted_as_by_the_full_model(tmp_path: Path, kind: str) -> None:
    backbone, whole = loaded(save(tmp_path, kind)), AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    batch = hidden_batch(backbone.codec.mask_id)
    guesses = backbone.guesses(batch)
    expected = whole(input_ids=batch.source_ids, attention_mask=batch.source_mask, labels=batch.target_ids)
    assert guesses.labels.tolist() == [10, 11, 12] and guesses.rows.tolist() == [0, 0, 1]
    torch.testing.assert_close(guesses.logits, expected.logits[batch.target_ids != IGNORE], atol=1e-5, rtol=1e-5)
    assert backbone(batch).loss_sum.item() == pytest.approx(3 * expected.loss.item(), rel=1e-5)
    words = backbone.model.get_input_embeddings().weight
    assert any(parameter is words for parameter in backbone.parameters())
    names = [name for name, parameter in backbone.named_parameters() if parameter is words]
    assert len(names) == 1 and names[0].startswith("model."), "input and output words are one parameter"


def test_right_tokens_and_their_loss_belong_to_their_texts(tmp_path: Path) -> None:
    backbone = loaded(save(tmp_path, "bert"))
    batch = hidden_batch(backbone.codec.mask_id)
    guesses = backbone.guesses(batch)
    batch.target_ids[0, 4] = guesses.logits[1].argmax()
    read = backbone.read(batch)
    assert read[:, 1].tolist() == [2, 1] and read[0, 0] >= 1
    first = backbone.read(batch_of(*(tensor[1:, :4] for tensor in batch.tensors()[:3])))
    torch.testing.assert_close(read[1], first[0], atol=1e-5, rtol=1e-5)
    assert float(read[:, 2].sum()) == pytest.approx(backbone(batch).loss_sum.item(), rel=1e-5)


def test_a_batch_without_masked_tokens_has_no_gradient(tmp_path: Path) -> None:
    backbone = loaded(save(tmp_path, "bert"))
    batch = hidden_batch(backbone.codec.mask_id)
    for target in (torch.full_like(batch.target_ids, IGNORE), torch.full((2, 1), IGNORE), torch.zeros(2, 0).long()):
        empty = batch_of(batch.source_ids, batch.source_mask, target)
        loss = backbone(empty).loss_sum
        loss.backward()
        assert float(loss) == 0.0 and backbone.read(empty)[:, 1:].sum() == 0
    assert all(not p.grad.any() for p in backbone.parameters() if p.grad is not None)


def test_the_next_word_as_hugging_face_counts_it(lab: Lab) -> None:
    folder = lab.model_folder("llama")
    backbone, whole = loaded(folder, "decoder"), AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = [[1, 5, 6, 7, 8], [1, 9, 10]]
    target = torch.tensor([[5, 6, 7, 8], [9, 10, IGNORE, IGNORE]])
    read = backbone.read(batch_of(torch.ones(2, 1).long(), torch.ones(2, 1).long(), target))
    for row, ids in enumerate(texts):
        expected = whole(input_ids=torch.tensor([ids]), labels=torch.tensor([ids]))
        right = int((expected.logits[0, :-1].argmax(-1) == torch.tensor(ids[1:])).sum())
        assert read[row, :2].tolist() == [right, len(ids) - 1]
        assert float(read[row, 2]) == pytest.approx((len(ids) - 1) * float(expected.loss), rel=1e-4)


def trained(folder: Path, target: Path) -> EncoderBackbone:
    """Return what fine-tuning leaves of a model whose every weight has moved."""
    backbone = loaded(folder)
    assert isinstance(backbone, EncoderBackbone)
    method: Any = Finetune(Finetune.Config(name="finetune"), backbone, 0)
    method.begin_task(STAGE, bare(STAGE))
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    tensors = {name: p.detach() for name, p in backbone.named_parameters() if p.requires_grad}
    write_model(Storage.at(target), "it", method.end_task(bare(STAGE, tensors)), backbone.model_files())
    return backbone


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_the_saved_model_loads_with_and_without_the_head(tmp_path: Path, kind: str) -> None:
    backbone = trained(save(tmp_path / "first", kind), tmp_path)
    folder = tmp_path / "learned" / "it"
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"], "no empty label head"
    again = loaded(folder)
    batch = hidden_batch(backbone.codec.mask_id)
    torch.testing.assert_close(again.guesses(batch).logits, backbone.guesses(batch).logits)
    assert isinstance(again, EncoderBackbone) and again.language is not None and not again.language.is_fresh
    _, facts = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not facts["missing_keys"] and not facts["mismatched_keys"]
    bare, facts = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not facts["missing_keys"]
    ids = batch.source_ids
    torch.testing.assert_close(bare.eval()(ids).last_hidden_state, backbone.model(ids).last_hidden_state)


def test_a_missing_head_is_initialised_and_logged(lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    headless = lab.root / "models" / "headless"
    tokenizer("masked").save_pretrained(headless)
    torch.manual_seed(0)
    BertModel(tiny_model("masked", len(tokenizer("masked"))).config).save_pretrained(headless)
    with caplog.at_level(logging.INFO, "raycl"):
        backbone = loaded(headless)
    assert "comes without a language head: cls.predictions" in caplog.text and "starts at random" in caplog.text
    assert isinstance(backbone, EncoderBackbone) and backbone.language is not None and backbone.language.is_fresh
    with pytest.raises(ConfigError, match="method 'lora' trains adapters alone, but the backbone has no language head"):
        build(lab.config("headless", "lora", stream={"objective": "mlm"}), DistributedContext.alone(CPU))
    build(lab.config("headless", "finetune", stream={"objective": "mlm"}), DistributedContext.alone(CPU))
    trained(headless, tmp_path)
    again = loaded(tmp_path / "learned" / "it")
    assert isinstance(again, EncoderBackbone) and again.language is not None and not again.language.is_fresh
