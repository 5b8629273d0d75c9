"""torch.compile, one block at a time: all blocks share one compilation, and the sharding hooks stay outside of it."""

import torch
import torch._functorch.config

from pretrain.model.llama import Llama


def compile_blocks(model: Llama, *, memory_budget: float = 1.0) -> None:
    """Compile each block's forward in place; of what its backward needs, `memory_budget` (a share) is kept, the rest
    computed again, as the compiler finds cheapest.

    The bound method is replaced, not the module: names in the state stay plain, and hooks that engines register on the
    block (gather, reduce) run in eager mode around the compiled region.
    """
    torch._functorch.config.activation_memory_budget = memory_budget  # read when a block is first called
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
