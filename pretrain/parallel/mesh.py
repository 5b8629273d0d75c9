"""The device mesh: ranks laid out over named axes, in the order dp_replicate, dp_shard (later cp, tp inside)."""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pretrain.config import Layout


class Meshes(NamedTuple):
    """`shard` is what fully_shard takes: 1-D (dp_shard), or 2-D (dp_replicate, dp_shard)."""

    shard: DeviceMesh
    dp_rank: int  # which rows of a micro-step are this rank's
    dp_size: int


def build_meshes(layout: Layout, device: torch.device, rank: int) -> Meshes:
    mesh = init_device_mesh(
        device.type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    shard = mesh if layout.dp_replicate > 1 else mesh["dp_shard"]
    return Meshes(shard, rank, layout.dp)
