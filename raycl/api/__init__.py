"""raycl from Python: train on a stream, look at the run, answer texts with what it learned."""

from raycl.api.models import Model, load
from raycl.api.runs import Run, train
from raycl.api.tasks import task

__all__ = ["Model", "Run", "load", "task", "train"]
