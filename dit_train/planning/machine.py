"""What a GPU and its links can do: stated peaks that the time model divides by, each of them a setting."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One kind of GPU in nodes of several; what it sends, it can receive at the same time."""

    name: str
    bf16_tflops: float
    """Dense bf16 matrix products, TFLOP/s."""
    fp32_tflops: float
    """fp32 matrix products as torch does them by default, without TF32, TFLOP/s."""
    memory_gb: float
    """GPU memory, 1e9 bytes."""
    memory_gbs: float
    """Bandwidth of GPU memory, 1e9 bytes/s."""
    node_gbs: float
    """What one GPU sends to others of its node, 1e9 bytes/s."""
    network_gbs: float
    """What one GPU sends to other nodes, 1e9 bytes/s."""
    node_latency_us: float = 3.0
    """Of a message inside a node, µs. An assumption: vendors state none."""
    network_latency_us: float = 8.0
    """Of a message between nodes, µs. An assumption."""
    gpus_per_node: int = 8
    """Ranks 0..n−1 share the first node, and so on."""
    efficiency: float = 0.7
    """Share of the peak that large matrix products reach. An assumption."""

    def product_seconds(self, flops: float, dtype: str) -> float:
        """Time of matrix products in ``bf16`` or ``fp32``."""
        peak = self.bf16_tflops if dtype == "bf16" else self.fp32_tflops
        return flops / (peak * 1e12 * self.efficiency)

    def memory_seconds(self, size: float) -> float:
        """Time in which `size` bytes pass between memory and the chip."""
        return size / (self.memory_gbs * 1e9)

    def link_seconds(self, name: str, sent: float, ranks: tuple[int, ...]) -> float:
        """Time of one collective in which a rank of the group `ranks` sends `sent` bytes.

        An all-to-all sends (n − g)/(n − 1) of its bytes to the n − g ranks on other nodes, through the network card of
        the GPU. Rings run through all g ranks of a node, and leave it through all of their cards together. Every
        collective takes ⌈log₂ n⌉ latencies, as trees do.
        """
        count = len(ranks)
        if count == 1:
            return 0.0
        here = sum(rank // self.gpus_per_node == ranks[0] // self.gpus_per_node for rank in ranks)
        steps, latency = math.ceil(math.log2(count)), self.node_latency_us
        inside, outside = sent / self.node_gbs, 0.0
        if here < count:
            latency = self.network_latency_us
            outside = sent / here / self.network_gbs
            if "alltoall" in name or "all_to_all" in name:
                share = (count - here) / (count - 1)
                inside, outside = (1 - share) * sent / self.node_gbs, share * sent / self.network_gbs
        return max(inside, outside) / 1e9 + steps * latency / 1e6


MACHINES = {
    # NVIDIA H100 data sheet, SXM: 989.4 TFLOP/s dense bf16, 66.9 fp32, 80 GB at 3.35 TB/s, NVLink 900 GB/s both ways
    # together; DGX H100 user guide: 8 GPUs, 8 ConnectX-7 of 400 Gb/s for them
    "h100": Machine("H100 SXM", 989.4, 66.9, 80, 3350, 450, 50),
    # NVIDIA H200 data sheet, SXM: the same chip, 141 GB at 4.8 TB/s; DGX H200: 8 ConnectX-7 of 400 Gb/s
    "h200": Machine("H200 SXM", 989.4, 66.9, 141, 4800, 450, 50),
    # NVIDIA Blackwell data sheet, HGX B200: 2,250 TFLOP/s dense bf16, 80 fp32 (at 1,000 W), 8 TB/s, NVLink 1.8 TB/s
    # both ways together; DGX B200 user guide: 1,440 GB over 8 GPUs, 8 ConnectX-7 of 400 Gb/s
    "b200": Machine("B200 SXM", 2250, 80, 180, 8000, 900, 50),
}

_PEAKS = {
    "NVIDIA H100 80GB HBM3": (MACHINES["h100"].bf16_tflops, MACHINES["h100"].fp32_tflops),
    "NVIDIA GH200 480GB": (MACHINES["h100"].bf16_tflops, MACHINES["h100"].fp32_tflops),
    "NVIDIA H200": (MACHINES["h200"].bf16_tflops, MACHINES["h200"].fp32_tflops),
    "NVIDIA B200": (MACHINES["b200"].bf16_tflops, MACHINES["b200"].fp32_tflops),
    # NVIDIA data sheets of these; where only the figure with sparsity is stated, half of it
    "NVIDIA H100 PCIe": (756.5, 51),
    "NVIDIA H100 NVL": (835.5, 60),
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "NVIDIA A100-PCIE-40GB": (312, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 19.5),
    "NVIDIA L40S": (362.05, 91.6),
    "NVIDIA L4": (121, 30.3),
    # NVIDIA Ada architecture white paper, products accumulated in fp32
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
}
"""Dense bf16 and fp32 (without TF32) TFLOP/s by the name that torch.cuda.get_device_name gives a whole GPU. A part of
one (MIG) has a longer name, and no peak here."""


def peak_tflops(name: str, dtype: str) -> float | None:
    """Stated peak of a GPU by its name in matrix products of ``bf16`` or ``fp32``; None for one that is not known."""
    peaks = _PEAKS.get(name)
    return None if peaks is None else peaks[dtype != "bf16"]
