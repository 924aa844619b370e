"""The trained parameters that are kept at the end of a task: adapters with prompts and label rows, and tensors of
parameters while the label head gains rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raycl.adapters import AdapterStack
from raycl.adapters.head import MixedHead
from raycl.adapters.soft_prompts import MixedPrompts, formed
from raycl.backbone import Backbone
from raycl.methods.base import Learned, in_head, under
from raycl.types import AdapterState

HEAD = "head"
"""Name of the adapter that holds the label head alone (`head_adapter`)."""


def end_training(backbone: Backbone, stack: AdapterStack, tensors: Mapping[str, Tensor]) -> dict[str, AdapterState]:
    """Return what each adapter in training holds; from now on nothing is in training.

    Args:
        tensors: learned parameters by name, whole and on the CPU.
    """
    states = stack.trainable_states(tensors)
    head, prefix = backbone.head, backbone.prefix
    if isinstance(prefix, MixedPrompts):
        prompts = formed(under("prefix.", tensors)).clone()
        pairs = zip(states.items(), prompts, strict=True)
        states = {name: replace(state, prompt=prompt) for (name, state), prompt in pairs}
        prefix.end_training()
    if isinstance(head, MixedHead) and head.trainable_labels:
        values = {"head.weight": head.weight.detach(), "head.bias": head.bias.detach(), **tensors}
        states = head.with_rows(states, values["head.weight"], values["head.bias"])
        head.end_training()
    stack.end_training()
    return states


def head_adapter(backbone: Backbone, tensors: Mapping[str, Tensor]) -> dict[str, AdapterState]:
    """Return the one label head that all tasks train, as an adapter beside others; empty without labels.

    Args:
        tensors: learned parameters by name, whole and on the CPU.
    """
    head = backbone.head
    if head is None or not head.labels:
        return {}
    weight, bias = tensors["head.weight"].clone(), tensors["head.bias"].clone()
    return {HEAD: AdapterState(labels=tuple(head.labels), head_weight=weight, head_bias=bias)}


def whole_model(backbone: Backbone, tensors: Mapping[str, Tensor]) -> Learned:
    """Return a whole model under its Hugging Face names, and the labels of its head."""
    model = {backbone.exported_name(name): tensor for name, tensor in tensors.items()}
    return Learned(model=model, labels=known_labels(backbone))


def is_trainable(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter of the backbone belongs to the adapters in training."""
    return ".lora_" in name or name.startswith("prefix.") or in_head(name, parameter)


def known_labels(backbone: Backbone) -> list[str]:
    """Return labels of the head's rows; none where there is no head."""
    return [] if backbone.head is None else list(backbone.head.labels)


def in_present_rows(
    kept: Mapping[str, Tensor], labels: Sequence[str], backbone: Backbone, axis: int = 0
) -> dict[str, Tensor]:
    """Return what was kept of parameters, in the shapes that these have now and on their device.

    Args:
        kept: parameter -> tensor of its shape then, behind `axis` further dimensions.
        labels: labels of the head's rows at that time.

    Returns:
        rows of the label head are found by their label; those of new labels are zero.
    """
    own = dict(backbone.named_parameters())
    rows = backbone.label_ids()
    present = {}
    for name, value in kept.items():
        value = value.to(own[name].device, copy=True)  # products may depend on how memory from a file is aligned
        if name.startswith("head."):
            whole = value.new_zeros(*value.shape[:axis], *own[name].shape)
            index = torch.tensor([rows[label] for label in labels], dtype=torch.long, device=value.device)
            value = whole.index_copy_(axis, index, value)
        present[name] = value
    return present
