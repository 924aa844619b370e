"""Answers to pseudo-samples, which must have some if they are trained on again.

Generators write inputs, as SAPT's do. The model that has just learned their task answers them, greedily and with the
task's own labels: a later task then trains on what this one would have said.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raycl.backbone.base import evaluating
from raycl.data.loader import batches_of
from raycl.generation.batch_answers import predict
from raycl.methods.base import Method, activate_batch, phase_labels
from raycl.methods.context import TaskContext
from raycl.methods.pseudo_samples.samples import PseudoSamples

AT_ONCE = 32
"""Inputs that are answered together."""


def answered(samples: PseudoSamples, given: Sequence[str], context: TaskContext, method: Method) -> PseudoSamples:
    """Return the samples with answers: those given, and the method's own where there is none; without one they are left
    out.

    Args:
        given: answers by sample, "" for none; empty if there are none at all.
        method: after the end of the phase, as it is evaluated.
    """
    answers = list(given) or [""] * len(samples)
    missing = [number for number, answer in enumerate(answers) if not answer]
    for number, answer in zip(missing, _own(method, [samples.sources[n] for n in missing], context), strict=True):
        answers[number] = answer.strip()
    kept = [number for number, answer in enumerate(answers) if answer]
    labels = phase_labels(context.phase)
    return PseudoSamples(
        [samples.sources[number] for number in kept],
        context.targets(context.phase.tasks[0], [answers[number] for number in kept]),
        [labels.index(answers[number]) if answers[number] in labels else -1 for number in kept],
        samples.fallback_samples,
    )


@torch.no_grad()
def _own(method: Method, sources: Sequence[Sequence[int]], context: TaskContext) -> list[str]:
    """Return the method's answers, restricted to the labels of the phase, if it has any."""
    backbone, limit = method.backbone, context.target_limit(context.phase.tasks[0])
    labels, allowed = phase_labels(context.phase), backbone.allowed_labels
    backbone.allowed_labels = dict(zip(labels, context.targets(context.phase.tasks[0], labels), strict=True))
    answers: list[str] = []
    try:
        with evaluating(backbone):
            for batch in batches_of(sources, AT_ONCE, backbone.codec.pad_id, backbone.device):
                with activate_batch(method, batch):
                    answers += predict(backbone, batch, limit)
    finally:
        backbone.allowed_labels = allowed
    return answers
