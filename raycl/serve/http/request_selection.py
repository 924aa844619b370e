"""The selections of a request: a snapshot, its adapters and the settings of generated answers."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from raycl.errors import ConfigError
from raycl.generation.requests import ResponseMetadata, Sampling
from raycl.serve.engine.engine_requests import AdapterSelection
from raycl.serve.engine.multi_snapshot_model import MARK, LoadedSnapshot
from raycl.serve.errors import DeadlineExceededError, InvalidRequestError, LimitExceededError, NotFoundError
from raycl.serve.http.schema import (
    AUTO,
    MAX_NUMBER,
    ChatRequest,
    CompletionRequest,
    Form,
    Generation,
    Pins,
    Request,
    ResponseDetails,
)
from raycl.serve.service.service import Service


@asynccontextmanager
async def select(service: Service, request: Request) -> AsyncIterator[tuple[LoadedSnapshot, AdapterSelection]]:
    """Yield the snapshot, which stays loaded inside, and the adapters that a request names.

    Raises:
        NotFoundError: no such model, adapter or snapshot. BusyError: too many snapshots are being loaded.
    """
    number, model = request.pins.snapshot, service.config.model_of(request.model)
    if model.startswith("snapshot:") and number is None:
        text = model.partition(":")[2]
        if not (text.isdecimal() and 1 <= int(text) <= MAX_NUMBER):
            raise NotFoundError(f"model '{model}': expected snapshot:NUMBER")
        number = int(text)
    async with service.use_snapshot(number) as loaded:
        yield loaded, _choice(loaded, model, request.pins)


async def sampling_of(service: Service, request: Generation, max_tokens: int | None) -> Sampling:
    """Return the settings of a request's answers.

    Raises:
        LimitExceededError: more than the limits. InvalidRequestError: a token that the model does not have, a form
            that is none, or log probabilities of a prompt that an encoder reads.
    """
    limits = service.config.limits
    for name, given, most in (("max_tokens", max_tokens or 0, limits.max_tokens), ("n", request.answers, limits.n)):
        if given > most:
            raise LimitExceededError(f"{name} is {given}: this endpoint allows at most {most}")
    vocabulary = service.engine.codec.vocabulary
    bias = tuple((int(token), added) for token, added in (request.logit_bias or {}).items())
    unknown = next((token for token, _ in bias if token >= vocabulary), None)
    if unknown is not None:
        raise InvalidRequestError(f"logit_bias has token {unknown}: expected ids from 0 to {vocabulary - 1}")
    scores_prompt = isinstance(request, CompletionRequest) and bool(request.echo) and request.top is not None
    if scores_prompt and service.capabilities.separate_encoder:
        raise InvalidRequestError(
            "echo with logprobs needs a model whose prompt and answer are one sequence: leave one of both out"
        )
    return Sampling(
        limits.max_tokens if max_tokens is None else max_tokens,
        request.temperature or 0.0,
        1.0 if request.top_p is None else request.top_p,
        request.seed if request.seed is not None else secrets.randbits(62),
        request.stops,
        as_trained=max_tokens is None,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=bias,
        logprobs=request.top,
        prompt_logprobs=scores_prompt,
        keeps_special=isinstance(request, ChatRequest) and bool(request.offered),
        **await _limits_of(service, request.forms),
    )


async def _limits_of(service: Service, forms: Sequence[Form]) -> dict[str, Any]:
    """Return the settings of `Sampling` that keep an answer to a form.

    Raises:
        InvalidRequestError: there are several forms, or it is none.
    """
    if not forms:
        return {}
    field, kind, value = forms[0]
    if len(forms) > 1:
        raise InvalidRequestError(f"{field} and {forms[1].field} both name the form of the answer: expected one")
    if kind == "choice":
        return {"choices": tuple(dict.fromkeys(value))}
    try:
        form = json.loads(value) if kind == "json" and isinstance(value, str) else value
        async with asyncio.timeout(service.config.limits.timeout_s):
            return {"allowed": await asyncio.to_thread(service.engine.grammars.grammar, kind, form)}
    except TimeoutError as error:
        raise DeadlineExceededError(f"{field} was not read within the time of a request: send less") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} names no form of an answer: {error}") from error
    except ConfigError as error:
        raise InvalidRequestError(f"{field}: {error}") from error


def details_of(loaded: LoadedSnapshot, metadata: ResponseMetadata) -> ResponseDetails:
    """Return how an answer was made, for the wire."""
    tasks = loaded.shares({loaded.keys[name]: weight for name, weight in metadata.weights.items()})
    return ResponseDetails(
        snapshot=metadata.snapshot,
        adapters=_rounded(metadata.weights),
        tasks=_rounded(tasks),
        template=metadata.template,
        cut_tokens=metadata.cut_tokens,
        ood_score=None if metadata.ood_score is None else round(metadata.ood_score, 3),
        ood_distance=None if metadata.ood_distance is None else round(metadata.ood_distance, 3),
        ood_threshold=None if (threshold := loaded.rule.threshold) is None else round(threshold, 3),
        unknown=metadata.unknown,
        queue_ms=round(metadata.queue_ms, 3),
        retrieval_ms=round(metadata.retrieval_ms, 3),
        batch=metadata.batch,
    )


def _rounded(weights: Mapping[str, float]) -> dict[str, float]:
    """Return rounded weights without zeros."""
    return {name: near for name, weight in weights.items() if (near := round(weight, 6))}


def _choice(loaded: LoadedSnapshot, model: str, pins: Pins) -> AdapterSelection:
    number = loaded.snapshot.number
    if pins.task is not None and pins.task not in loaded.prompts:
        raise NotFoundError(f"snapshot {number} has no task '{pins.task}': expected one of {_some(loaded.prompts)}")
    if pins.adapters is not None:
        unknown = sorted(pins.adapters.keys() - loaded.keys.keys())
        if unknown:
            raise NotFoundError(
                f"snapshot {number} has no adapter {_some(unknown)}: expected some of {_some(loaded.keys)}"
            )
        return AdapterSelection({name: weight for name, weight in pins.adapters.items() if weight != 0}, pins.task)
    if model == AUTO or model.startswith("snapshot:"):
        return AdapterSelection(None, pins.task, not pins.mix)
    if model == "base":
        return AdapterSelection({}, pins.task)
    name, _, version = model.partition("@")
    held = loaded.keys.get(name, "").partition(MARK)[0]
    if name in loaded.keys and held == f"{name}@{version or held.rpartition('@')[2]}":
        return AdapterSelection({name: 1.0}, pins.task)
    if model in served_tasks(loaded):
        mine = _own_adapters(loaded, model)
        return AdapterSelection(dict.fromkeys(mine, 1.0 / len(mine)) if mine else None, model)
    raise NotFoundError(
        f"model '{model}' does not exist: expected auto, base, snapshot:NUMBER, or a task or adapter of snapshot "
        f"{number} ({_some(dict.fromkeys([*served_tasks(loaded), *loaded.keys]))})"
    )


def served_tasks(loaded: LoadedSnapshot) -> list[str]:
    """Return the tasks that a request may name as its model: they have adapters of their own, or all texts get the same
    mixture."""
    return [task for task in loaded.prompts if not loaded.router.chooses or _own_adapters(loaded, task)]


def _own_adapters(loaded: LoadedSnapshot, task: str) -> list[str]:
    """Return the adapters that belong to no other task."""
    return [adapter for adapter, key in loaded.keys.items() if loaded.owners[key] == (task,)]


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
