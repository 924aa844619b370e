"""Loading: what is refused, with which errors, and that no code runs without permission."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_file import file_at
from safetensors.torch import load_file, save_file
from tiny import KINDS, Lab, tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoXConfig,
    LEDConfig,
    LEDForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    RobertaConfig,
    RobertaModel,
    SeedOssConfig,
    T5GemmaConfig,
)

from raycl.backbone import BackboneConfig, BackboneOptions, base, load_backbone, load_codec, load_skeleton
from raycl.backbone.load import known_kind, pick_dtype, set_dropout, wrap_model
from raycl.data.loader import batch_of
from raycl.errors import BackboneError
from raycl.generation.batch_answers import predict
from raycl.testing.tiny_models import SIZES, tiny_model
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext
from raycl.types import IGNORE, Batch

CPU = torch.device("cpu")


@pytest.fixture
def folder(lab: Lab, tmp_path: Path) -> Path:
    """Return a copy of the tiny encoder, to be spoiled."""
    return shutil.copytree(lab.model_folder("bert"), tmp_path / "bert")


def load(config: BackboneConfig, source: int = 24, target: int = 4) -> object:
    return load_backbone(config, load_codec(config, source, target), CPU, 0)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(BackboneError, match=r"backbone folder '.*' does not exist: expected a folder"):
        load(BackboneConfig(name=name))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(BackboneError) as caught:
        load(BackboneConfig(name=str(folder)))
    assert str(caught.value).startswith(f"backbone '{folder}' cannot be loaded: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("config.json", {"hidden_size": "32"}, "Field 'hidden_size' expected int"),
        ("config.json", {"num_attention_heads": 0}, "modulo by zero"),
        ("tokenizer_config.json", [], "(has no attribute 'get'|list indices must be)"),
        ("model.safetensors", "cut", "Error while deserializing header"),
    ],
)
def test_a_damaged_file_is_an_error_of_one_sentence(folder: Path, file: str, change: Any, why: str) -> None:
    content = {**json.loads((folder / file).read_text()), **change} if isinstance(change, dict) else change
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(BackboneError, match=f"cannot be loaded: .*{why}.*; expected 'minilm'"):
        load(BackboneConfig(name=str(folder)))


def test_weights_that_do_not_fill_the_model_are_refused(folder: Path) -> None:
    """They were drawn at random otherwise; a pooler may be missing, which nothing reads."""
    settings = json.loads((folder / "config.json").read_text())
    for change, why in (
        (
            {"num_hidden_layers": 3},
            r"lack 16 tensors of the model .*, such as 'encoder\.layer\.2\.\w.*': expected a whole",
        ),
        (
            {"intermediate_size": 48},
            r"with the shape \[64\], and config.json describes \[48\]: expected the config",
        ),
    ):
        (folder / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(BackboneError, match=why):
            load(BackboneConfig(name=str(folder)))
    (folder / "config.json").write_text(json.dumps(settings))
    file = folder / "model.safetensors"
    weights = {name: weight for name, weight in load_file(file).items() if not name.startswith("pooler.")}
    save_file(weights, file, {"format": "pt"})
    load(BackboneConfig(name=str(folder)))
    save_file({f"module.{name}": weight for name, weight in weights.items()}, file, {"format": "pt"})
    with pytest.raises(BackboneError, match=r"and have others, such as 'module\.embeddings\.\w"):
        load(BackboneConfig(name=str(folder)))


def test_pickled_weights_need_permission(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    trained = tiny_model("bert", 24, seed=3)
    torch.save(trained.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="safetensors"):
        load(BackboneConfig(name=str(folder)))
    backbone = load(BackboneConfig(name=str(folder), allow_pickle=True, dtype="float32"))
    assert torch.equal(backbone.model.embeddings.word_embeddings.weight, trained.embeddings.word_embeddings.weight)  # type: ignore[attr-defined]


def test_weights_stay_in_the_file_until_they_are_written(folder: Path) -> None:
    """Two models share its pages; what one changes is its own, and not in the file."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    first, two = (load(BackboneConfig(name=str(folder), dtype="float32")) for _ in range(2))
    weights = [backbone.model.embeddings.word_embeddings.weight for backbone in (first, two)]  # type: ignore[attr-defined]
    assert [file_at(weight.data_ptr()) for weight in weights] == [str(file)] * 2
    before = weights[1].clone()
    weights[0].data.add_(1.0)
    assert torch.equal(weights[1], before) and torch.equal(weights[0], before + 1) and file.read_bytes() == content


