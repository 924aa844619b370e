"""The frozen or full language model that a method trains: the only place that calls `from_pretrained`.

Methods, engines and the evaluator use one interface (`Backbone`) for encoder-only, encoder-decoder and decoder-only
models. Does not depend on tasks, streams, methods, or on how gradients are applied.
"""

from raycl.backbone.base import Backbone, Output
from raycl.backbone.load import (
    BackboneConfig,
    BackboneOptions,
    at_commit,
    identity,
    load_backbone,
    load_codec,
    load_skeleton,
)

__all__ = [
    "Backbone",
    "BackboneConfig",
    "BackboneOptions",
    "Output",
    "at_commit",
    "identity",
    "load_backbone",
    "load_codec",
    "load_skeleton",
]
