"""Who speaks for each ask: the router's mixtures and those that requests pin, one row each.

What it does not know: prompts, the model, whoever waits for the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from raycl.retrieval.router import TextRouter
from raycl.serve.engine.model_host import Hosted
from raycl.serve.engine.requests import Ask
from raycl.serve.errors import AskedError
from raycl.serve.snapshots.snapshot_model import heads_of
from raycl.types import Mixture

Attend = Callable[[Hosted, Sequence[Ask], Sequence[str]], Mixture]
"""Mixtures of asks' prompts, each with the template of a task ("": none), by a router that reads prompts."""


def mixtures_of(hosted: Hosted, asks: Sequence[Ask], attend: Attend | None = None) -> list[Mixture]:
    """One mixture of one row for each ask of a snapshot, of those that speak for it alone.

    Args:
        attend: for snapshots whose router reads prompts; it needs the model.
    """
    named = cache(lambda pairs: hosted.named(Mixture.same(dict(pairs), 1)))  # many ask for the same
    found = {
        number: named(tuple(ask.choice.weights.items()))
        for number, ask in enumerate(asks)
        if ask.choice.weights is not None
    }
    free = [number for number in range(len(asks)) if number not in found]
    told = [number for number in free if asks[number].choice.task is not None]
    for group in (told, [number for number in free if asks[number].choice.task is None]):
        found |= _routed(hosted, asks, group, attend)
    return [found[number] for number in range(len(asks))]


def unfamiliar_of(hosted: Hosted, asks: Sequence[Ask]) -> dict[str, float]:
    """Text -> how unfamiliar it is, where it is only to be routed: then somebody looks. {} if it cannot be told."""
    texts = list(dict.fromkeys(ask.text for ask in asks if ask.route_only and ask.choice.weights is None))
    if not texts or not isinstance(hosted.router, TextRouter):
        return {}
    return dict(zip(texts, hosted.router.unfamiliar(texts) or [], strict=False))


def _routed(hosted: Hosted, asks: Sequence[Ask], group: Sequence[int], attend: Attend | None) -> dict[int, Mixture]:
    """What the router says to asks that all name their task, or that all do not."""
    if not group:
        return {}
    tasks = [task for number in group if (task := asks[number].choice.task) is not None]
    if attend is not None and hosted.reads_prompts:
        whole = _attended(hosted, [asks[number] for number in group], attend)
    else:
        whole = hosted.mixture([asks[number].text for number in group], tasks or None)
    found = {}
    for number, weights in zip(group, whole.weights, strict=True):
        spoken = weights.nonzero().flatten().tolist()
        one = Mixture(tuple(whole.names[column] for column in spoken), weights[None, spoken])
        found[number] = _hard(hosted, one) if asks[number].choice.hard else one
    return found


def _attended(hosted: Hosted, asks: Sequence[Ask], attend: Attend) -> Mixture:
    """By whole prompts, as in training: an input whose task nobody says is read bare first, and then again with the
    template of the task that was loudest, if tasks have different ones."""
    prompts = {prompt: task for task, prompt in hosted.prompts.items()}
    only = next(iter(prompts.values())) if len(prompts) == 1 else ""
    for ask in asks:
        ask.template = ask.choice.task or only
    mixture = attend(hosted, asks, [ask.template for ask in asks])
    if len(prompts) < 2 or all(ask.template for ask in asks):
        return mixture
    for ask, weights in zip(asks, mixture.weights, strict=True):
        ask.template = ask.template or loudest(hosted, Mixture(mixture.names, weights[None]))
    return attend(hosted, asks, [ask.template for ask in asks])


def _hard(hosted: Hosted, mixture: Mixture) -> Mixture:
    """Only the loudest task's adapters, at the weights among them."""
    task = loudest(hosted, mixture)
    alone = mixture.weights * torch.tensor([[task in hosted.owners[key] for key in mixture.names]])
    return replace(mixture, weights=alone / alone.sum(1, keepdim=True))


def loudest(hosted: Hosted, mixture: Mixture) -> str:
    """The task with the largest summed weight; "" for the bare backbone."""
    return next(iter(hosted.shares(dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True)))), "")


def template_of(hosted: Hosted, ask: Ask, mixture: Mixture) -> str:
    """The task whose prompt an input gets: the one that the request names, else the loudest; "": none.

    Raises:
        AskedError: several tasks are equally loud because nothing chose among them, and their prompts differ.
    """
    if ask.template or ask.choice.task:
        return ask.template or str(ask.choice.task)
    shares = hosted.shares(dict(zip(mixture.names, mixture.weights[0].tolist(), strict=True)))
    first = next(iter(shares), "")
    equal = [task for task in hosted.prompts if task in shares and shares[task] == shares[first]]
    if not hosted.needs_task or len({hosted.prompts[task] for task in equal}) < 2:
        return first
    if ask.route_only:
        return ""
    whole = "" if ask.sampling is None else ", or send the whole prompt to /v1/completions"
    raise AskedError(
        f"snapshot {hosted.snapshot.number} has no router, and its tasks were learned with different prompts: say "
        f"which one this text is of by raycl.task ({', '.join(equal[:8])}){whole}"
    )


def head_of(ask: Ask) -> str:
    """Rule `label_count`: whose head answers.

    Raises:
        BankError: the request does not say the task.
    """
    return heads_of(ask.hosted, [ask.choice.task] if ask.choice.task else None)[0]