def test_code_in_a_model_folder_is_not_executed(folder: Path) -> None:
    witness = folder / "ran"
    (folder / "evil.py").write_text(
        f"open({str(witness)!r}, 'w')\nfrom transformers import BertConfig, BertModel\n"
        "class Config(BertConfig):\n    model_type = 'evil'\nclass Model(BertModel): pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": classes, "model_type": "evil"}))
    with pytest.raises(BackboneError, match="cannot be loaded"):
        load(BackboneConfig(name=str(folder)))
    assert not witness.exists()


@pytest.mark.parametrize(
    ("kind", "source", "target", "words"),
    [
        ("bert", 65, 4, "stream.max_source_tokens 65 is more than the 64 positions"),
        ("llama", 125, 4, r"stream.max_source_tokens 125 \+ max_target_tokens 4 is more than the 128 positions"),
        ("bert", 64, 400, None),
        ("llama", 124, 4, None),
        ("t5", 5000, 4, None),
    ],
)
def test_prompts_must_fit_the_positions(lab: Lab, kind: str, source: int, target: int, words: str | None) -> None:
    config = BackboneConfig(name=str(lab.model_folder(kind)))
    codec = load_codec(config, source, target)
    if words is None:
        assert load_skeleton(config, codec).codec.max_source_tokens == source
        return
    with pytest.raises(BackboneError, match=words):
        load_skeleton(config, codec)


HEADS = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
SIDES = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 1), ("ffn_dim", 8))}
BART = {**HEADS, **SIDES, "d_model": 8, "vocab_size": 24, "pad_token_id": 0, "decoder_start_token_id": 1}


@pytest.mark.parametrize(
    ("model", "kind", "source", "target"),
    [
        (
            RobertaModel(RobertaConfig(**SIZES, vocab_size=24, pad_token_id=0, max_position_embeddings=20)),
            "bert",
            19,
            1,
        ),
        (GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=24, n_positions=20)), "llama", 16, 4),
        (BartForConditionalGeneration(BartConfig(**BART, max_position_embeddings=20)), "t5", 20, 20),
        (MBartForConditionalGeneration(MBartConfig(**BART, max_position_embeddings=20)), "t5", 20, 20),
        (
            LEDForConditionalGeneration(
                LEDConfig(
                    **BART,
                    attention_window=4,
                    max_encoder_position_embeddings=20,
                    max_decoder_position_embeddings=10,
                )
            ),
            "t5",
            20,
            8,
        ),
    ],
)
def test_every_position_is_used_and_none_beyond(model: Any, kind: str, source: int, target: int) -> None:
    """A text as long as the limits is read, and one token more is refused before any work."""
    words = tokenizer(kind)
    backbone = wrap_model(model.eval(), words, source, target)
    assert backbone.max_positions == source + target * (kind == "llama")
    rows = torch.full((2, source), 6)
    labels = torch.full((2, target if kind != "bert" else 0), 7)
    label_ids = torch.full((2,), IGNORE)
    batch = Batch(rows, torch.ones_like(rows), labels, label_ids, torch.ones(2), torch.arange(2))
    assert torch.isfinite(
        backbone.hidden_states(rows, torch.ones_like(rows)) if kind == "bert" else backbone(batch).loss_sum
    ).all()
    with pytest.raises(BackboneError, match=rf"^stream.max_source_tokens {source + 1}.* positions of this backbone"):
        wrap_model(model, words, source + 1, target)
    if kind != "bert":
        longer = target + 3  # LED has two rows in front that it does not use
        with pytest.raises(BackboneError, match=rf"max_target_tokens {longer} is more than the \d+ positions"):
            wrap_model(model, words, source, longer)


