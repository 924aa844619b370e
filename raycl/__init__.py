"""raycl: continual learning of language models on Ray.

One model learns tasks that arrive one after another; accuracy and forgetting are reported for every task.
`raycl.train`, `raycl.load`, `raycl.task` and their classes are imported when they are first used, so that
`import raycl` stays instant on every worker.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycl.api import Model, Prediction, Run, load, task, train

__version__ = "0.1.0"
__all__ = ["Model", "Prediction", "Run", "__version__", "load", "task", "train"]

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
"""Threads of GNU's OpenMP that wait sleep early. By its own default they keep their CPUs busy for a while, so that a
run on two CPUs took seven times as long beside two busy processes. torch's import reads it."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("raycl.api"), name)
    raise AttributeError(f"module 'raycl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
