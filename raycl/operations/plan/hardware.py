"""GPUs that plans are made for, and the nodes that they come in: vendors' figures."""

from __future__ import annotations

from dataclasses import dataclass

from raycl.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """A GPU and its share of a node.

    Attributes:
        memory: bytes on the card. flops: dense bfloat16 FLOP/s of the tensor cores at their highest.
        link: bytes per second that it sends to its neighbours in the node, in one direction.
        network: bytes per second that a node of eight sends to other nodes. host: bytes of memory of such a node.
        ray: Ray's name of it (`accelerator_type`).
    """

    memory: float
    flops: float
    link: float
    network: float
    host: float
    ray: str


GB, TFLOPS, GIB = 1e9, 1e12, 2**30
GBIT = 1e9 / 8

GPUS = {
    # NVIDIA A10G data sheet: 24 GB, bfloat16 70 TFLOPS dense, PCIe 4.0 x16 64 GB/s in both directions together.
    # AWS, EC2 G5: g5.48xlarge, 8 GPUs, 768 GiB, 100 Gbit/s.
    "a10g-24": Gpu(24 * GB, 70 * TFLOPS, 32 * GB, 100 * GBIT, 768 * GIB, "A10G"),
    # NVIDIA L4 data sheet: 24 GB, bfloat16 242 TFLOPS with sparsity, so 121 dense, PCIe 4.0 x16 64 GB/s.
    # AWS, EC2 G6: g6.48xlarge, 8 GPUs, 768 GiB, 100 Gbit/s.
    "l4-24": Gpu(24 * GB, 121 * TFLOPS, 32 * GB, 100 * GBIT, 768 * GIB, "L4"),
    # NVIDIA A100 data sheet: 40 GB, bfloat16 312 TFLOPS dense, NVLink 600 GB/s in both directions together.
    # AWS, EC2 P4: p4d.24xlarge, 8 GPUs, 1,152 GiB, 400 Gbit/s.
    "a100-40": Gpu(40 * GB, 312 * TFLOPS, 300 * GB, 400 * GBIT, 1152 * GIB, "A100"),
    # NVIDIA A100 80GB data sheet: as above with 80 GB. AWS, EC2 P4: p4de.24xlarge, as above.
    "a100-80": Gpu(80 * GB, 312 * TFLOPS, 300 * GB, 400 * GBIT, 1152 * GIB, "A100-80G"),
    # NVIDIA H100 SXM data sheet: 80 GB, bfloat16 1,979 TFLOPS with sparsity, so 989 dense, NVLink 900 GB/s.
    # AWS, EC2 P5: p5.48xlarge, 8 GPUs, 2,048 GiB, 3,200 Gbit/s.
    "h100-80": Gpu(80 * GB, 989 * TFLOPS, 450 * GB, 3200 * GBIT, 2048 * GIB, "H100"),
    # NVIDIA H200 SXM data sheet: 141 GB, arithmetic and NVLink of the H100. AWS, EC2 P5: p5en.48xlarge, as above.
    "h200-141": Gpu(141 * GB, 989 * TFLOPS, 450 * GB, 3200 * GBIT, 2048 * GIB, "H200"),
}
"""Name -> GPU."""

NODE = 8
"""GPUs of the nodes in the table."""


@dataclass(frozen=True)
class Cluster:
    """Where a plan runs.

    Attributes:
        gpus: all of them, one worker each. per_node: on each node, which has that share of a node of eight.
        utilisation: share of `Gpu.flops` that training reaches. disk: bytes per second that a node reads weights with.
    """

    gpu: Gpu
    gpus: int = 1
    per_node: int = NODE
    utilisation: float = 0.4
    disk: float = 2 * GB

    @property
    def on_node(self) -> int:
        """GPUs that work together on one node."""
        return min(self.gpus, self.per_node)

    @property
    def nodes(self) -> int:
        """Nodes that hold so many."""
        return -(-self.gpus // self.per_node)

    @property
    def host(self) -> float:
        """Bytes of memory of one node."""
        return self.gpu.host * min(1.0, self.per_node / NODE)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a ring over all workers: that of its slowest part, where it leaves a node."""
        network = self.gpu.network * min(1.0, self.per_node / NODE)
        return self.gpu.link if self.nodes == 1 else min(self.gpu.link, network)


def gpu_named(name: str) -> Gpu:
    """Return the GPU of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu is '{name}': expected one of {', '.join(GPUS)}")
    return GPUS[name]
