"""Many adapters in one model: each example of a batch speaks with its own weighted mixture of them.

What it does not know: who chose the mixture, where adapters come from, how they are trained.
"""

from raycl.adapters.stack import AdapterStack

__all__ = ["AdapterStack"]
