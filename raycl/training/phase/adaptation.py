"""Local adaptation: weights that are trained on a text's neighbours before it is answered, and restored afterwards.

Each text is adapted to and answered alone, without padding and dropout, so that its answer does not depend on the rest
of its batch. Gradients go to no `.grad` and no optimizer: parameters are copied before the first text, and copied back
after each, in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from raycl.backbone.base import loss_count
from raycl.methods.base import Method, activate_batch
from raycl.methods.capabilities import LocalAdaptation
from raycl.types import TENSORS, Batch


def answer_each(
    method: Method, adaptation: LocalAdaptation, batch: Batch, answer: Callable[[Batch], list[str]]
) -> list[str]:
    """Return an answer per example; "" for fill-ups, which are not computed.

    Args:
        answer: answers a batch of one example by the model as it is then.
    """
    answers = [""] * len(batch)
    own = dict(method.backbone.named_parameters())
    weights = {name: own[name] for name in adaptation.parameters() if name in own and own[name].numel()}
    assert weights, "nothing can be adapted"
    base = {name: parameter.detach().clone() for name, parameter in weights.items()}
    for row, position in enumerate(batch.rows.tolist()):
        if position < 0:
            continue
        example = alone(batch, row)
        try:
            adapt(method, adaptation, example, weights, base)
            (answers[row],) = answer(example)
        finally:  # they are the base again, bit for bit
            with torch.no_grad():
                for name, parameter in weights.items():
                    parameter.copy_(base[name])
    return answers


def adapt(
    method: Method,
    adaptation: LocalAdaptation,
    example: Batch,
    weights: Mapping[str, nn.Parameter],
    base: Mapping[str, Tensor],
) -> None:
    """Take gradient steps on the mean loss of the example's neighbours plus `weight * |theta - base|^2`.

    The mean is over what carries loss: labels, or all tokens of the neighbours' answers together. With momentum a step
    is that of torch's SGD: its direction is the gradient plus momentum times the direction before.
    """
    neighbours = adaptation.neighbours(example)
    if neighbours is None or not loss_count(neighbours):
        return
    neighbours, directions = neighbours.to(method.backbone.device), dict[str, Tensor]()
    for _ in range(adaptation.steps):
        with torch.enable_grad(), activate_batch(method, neighbours):
            loss = method.backbone(neighbours).loss_sum / loss_count(neighbours)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        with torch.no_grad():
            for (name, parameter), gradient in zip(weights.items(), gradients, strict=True):
                pull = 2 * adaptation.weight * (parameter - base[name])
                direction = pull if gradient is None else gradient + pull
                if adaptation.momentum:
                    if name in directions:
                        direction = directions[name].mul_(adaptation.momentum).add_(direction)
                    directions[name] = direction
                parameter.sub_(adaptation.rate * direction)


def alone(batch: Batch, row: int) -> Batch:
    """Return one example of a batch, without padding."""
    source, target = int(batch.source_mask[row].sum()), int((batch.target_ids[row] >= 0).sum())
    fields = {name: tensor[row : row + 1] for name, tensor in zip(TENSORS, batch.tensors(), strict=True)}
    fields |= {name: fields[name][:, :source] for name in ("source_ids", "source_mask")}
    fields["target_ids"] = fields["target_ids"][:, :target]
    return replace(batch, **fields, texts=batch.texts[row : row + 1], tasks=batch.tasks[row : row + 1])
