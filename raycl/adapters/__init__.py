"""Many adapters in one model: each example of a batch has its own weighted mixture of them."""

from raycl.adapters.stack import AdapterStack

__all__ = ["AdapterStack"]
