"""The device mesh: ranks laid out over named axes, outermost first: pp, dp_replicate, dp_shard, cp, tp.

Neighbouring ranks differ in tp, whose collectives are the most urgent, then in cp. Parameters shard over dp_shard x cp
as one axis, since ranks of cp have other positions but the same parameters. Which rows a rank reads, `Layout` says.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretrain.config import Layout


class Meshes(NamedTuple):
    """`shard` is what fully_shard takes: 1-D (shard), or 2-D (dp_replicate, shard). cp and tp are None where 1."""

    shard: DeviceMesh
    cp: DeviceMesh | None
    tp: DeviceMesh | None


def build_meshes(layout: Layout, device: torch.device) -> Meshes:
    sizes = {"pp": 1, "dp_replicate": layout.dp_replicate, "shard": layout.dp_shard * layout.cp, "tp": layout.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    shard = mesh["dp_replicate", "shard"] if layout.dp_replicate > 1 else mesh["shard"]
    cp = None
    if layout.cp > 1:
        sizes = {"dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
        cp = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))["cp"]
    return Meshes(shard, cp, mesh["tp"] if layout.tp > 1 else None)
