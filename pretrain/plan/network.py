"""How long collectives take: bus bandwidth by the number of nodes that a group spans, and latency.

Two fabrics. `efa`: medians over sizes measured on nodes of 8 H100 with 8 x 400 Gb/s (Ultra-Scale Playbook), which
fall with every doubling. `infiniband`: rail-optimised, so each rank keeps its own card's bandwidth at any size. The
share of the card that is reached and the latency are fitted (`time.Rates`). Never loads torch.
"""

import math
from typing import Literal, NamedTuple

from pretrain.metrics.hardware import Device

GB = 1e9
Fabric = Literal["infiniband", "efa"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]

_MEASURED: dict[str, tuple[float, ...]] = {  # GB/s at 1, 2, 4, 8, 16, 32 and 64 nodes
    "all_reduce": (436, 362, 160, 99.6, 84.7, 64.9, 32.9),
    "all_gather": (250, 185, 119, 69, 55, 28, 11),
    "reduce_scatter": (250, 182, 116, 69, 55, 28, 11),
}
_MEASURED_CARD = 50 * GB  # bytes/s each way, of the machines measured


class Network(NamedTuple):
    """The links of a job, and what of them is reached."""

    device: Device
    fabric: Fabric
    gpus_per_node: int
    link_share: float  # of the links' bandwidth inside a node
    card_share: float  # of a network card's bandwidth
    hop_seconds: float  # latency of a collective per doubling of nodes, over EFA

    def seconds(self, kind: Collective, size: float, ranks: int, stride: int) -> float:
        """One collective of `size` bytes (the whole tensor's) among `ranks` ranks, `stride` ranks apart."""
        if ranks == 1:
            return 0.0
        per_node = min(ranks, max(1, self.gpus_per_node // stride))
        nodes = math.ceil(ranks / per_node)
        share = (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        hop = self.hop_seconds * (1.0 if self.fabric == "efa" else 0.25)
        return share * size / self._bandwidth(kind, nodes, per_node) + hop * math.log2(nodes)

    def _bandwidth(self, kind: Collective, nodes: int, per_node: int) -> float:
        """Bytes/s of bus bandwidth. A group with few ranks on a node has only their cards to leave it by."""
        table = _MEASURED[kind]
        inside = self.link_share * self.device.link_bandwidth
        if nodes == 1:
            return inside
        cards = per_node * self.card_share * self.device.network_bandwidth
        if self.fabric == "infiniband":
            return min(inside, cards)
        place = min(math.log2(nodes), len(table) - 1)
        low = min(int(place), len(table) - 2)
        log_low, log_high = math.log(table[low]), math.log(table[low + 1])
        measured = math.exp(log_low + (place - low) * (log_high - log_low)) * GB
        return min(measured * self.device.network_bandwidth / _MEASURED_CARD, cards)
