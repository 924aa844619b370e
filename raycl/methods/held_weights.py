"""Other values of what a learner trains, with which the backbone is run too: an earlier or an averaged model.

No second model is kept: the values take the place of the present ones in a forward pass. So a LoRA costs a copy of
itself, and `learner=finetune` one of the whole model.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raycl.backbone import Backbone, Output
from raycl.backbone.base import evaluating
from raycl.methods.base import Method, activate_batch, trained_names, under
from raycl.types import Batch


class HeldWeights:
    """Values of the trained parameters beside their own.

    A method that computes with them sets `Method.replaces_parameters`.

    Attributes:
        values: parameter -> value; {}: nothing is held.
    """

    def __init__(self, backbone: Backbone, learner: Method, dtype: torch.dtype | None = None) -> None:
        """Hold nothing yet.

        Args:
            dtype: dtype of the values; None: that of each parameter.
        """
        self.values: dict[str, Tensor] = {}
        self._backbone, self._dtype = backbone, dtype
        self._routed = _Routed(backbone, learner)

    def __len__(self) -> int:
        return len(self.values)

    def hold(self) -> None:
        own = dict(self._backbone.named_parameters())
        kept = {name: own[name].detach() for name in trained_names(self._backbone)}
        self.values = {name: value.to(self._dtype or value.dtype, copy=True) for name, value in kept.items()}

    def follow(self, rate: float) -> None:
        """Move the held values towards the present ones by this share of the way (an exponential moving average)."""
        for parameter, value in self._placed().values():
            value.lerp_(parameter.detach().to(value.dtype), rate)

    def squared_distance(self) -> Tensor:
        """Return that of the present values to the held ones, in float32 and with a gradient."""
        pairs = self._placed().values()
        return torch.stack([(parameter.float() - value).square().sum() for parameter, value in pairs]).sum()

    def clear(self) -> None:
        """Hold nothing any more."""
        self.values = {}

    @torch.no_grad()
    def output(self, batch: Batch) -> Output:
        """Return the forward pass of the model that has the held values, without dropout, as the learner routes it."""
        held = {f"backbone.{name}": value.to(parameter.dtype) for name, (parameter, value) in self._placed().items()}
        with evaluating(self._backbone.model):
            output: Output = functional_call(self._routed, held, (batch,))
        return output

    def _placed(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return the parameters with their values, which move to the parameter's device."""
        own = dict(self._backbone.named_parameters())
        self.values = {name: value.to(own[name].device) for name, value in self.values.items()}
        return {name: (own[name], value) for name, value in self.values.items()}

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the values as tensors of a checkpoint: `<kind>/<parameter>`."""
        return {f"{kind}/{name}": value.cpu() for name, value in self.values.items()}

    def restore(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Invert `tensors`."""
        stored = under(f"{kind}/", tensors)
        self.values = {name: value.clone() for name, value in stored.items()}  # a file's alignment changes products


class _Routed(nn.Module):
    """A learner's forward pass with its routing, beside a mixture that may be active."""

    def __init__(self, backbone: Backbone, learner: Method) -> None:
        super().__init__()
        self.backbone = backbone
        self._learner = learner

    def forward(self, batch: Batch) -> Output:
        """Return the output under the learner's own mixture."""
        stack = self._learner.stack
        if stack is None:
            return self._output(batch)
        with stack.mixture_aside(), activate_batch(self._learner, batch):
            return self._output(batch)

    def _output(self, batch: Batch) -> Output:
        output: Output = self.backbone(batch)
        return output
