"""torch.compile, one block at a time: all blocks share one compilation, and the sharding hooks stay outside of it."""

import torch

from pretrain.model.llama import Llama


def compile_blocks(model: Llama) -> None:
    """Compile each block's forward in place.

    The bound method is replaced, not the module: names in the state stay plain, and hooks that engines register on the
    block (gather, reduce) run in eager mode around the compiled region.
    """
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