def test_tokens_without_a_row_are_refused(lab: Lab) -> None:
    words = tokenizer("llama")
    words.add_tokens(["<think>"])
    with pytest.raises(BackboneError, match=r"has 1 tokens without a row among the model's \d+ .* such as '<think>'"):
        wrap_model(tiny_model("llama", len(words) - 1), words, 8, 8)
    assert wrap_model(tiny_model("llama", len(words)), words, 8, 8).codec.vocabulary == len(words)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})  # no text of the data becomes one
    assert wrap_model(tiny_model("llama", len(words) - 1), words, 8, 8).codec.vocabulary == len(words)
    words.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(BackboneError, match=r"has 1 tokens without a row .* such as '<end>'"):
        wrap_model(tiny_model("llama", len(words) - 2), words, 8, 8)


def test_a_model_of_several_parts_is_refused(tmp_path: Path) -> None:
    Gemma3Config().save_pretrained(tmp_path)
    for kind in ("auto", "decoder"):
        config = BackboneConfig.model_validate({"name": str(tmp_path), "kind": kind})
        with pytest.raises(BackboneError, match=r"is a multimodal model \(gemma3: text_config, vision_config\), and"):
            load_codec(config, 8, 8)
        assert (known_kind(config) is None) == (kind == "auto")


@pytest.mark.parametrize(
    ("kind", "expected_kind", "eos"), [("bert", "encoder", -1), ("t5", "encoder-decoder", 1), ("llama", "decoder", 2)]
)
def test_the_kind_is_read_from_the_config(lab: Lab, kind: str, expected_kind: str, eos: int) -> None:
    codec = load_codec(BackboneConfig(name=str(lab.model_folder(kind))), 24, 4)
    assert (codec.kind, codec.eos_id, codec.needs_labels) == (expected_kind, eos, kind == "bert")


@pytest.mark.parametrize("kind", KINDS)
def test_loading_twice_gives_the_same_bits_and_no_dropout(lab: Lab, kind: str) -> None:
    config = BackboneConfig(name=str(lab.model_folder(kind)), dtype="float32")
    first, second = load(config), load(config)
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(mine, other)
    assert not [module for module in first.modules() if isinstance(module, torch.nn.Dropout) and module.p]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_folders_generation_config_is_ignored(lab: Lab, tmp_path: Path, kind: str) -> None:
    """Neither a greedy one nor a sample; its special tokens are kept."""
    habits = {"min_new_tokens": 6, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1}
    habits |= {"do_sample": True, "temperature": 0.01, "top_p": 1e-6, "forced_eos_token_id": 5}
    folder = shutil.copytree(lab.model_folder(kind), tmp_path / kind)
    path = folder / "generation_config.json"
    special = json.loads(path.read_text())
    path.write_text(json.dumps(special | habits))
    collected = []
    for model_folder in (lab.model_folder(kind), folder):
        config = BackboneConfig(name=str(model_folder), dtype="float32")
        codec = load_codec(config, 24, 4)
        backbone = load_backbone(config, codec, CPU, 0).eval()
        batch = batch_of(codec.encode_source(["fire is warm", "the sea", "it"]), codec.pad_id)
        torch.manual_seed(0)
        sampled = backbone.model.generate(
            input_ids=batch.source_ids, attention_mask=batch.source_mask, do_sample=True, top_k=20, max_new_tokens=6
        )
        answers = predict(backbone, batch, 6)
        collected.append((answers, sampled.tolist()))
        assert backbone.model.generation_config.eos_token_id == special["eos_token_id"] in (1, 2)
    assert collected[0] == collected[1]


