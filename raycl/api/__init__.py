"""raycl from Python: train on a stream, look at the run, answer texts with what it learned."""

from raycl.api.models import Model, load
from raycl.api.runs import Run, train
from raycl.api.tasks import task
from raycl.serve.offline.model import Prediction

__all__ = ["Model", "Prediction", "Run", "load", "task", "train"]
