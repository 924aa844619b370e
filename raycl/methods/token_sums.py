"""Sums over the real tokens that modules read or write in forward passes."""

from torch import Tensor

from raycl.backbone import Backbone
from raycl.backbone.base import Side
from raycl.types import Batch


class TokenSums:
    """Sums over real tokens, which hooks of the modules add up.

    Attributes:
        totals: path of a module -> its sum, float64 on the model's device.
    """

    def __init__(self, backbone: Backbone, totals: dict[str, Tensor]) -> None:
        self.totals = totals
        self._backbone = backbone
        self._real: dict[Side, Tensor] = {}

    def begin_batch(self, batch: Batch) -> None:
        self._real = self._backbone.real_tokens(batch)

    def real(self, path: str, states_BSD: Tensor) -> Tensor:
        """Return `[N, D]` float32, the real tokens of what a module reads or writes, without a prefix in front."""
        real_BS = self._real[self._backbone.side(path)]
        return states_BSD.detach()[:, -real_BS.shape[1] :][real_BS].float()
