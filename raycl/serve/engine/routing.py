"""Who speaks for each ask: the router's mixtures and those that requests pin, one row each.

What it does not know: prompts, the model, whoever waits for the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from raycl.serve.engine.model_host import LoadedSnapshot
from raycl.serve.engine.requests import EngineRequest
from raycl.serve.errors import AskedError
from raycl.serve.snapshots.snapshot_model import heads_of
from raycl.types import Mixture

Attend = Callable[[LoadedSnapshot, Sequence[EngineRequest], Sequence[str]], Mixture]
"""Mixtures of asks' prompts, each with the template of a task ("": none), by a router that reads prompts."""


def mixtures_of(loaded: LoadedSnapshot, asks: Sequence[EngineRequest], attend: Attend | None = None) -> list[Mixture]:
    """One mixture of one row for each ask of a snapshot, of those that speak for it alone.

    Args:
        attend: for snapshots whose router reads prompts; it needs the model.
    """
    named = cache(lambda pairs: loaded.named(Mixture.same(dict(pairs), 1)))  # many ask for the same
    found = {
        number: named(tuple(ask.choice.weights.items()))
        for number, ask in enumerate(asks)
        if ask.choice.weights is not None
    }
    free = [number for number in range(len(asks)) if number not in found]
    told = [number for number in free if asks[number].choice.task is not None]
    for group in (told, [number for number in free if asks[number].choice.task is None]):
        found |= _routed(loaded, asks, group, attend)
    return [found[number] for number in range(len(asks))]


def unfamiliar_of(loaded: LoadedSnapshot, asks: Sequence[EngineRequest]) -> dict[str, float]:
    """Text -> how unfamiliar it is, where it is only to be routed: then somebody looks. {} if it cannot be told."""
    texts = list(dict.fromkeys(ask.text for ask in asks if ask.route_only and ask.choice.weights is None))
    scores = loaded.router.ood_score(texts) if texts else None
    return {} if scores is None else dict(zip(texts, scores, strict=True))


def _routed(
    loaded: LoadedSnapshot, asks: Sequence[EngineRequest], group: Sequence[int], attend: Attend | None
) -> dict[int, Mixture]:
    """What the router says to asks that all name their task, or that all do not."""
    if not group:
        return {}
    tasks = [task for number in group if (task := asks[number].choice.task) is not None]
    if attend is not None and loaded.reads_prompts:
        whole = _attended(loaded, [asks[number] for number in group], attend)
    else:
        whole = loaded.mixture([asks[number].text for number in group], tasks or None)
    found = {}
    for number, weights in zip(group, whole.weights, strict=True):
        spoken = weights.nonzero().flatten().tolist()
        one = Mixture(tuple(whole.names[column] for column in spoken), weights[None, spoken])
        found[number] = _hard(loaded, one) if asks[number].choice.hard else one
    return found


def _attended(loaded: LoadedSnapshot, asks: Sequence[EngineRequest], attend: Attend) -> Mixture:
    """By whole prompts, as in training: an input whose task nobody says is read bare first, and then again with the
    template of the task that was loudest, if tasks have different ones."""
    prompts = {prompt: task for task, prompt in loaded.prompts.items()}
    only = next(iter(prompts.values())) if len(prompts) == 1 else ""
    for ask in asks:
        ask.template = ask.choice.task or only
    mixture = attend(loaded, asks, [ask.template for ask in asks])
    if len(prompts) < 2 or all(ask.template for ask in asks):
        return mixture
    for ask, weights in zip(asks, mixture.weights, strict=True):
        ask.template = ask.template or strongest(loaded, Mixture(mixture.names, weights[None]))
    return attend(loaded, asks, [ask.template for ask in asks])


def _hard(loaded: LoadedSnapshot, mixture: Mixture) -> Mixture:
    """Only the loudest task's adapters, at the weights among them."""
    task = strongest(loaded, mixture)
    alone = mixture.weights * torch.tensor([[task in loaded.owners[key] for key in mixture.names]])
    return replace(mixture, weights=alone / alone.sum(1, keepdim=True))


def strongest(loaded: LoadedSnapshot, mixture: Mixture) -> str:
    """The task with the largest summed weight; "" for the bare backbone."""
    return next(iter(loaded.shares(dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True)))), "")


def template_of(loaded: LoadedSnapshot, ask: EngineRequest, mixture: Mixture) -> str:
    """The task whose prompt an input gets: the one that the request names, else the loudest; "": none.

    Raises:
        AskedError: several tasks are equally loud because nothing chose among them, and their prompts differ.
    """
    if ask.template or ask.choice.task:
        return ask.template or str(ask.choice.task)
    shares = loaded.shares(dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True)))
    first = next(iter(shares), "")
    equal = [task for task in loaded.prompts if task in shares and shares[task] == shares[first]]
    if not loaded.needs_task or len({loaded.prompts[task] for task in equal}) < 2:
        return first
    if ask.route_only:
        return ""
    whole = "" if ask.sampling is None else ", or send the whole prompt to /v1/completions"
    raise AskedError(
        f"snapshot {loaded.snapshot.number} has no router, and its tasks were learned with different prompts: say "
        f"which one this text is of by raycl.task ({', '.join(equal[:8])}){whole}"
    )


def head_of(ask: EngineRequest) -> str:
    """Rule `label_count`: whose head answers.

    Raises:
        BankError: the request does not say the task.
    """
    return heads_of(ask.loaded, [ask.choice.task] if ask.choice.task else None)[0]
