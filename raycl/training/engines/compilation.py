"""`train.compile`: the layers of a backbone under torch.compile while it trains.

Each layer is compiled by itself and in place, for any batch size and length, so that equal layers share what the
compiler makes and parameters keep their names. Evaluation and generation run the layers as they are
(`Backbone.inference`): caches and short texts would be compiled again and again.
"""

import os
import shutil
from collections.abc import Iterator

from torch import nn

from raycl.backbone import Backbone
from raycl.errors import BackboneError

BACKEND = "inductor"
"""The compiler of the captured graphs."""


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that stand in lists: the layers of a transformer."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers(child)


def compile_layers(backbone: Backbone, backend: str = BACKEND) -> None:
    """Compile each layer at its first training step, which takes longer.

    Args:
        backend: torch's name of the compiler.

    Raises:
        BackboneError: on a CPU, there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if backbone.device.type == "cpu" and shutil.which(compiler) is None:
        raise BackboneError(
            f"train.compile is true, and on CPUs torch.compile needs a C++ compiler: '{compiler}' is not there. "
            "Install one, name it in the variable CXX, or set train.compile to false"
        )
    for layer in layers(backbone.model):
        layer.compile(dynamic=True, backend=backend)
    backbone.is_compiled = True
