"""Many adapters in one model: each example of a batch has its own weighted mixture of them.

What it does not know: how the mixture was chosen, where adapters come from, how they are trained.
"""

from raycl.adapters.stack import AdapterStack

__all__ = ["AdapterStack"]
