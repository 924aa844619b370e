"""The model that lm-eval sees: its numbers are those of transformers, whatever stands beside a request."""

from __future__ import annotations

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Lab

from raycl.backbone import Backbone, load_backbone, load_codec
from raycl.errors import ConfigError
from raycl.scoring.general_ability import RoutedModel
from raycl.scoring.harness import HarnessModel
from raycl.types import Batch, Mixture

CONTEXTS = ("the fire is", "red", "a long green sea and the sun over a blue sky is", "")
ANSWERS = (" warm", " red and green", " blue", "sky blue")


@pytest.fixture(scope="module", params=["llama", "t5"])
def backbone(lab: Lab, request: pytest.FixtureRequest) -> Backbone:
    config = lab.config(request.param).backbone
    return load_backbone(config, load_codec(config, 24, 8), torch.device("cpu"), 0).eval()


def harness(backbone: Backbone, batch_size: int = 8, **others: Any) -> HarnessModel:
    def activate(mixture: Mixture | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return HarnessModel(RoutedModel(backbone, activate, others.pop("route", lambda batch: None), batch_size, **others))


def asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=given, task_name="task", doc_id=number) for number, given in enumerate(arguments)]


PAIRS = asked(*((context, answer) for context in CONTEXTS for answer in ANSWERS))


def expected(backbone: Backbone, model: HarnessModel, context: str, answer: str) -> tuple[float, bool]:
    """Return the log-likelihood of one pair alone, by the Hugging Face model."""
    if context:
        prompt, target = model._encode_pair(context, answer)
    else:
        prompt, target = [model.prefix_token_id], model.tok_encode(answer, add_special_tokens=False)
    labels = torch.tensor(target)
    with torch.no_grad():
        if backbone.capabilities.separate_encoder:
            logits = backbone.model(input_ids=torch.tensor([prompt]), labels=labels[None]).logits[0]
        else:
            logits = backbone.model(torch.tensor([[*prompt, *target]])).logits[0, len(prompt) - 1 : -1]
    chances = logits.float().log_softmax(-1)
    return float(chances.gather(1, labels[:, None]).sum()), bool((chances.argmax(-1) == labels).all())


def test_log_likelihoods_are_those_of_transformers_in_any_batch(backbone: Backbone) -> None:
    for size in (1, 3, 16):
        model = harness(backbone, size)
        found = model.loglikelihood(PAIRS)
        for request, (score, greedy) in zip(PAIRS, found, strict=True):
            alone = expected(backbone, model, *request.args)
            assert score == pytest.approx(alone[0], abs=1e-3) and greedy == alone[1]
    assert {greedy for _, greedy in found} <= {True, False}


def test_workers_share_out_requests_and_get_all_results(backbone: Backbone) -> None:
    """Each worker computes as many batches as the others, and their results together are those of one."""
    alone = harness(backbone, 3).loglikelihood(PAIRS)
    everyone, given, passes = Barrier(3, timeout=60), dict[int, Any](), [0, 0, 0]
    backbones = [copy.deepcopy(backbone) for _ in range(3)]  # a worker is a process of its own

    def results(rank: int) -> list[tuple[float, bool]]:
        def gather(value: Any) -> list[Any]:
            given[rank] = value
            everyone.wait()
            return list(given.values())

        def route(batch: Batch) -> None:
            passes[rank] += 1

        return harness(backbones[rank], 3, share=(rank, 3), gather=gather, route=route).loglikelihood(PAIRS)

    with ThreadPoolExecutor(3) as workers:
        shared = list(workers.map(results, range(3)))
    assert len(set(passes)) == 1 and shared[0] == shared[1] == shared[2]
    assert [score for score, _ in shared[0]] == pytest.approx([score for score, _ in alone], abs=1e-3)


def test_whole_texts_are_read_in_windows(backbone: Backbone) -> None:
    model = harness(backbone)
    text = "the sun over a blue sky is red and green"
    ids = model.tok_encode(text, add_special_tokens=False)
    (whole,) = model.loglikelihood_rolling(asked((text,)))
    assert whole == pytest.approx(expected(backbone, model, "", text)[0], abs=1e-3)
    model._room = 6  # windows of five tokens
    (cut,) = model.loglikelihood_rolling(asked((text,)))
    first = model._loglikelihood_tokens([(("", ""), [model.prefix_token_id], ids[:5])])[0][0]
    assert cut < first and cut != pytest.approx(whole, abs=1e-6)


def test_a_context_without_room_loses_its_beginning(backbone: Backbone) -> None:
    model = harness(backbone)
    ids = model.tok_encode(CONTEXTS[2])
    model._room = 8
    kept = 8 if backbone.capabilities.separate_encoder else 6
    (cut, short) = model._loglikelihood_tokens([(("a", "b"), ids, ids[:2]), (("a", "b"), ids[-kept:], ids[:2])])
    assert cut == short


def test_answers_end_before_the_first_stop_and_are_those_of_generate(backbone: Backbone) -> None:
    model = harness(backbone, 2)
    prompts = [context for context in CONTEXTS if context]
    whole = model.generate_until(asked(*((prompt, {"max_gen_toks": 6}) for prompt in prompts)))
    for prompt, answer in zip(prompts, whole, strict=True):
        ids = torch.tensor([model.tok_encode(prompt)])
        with torch.no_grad():
            made = backbone.model.generate(ids, max_new_tokens=6, do_sample=False)[0]
        start = 1 if backbone.capabilities.separate_encoder else ids.shape[1]
        assert answer == model.tokenizer.decode(made[start:], skip_special_tokens=True)
    prompt, answer = next((prompt, answer) for prompt, answer in zip(prompts, whole, strict=True) if len(answer) > 4)
    (short,) = model.generate_until(asked((prompt, {"max_gen_toks": 6, "until": ["never", answer[3:5]]})))
    assert short == answer.partition(answer[3:5])[0]
    with pytest.raises(ConfigError, match=r"^task 'task' of lm-eval draws its answers \(do_sample\)"):
        model.generate_until(asked(("red", {"do_sample": True})))
    if model.backend == "causal":
        model._room = 8
        with pytest.raises(
            ConfigError, match=r"answers of up to 8 tokens \(max_gen_toks\), .* 8 positions for prompt and"
        ):
            model.generate_until(asked(("red", {"max_gen_toks": 8})))


def test_the_router_sees_the_context_and_never_the_answer(backbone: Backbone) -> None:
    seen: list[str] = []

    def route(batch: Batch) -> Mixture:
        seen.extend(batch.texts)
        unknown = torch.tensor([text == "red" for text in batch.texts])
        return Mixture(("a",), torch.zeros(len(batch), 1), unknown=unknown)

    model = harness(backbone, route=route)
    model.loglikelihood(asked(("red", " blue"), ("red", " green"), ("the sea", " blue")))
    model.generate_until(asked(("sky", {"max_gen_toks": 1})))
    assert set(seen) == {"red", "the sea", "sky"}
    assert model.unknown[("task", 0)] is True and model.unknown[("task", 2)] is False