def test_dropout_and_dtype_follow_the_settings(lab: Lab) -> None:
    name = str(lab.model_folder("bert"))
    backbone = load(BackboneConfig(name=name, dropout=0.25, dtype="bfloat16"))
    assert {module.p for module in backbone.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}  # type: ignore[attr-defined]
    assert backbone.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert pick_dtype("auto", CPU) == torch.float32


def test_every_dropout_rate_of_a_config_is_set() -> None:
    """Under whatever name, also where it is the integer 0 and in the configs of a model's sides; layerdrop is none."""
    sides = T5GemmaConfig()
    rated = (GPTNeoXConfig(attention_dropout=0), GPTNeoConfig(), SeedOssConfig(), sides, sides.encoder, sides.decoder)
    for config in (*rated, bart := BartConfig()):
        set_dropout(config, 0.25)
    for config in rated:
        rates = [value for name, value in vars(config).items() if "dropout" in name]
        assert set(rates) == {0.25}, config
    assert (bart.dropout, bart.encoder_layerdrop) == (0.25, 0.0)


def test_a_model_may_say_that_it_has_no_limit_of_positions(lab: Lab) -> None:
    config = AutoConfig.for_model("xlnet", vocab_size=24, d_model=16, n_layer=1, n_head=1, d_inner=16)
    xlnet = wrap_model(AutoModel.from_config(config), tokenizer("bert"), 24, 4)
    assert xlnet.max_positions is None


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_attention_in_bfloat16_on_a_cpu_is_the_kind_whose_backward_pass_is_fast(lab: Lab, kind: str) -> None:
    chosen = {}
    for dtype in ("float32", "bfloat16"):
        config = BackboneConfig.model_validate({"name": str(lab.model_folder(kind)), "dtype": dtype})
        for trains in (True, False):
            backbone = load_backbone(config, load_codec(config, 8, 8), CPU, 0, BackboneOptions(trains=trains))
            chosen[dtype, trains] = backbone.model.config._attn_implementation
    assert chosen.pop(("bfloat16", True)) == "eager" and set(chosen.values()) == {"sdpa"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_is_computed_as_configured(lab: Lab, kind: str, attention: str) -> None:
    config = lab.config(kind, "finetune", backbone={"attention": attention})
    check(config)
    backbone = build(config, DistributedContext.alone(CPU))[0].backbone
    configs: list[Any] = [module.config for module in backbone.modules() if hasattr(module, "config")]
    assert configs and {item._attn_implementation for item in configs} == {attention}


def test_attention_that_cannot_be_computed_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lab.config("llama", "finetune", backbone={"attention": "flash_attention_2"})
    with pytest.raises(
        BackboneError, match=r"^backbone.attention is flash_attention_2, but the package flash-attn is not"
    ):
        check(config)
    monkeypatch.setattr(base, "find_spec", lambda name: name)
    check(config)
    with pytest.raises(BackboneError, match=r"the model is on cpu, and it needs a GPU: set it to auto$"):
        build(config, DistributedContext.alone(CPU))
    item = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 30}
    bloom = wrap_model(BloomForCausalLM(BloomConfig(**item)), tokenizer("llama"), 8, 8)
    falcon = wrap_model(FalconForCausalLM(FalconConfig(**item)), tokenizer("llama"), 8, 8)
    for backbone, name, why in ((bloom, "sdpa", "has no such attention"), (falcon, "eager", "cannot change its")):
        with pytest.raises(BackboneError, match=f"backbone.attention is {name}, but .*ForCausalLM {why}"):
            backbone.use_attention(name)  # type: ignore[arg-type]


def test_models_that_threads_load_at_once_tie_their_weights(lab: Lab) -> None:
    """Transformers puts its methods back in the wrong order otherwise, and no later model ties any."""
    config = BackboneConfig(name=str(lab.model_folder("t5")))

    def load(number: int) -> bool:
        backbone = load_backbone(config, load_codec(config, 16, 4), torch.device("cpu"), number)
        return backbone.model.shared.weight is backbone.model.encoder.embed_tokens.weight

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(24))) and load(24)
