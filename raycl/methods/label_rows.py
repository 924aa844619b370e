"""Tensors of trained parameters that are kept over tasks, while the label head gains rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raycl.backbone import Backbone


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
