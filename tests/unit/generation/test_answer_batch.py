"""Evaluation's continuous batch answers as `predict` answers each row alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from axes import sampled
from tiny import Lab, save_model
from transformers import (
    AutoConfig,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import MixedPrompts
from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.backbone.load import wrap_model
from raycl.backbone.roles import linear_names
from raycl.data.loader import batch_of
from raycl.errors import BackboneError
from raycl.generation import answer_batch, dynamic_cache
from raycl.generation.answer_batch import AnswerBatch, Prompts
from raycl.generation.batch_answers import answers_continuously, predict
from raycl.generation.requests import AllowedTokens
from raycl.testing.tiny_models import word_tokenizer
from raycl.training.assembly import build
from raycl.training.phase import evaluation
from raycl.training.workers.distributed import DistributedContext
from raycl.types import AdapterState, Mixture

SOURCES = (
    *("the sky is red blue cat", "the sky is very much blue cold warm very much", "the sky is a dog"),
    *("the sky is fire", "the sky is sea sea sea sleeps", "the sky is red", "the sky is blue blue a"),
)
LABELS = ("red cat", "red dog", "blue")


def with_adapters(kind: str, lab: Lab, prompts: str) -> tuple[Backbone, AdapterStack]:
    """Three random adapters, large enough to change answers; with prompts in front of texts (`prefix`), or behind."""
    config = BackboneConfig(name=str(lab.model_folder(kind)))
    backbone = load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()
    stack = AdapterStack(backbone.model, linear_names(backbone.model, ("attention",)), rows=None)
    draw = torch.Generator().manual_seed(1)
    width = int(backbone.model.get_input_embeddings().weight.shape[1])
    for number, name in enumerate("abc"):
        linears = {
            path: (torch.randn(2, layer.inputs, generator=draw), torch.randn(layer.outputs, 2, generator=draw))
            for path, layer in stack.layers.items()
        }
        soft = torch.randn(2 + number, width, generator=draw) if prompts else None
        stack.load(name, AdapterState(linears, 0.5, soft))
    if prompts:
        setattr(backbone, prompts, MixedPrompts(stack, width))
    return backbone, stack


@pytest.mark.parametrize(
    ("kind", "prompts", "mixtures"),
    sampled(
        [
            (kind, prompts, mixtures)
            for mixtures in ("unlike", "same", "bare")
            for kind in ("llama", "t5")
            for prompts in ("", "prefix", "suffix")
        ],
        keep=[(kind, prompts, "unlike") for kind in ("llama", "t5") for prompts in ("", "prefix", "suffix")],
    ),
)
def test_answers_are_those_of_each_row_alone(kind: str, prompts: str, mixtures: str, lab: Lab) -> None:
    backbone, stack = with_adapters(kind, lab, prompts)
    codec = backbone.codec
    weights = torch.rand(len(SOURCES), 3, generator=torch.Generator().manual_seed(2))
    weights[:, 1] *= torch.arange(len(SOURCES)) % 2  # not every row has every adapter
    weights = weights[:1].expand(len(SOURCES), -1) if mixtures == "same" else weights
    start = codec.encode_source(["the sky is"])[0]
    start = start[:-1] if start[-1] == codec.eos_id else start

    def mixture(rows: slice) -> Mixture | None:
        return None if mixtures == "bare" else Mixture(("a", "b", "c"), weights[rows])

    def prompts_of() -> Iterator[Prompts]:
        for task, labels in (("free", ()), ("limited", LABELS)):
            allowed = AllowedTokens(codec.encode_target(labels), codec.eos_id) if labels else None
            for first in range(0, len(SOURCES), 2):
                assert not stack.is_open, "rows are routed while no mixture is active"
                rows = slice(first, first + 2)
                batch = batch_of(codec.encode_source(SOURCES[rows]), codec.pad_id)
                batch.rows += first
                yield Prompts(task, batch, 8, mixture(rows), start, [allowed] * len(batch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_batch, "LEAST_TOKENS", 2)
        decoder = AnswerBatch(backbone, stack.activate, 5)
        decoder.read_rows = 2
        answers = list(decoder.answers(prompts_of()))
    shares = kind == "llama" and mixtures != "unlike" and prompts != "suffix"
    assert (decoder._start is not None) == shares, "a common beginning is read once where the mixture is the same"
    expected = {}
    for task, allowed in (("free", ()), ("limited", LABELS)):
        backbone.allowed_labels = dict(zip(allowed, codec.encode_target(allowed), strict=True))
        for row, source in enumerate(SOURCES):
            batch = batch_of(codec.encode_source([source]), codec.pad_id)
            with stack.activate(mixture(slice(row, row + 1))):
                expected[task, row] = predict(backbone, batch, 8)[0]
    assert {(answer.task, answer.row): answer.text for answer in answers} == expected
    assert len(answers) == len(expected) and {expected["limited", row] for row in range(7)} <= set(LABELS)
    longest = 2 * 4 * 8  # four batches of two rows for each task, one after another, of eight tokens
    assert decoder.steps < longest and decoder.tokens > decoder.steps


def test_drawn_answers_depend_on_their_seed_and_not_on_their_batch(lab: Lab) -> None:
    """The first tokens are drawn as often as the model says; other rows of the batch change nothing."""
    backbone, stack = with_adapters("llama", lab, "")
    (source,) = backbone.codec.encode_source(SOURCES[:1])
    count = 400

    def drawn(rows: int) -> list[list[int]]:
        batches = []
        for first in range(0, count, rows):
            batch = batch_of([source] * rows, backbone.codec.pad_id)
            batch.rows += first
            seeds = range(first, first + rows)
            batches.append(Prompts("task", batch, 3, None, temperature=1.0, seeds=seeds))
        found = {answer.row: list(answer.ids) for answer in AnswerBatch(backbone, stack.activate, 80).answers(batches)}
        return [found[row] for row in range(count)]

    alone, together = drawn(8), drawn(80)
    assert alone == together and {len(ids) for ids in alone} <= {1, 2, 3}
    with stack.activate(None):
        chances = dynamic_cache.begin(backbone, [source]).logits[0].softmax(-1)
    shares = torch.bincount(torch.tensor([ids[0] for ids in alone]), minlength=len(chances)) / count
    torch.testing.assert_close(shares, chances, atol=4 * (0.25 / count) ** 0.5, rtol=0)


@pytest.mark.parametrize(
    ("prompts", "part"),
    sampled(
        [(prompts, part) for prompts in ("", "prefix", "suffix") for part in (1, 3, 256)],
        keep=[("prefix", 1), ("prefix", 3), ("suffix", 3)],
    ),
)
def test_log_probabilities_of_a_prompt_are_those_of_its_tokens_one_by_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, prompts: str, part: int
) -> None:
    """Prompts are read in parts of any length; a suffix stands behind the text, and nothing before it depends on it."""
    backbone, stack = with_adapters("llama", lab, prompts)
    monkeypatch.setattr(dynamic_cache, "PART", part)
    ids = backbone.codec.encode_source([SOURCES[1]])[0]
    with stack.activate(Mixture(("a", "b"), torch.tensor([[0.4, -0.3]]))):
        found = dynamic_cache.prompt_logprobs(backbone, ids, 2)
        backbone.suffix = None
        expected = [dynamic_cache.begin(backbone, [ids[:end]]).logits[0].log_softmax(-1) for end in range(1, len(ids))]
    assert [one.token for one in found] == ids[1:]
    for one, logprobs in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(float(logprobs[one.token]), abs=1e-4)
        assert [other.logprob for other in one.top] == pytest.approx(logprobs.topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("is_special", [True, False])
def test_each_end_token_of_the_model_ends_an_answer(kind: str, is_special: bool, tmp_path: Path) -> None:
    """Tuned models end turns with another token than texts; an ordinary word ends nothing, whatever a config says."""
    sources = ("the sky is", "a dog sleeps", "sea")

    def answers(folder: Path) -> list[str]:
        config = BackboneConfig(name=str(folder))
        backbone = load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()
        batch = batch_of(backbone.codec.encode_source(sources), backbone.codec.pad_id)
        batch.rows += torch.arange(len(sources)) - batch.rows
        evaluated = AnswerBatch(backbone, lambda _: nullcontext(), 9).answers([Prompts("task", batch, 8)])
        by_row = {answer.row: answer.text for answer in evaluated}
        answers = predict(backbone, batch, 8)
        assert answers == [by_row[row] for row in range(len(sources))]
        return answers

    folder = save_model(kind, tmp_path / "before")
    whole = answers(folder)
    word = next(word for text in whole for word in text.split() if word not in " ".join(sources))
    loaded = AutoTokenizer.from_pretrained(folder)
    number = loaded.convert_tokens_to_ids(word)
    if is_special:
        loaded.add_special_tokens({"additional_special_tokens": [word]})
        loaded.save_pretrained(folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], number]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    parts = [text.partition(word)[0].strip() if is_special else text for text in whole]
    assert answers(folder) == parts and is_special == (parts != whole)


def test_models_whose_answers_are_not_the_most_likely_tokens_use_generate(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models whose rows cannot join a running batch, or that have no text to generate, use it too."""
    for kind, expected in (("llama", True), ("t5", True), ("bert", False)):
        config = BackboneConfig(name=str(lab.model_folder(kind)))
        backbone = load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0)
        assert answers_continuously(backbone) == expected
        if expected:
            with monkeypatch.context() as patch:
                patch.setattr(backbone.model.generation_config, "repetition_penalty", 1.2)
                assert not answers_continuously(backbone)
            with monkeypatch.context() as patch:
                bart = AutoConfig.for_model("bart")
                patch.setattr(backbone.model, "config", bart if kind == "t5" else AutoConfig.for_model("gemma2"))
                assert not answers_continuously(backbone)
    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 1, "eos_token_id": 2}
    gpt = wrap_model(OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes)), word_tokenizer("llama", ["a"]), 8, 8).eval()
    assert not answers_continuously(gpt), "it keeps nothing between tokens"
    mamba_sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "eos_token_id": 2}
    words = word_tokenizer("llama", ["a"])
    mamba = wrap_model(MambaForCausalLM(MambaConfig(**mamba_sizes)), words, 8, 8).eval()
    monkeypatch.setattr(mamba, "cache_argument", "cache")  # as transformers 5.24 calls its states too
    assert not answers_continuously(mamba), "it keeps states, not keys and values"
    with pytest.raises(BackboneError, match="keeps something else than keys and values between tokens"):
        dynamic_cache.begin(gpt, [[1, 3]])


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_evaluation_gives_the_same_cells_either_way(lab: Lab, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = DistributedContext.alone(torch.device("cpu"))
    context, _ = build(lab.config(kind, "sapt", eval={"labels": "task", "batch_size": 4}), world)
    context.backbone.eval()
    bare = evaluation.StreamEvaluation(context, world, is_bare=True)
    scores = bare.scores(context.stream.tasks)
    monkeypatch.setattr(evaluation, "AnswerBatch", None)
    monkeypatch.setattr(evaluation, "answers_continuously", lambda backbone: False)
    assert bare.scores(context.stream.tasks) == scores


@pytest.mark.parametrize("rows", [1, 3])
def test_a_frozen_output_layer_reads_states_that_lie_together(rows: int, lab: Lab) -> None:
    """Otherwise it is computed once for each row."""
    backbone, _ = with_adapters("llama", lab, "")
    head, seen = backbone.model.get_output_embeddings(), []
    head.register_forward_hook(lambda module, states, logits: seen.append((states[0].shape, states[0].stride())))
    dynamic_cache.begin(backbone, backbone.codec.encode_source(SOURCES[:rows]))
    width = head.in_features
    assert seen == [((rows, 1, width), (width, width, 1))]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_last_feed_forward_block_reads_the_last_position_alone(kind: str, lab: Lab) -> None:
    """The block has the logits, keys and values that it has when it reads all positions."""
    config = BackboneConfig(name=str(lab.model_folder(kind)))
    backbone = load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()
    seen: list[int] = []
    blocks = [module for path, module in backbone.model.named_modules() if path.endswith(".mlp")]
    for block in blocks:
        block.register_forward_hook(lambda module, given, output: seen.append(output.shape[1]))
    sources = backbone.codec.encode_source(SOURCES)
    begun, columns = dynamic_cache.begin(backbone, sources), max(map(len, sources))
    assert seen == [columns, 1]
    more = [[5, 5, 5]] * len(sources)
    goes_on = dynamic_cache.read_on(backbone, begun.layers, begun.mask, more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_cache, "ADDED", ())
        whole = dynamic_cache.begin(backbone, sources)
        on = dynamic_cache.read_on(backbone, whole.layers, whole.mask, more)
    assert seen == [columns, 1, 3, 1, columns, columns, 3, 3]
    for mine, its in ((begun, whole), (goes_on, on)):
        torch.testing.assert_close(mine.logits, its.logits)
        torch.testing.assert_close(mine.layers, its.layers)


def test_a_step_copies_no_keys_to_begin_with(lab: Lab) -> None:
    backbone, _ = with_adapters("llama", lab, "")
    state = dynamic_cache.begin(backbone, backbone.codec.encode_source(SOURCES))
    given = [layer.keys for layer in dynamic_cache._cache(state.layers).layers]
    assert all(mine is its for mine, (its, _) in zip(given, state.layers, strict=True))
    before = [keys.clone() for keys, _ in state.layers]
    dynamic_cache.step(backbone, state, torch.ones(len(SOURCES), dtype=torch.long))
    assert all(torch.equal(keys, was) for (keys, _), was in zip(state.layers, before, strict=True))


def test_attention_of_inference_is_that_of_serving(lab: Lab) -> None:
    """Inference has the attention of serving; in bfloat16 on a CPU, training has another one."""
    world = DistributedContext.alone(torch.device("cpu"))
    collected = []
    for attention in ("auto", "eager"):
        settings = {"dtype": "bfloat16", "attention": attention}
        backbone = build(lab.config("llama", "lora", backbone=settings), world)[0].backbone
        with backbone.inference():
            collected.append(backbone.model.config._attn_implementation)
        assert backbone.model.config._attn_implementation == "eager"
    assert collected == ["sdpa", "eager"]
