"""PyTorch's fully sharded data parallelism (FSDP2, `fully_shard`) behind the engine protocol: nothing but torch.

The layers of the model are shared out over the workers as soon as it is loaded, and stay so for the whole run, in
evaluation too: a layer is whole on a worker while it computes, and no longer. Adapters, prompts, heads, and what the
model has outside of its layers (embeddings, output words, last norms) stay whole on every worker: methods and
generation read them outside of the forward pass. So adapters are trained as in plain PyTorch, to the bit.

Library behaviour this file depends on (torch 2.13, observed): the first module whose forward runs is the root of all;
gradients are averaged unless their divisor is set; a unit's parameters must not be replaced afterwards.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from raycl.backbone import Backbone, Output
from raycl.training.engines.compilation import layers
from raycl.training.engines.engine import TorchEngine
from raycl.training.workers.distributed import DistributedContext, ensure_process_group, own_part
from raycl.types import Batch


class Root(nn.Module):
    """The backbone as the module that all shared layers belong to."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, batch: Batch | None) -> Output | None:
        """Return the output of a teacher-forced pass; None without a batch."""
        return None if batch is None else self.backbone(batch)


def shard(backbone: Backbone, world: DistributedContext, trains_layers: bool) -> Root:
    """Share the layers out over the workers, before adapters are in them. Collective.

    One layer after another is converted to the backbone's dtype, moved to the device and divided, so a backbone that
    was loaded on the host is never whole on a device.

    Args:
        trains_layers: the weights of layers are trained, so they are kept, and gathered, in float32 (autocast converts
            them, as in plain PyTorch: norms of a mixed dtype do not run on CPUs); otherwise they are frozen.
    """
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # nothing adds to a layer's output in place
    ensure_process_group(world)
    mesh = DeviceMesh.from_group(world.sharding, world.device.type)  # adapters' sums may come in another order
    dtype = torch.float32 if trains_layers else backbone.dtype
    for layer in layers(backbone.model):
        for parameter in layer.parameters():
            parameter.requires_grad_(trains_layers)
            parameter.data = parameter.data.to(dtype)
        fully_shard(layer, mesh=mesh)
    root = Root(backbone)
    left = {parameter for parameter in root.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(root, mesh=mesh, ignored_params=left)
    for parameter in left:
        parameter.data = parameter.data.to(world.device, backbone.dtype)
    for buffer in root.buffers():
        buffer.data = buffer.data.to(world.device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide
    root(None)
    backbone.synchronized = world.size > 1
    return root


class FSDPEngine(TorchEngine):
    """One task's optimizer around a backbone whose layers are shared out, and gather their weights for the root."""

    @property
    def step_bytes(self) -> int:
        """Layers are gathered for each forward and backward pass; gradients of trained ones are summed in float32."""
        if self.world.size == 1:
            return 0
        shared = {name: p for name, p in self.backbone.named_parameters() if isinstance(p, DTensor)}
        gathered = 2 * sum(p.numel() * p.element_size() for p in shared.values())
        summed = 4 * sum(p.numel() for name, p in shared.items() if name in self.trained)
        return super().step_bytes + self.accumulation * (gathered + summed)

    def _is_shared(self, name: str) -> bool:
        return isinstance(self.trained[name], DTensor)

    def _part_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return super()._part_of(parameter)
        return nn.Parameter(parameter.to_local().detach())

    def _gradient(self, name: str) -> Tensor | None:
        gradient = self.trained[name].grad
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def _whole(self, name: str, part: Tensor) -> Tensor:
        shared = self.trained[name]
        if not isinstance(shared, DTensor):
            return part
        tensor = DTensor.from_local(
            part, shared.device_mesh, shared.placements, run_check=False, shape=shared.shape, stride=shared.stride()
        )
        return tensor.full_tensor()

    def _own(self, name: str, value: Tensor) -> Tensor:
        shared = self.trained[name]
        return own_part(shared, value) if isinstance(shared, DTensor) else super()._own(name, value)

    def _norm(self) -> Tensor:
        shared, copied = torch.zeros((), device=self.world.device), torch.zeros((), device=self.world.device)
        for name, part in self.parts.items():
            if part.grad is not None:
                square = part.grad.float().square().sum()
                (shared if self._is_shared(name) else copied).add_(square)
        return (self.world.sum(shared) + copied).sqrt()

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        for parameter in self.trained.values():
            parameter.grad = None
