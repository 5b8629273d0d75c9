"""Validation: the mean loss over all targets of the validation rows, each counted once, and bits per byte of text."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from data_prep.errors import DataError
from pretrain.data.loader import Validation
from pretrain.dist import World
from pretrain.parallel.engine import Forward


def evaluate(
    engine: Forward, batches: Validation, world: World, leave: Callable[[bool], bool] = lambda unreadable: False
) -> dict[str, float] | None:
    """val_loss (nats a target) and val_bits_per_byte over all validation rows; None when `leave` said so.

    Sums of losses over sums of targets, over batches and ranks alike: never a mean of means. Collective: all ranks ask
    `leave` before each batch, with True on the rank that cannot read it, where the DataError is raised.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    engine.model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                if leave(False):
                    return None
                out = engine.forward(batch)
                sums[0] += out.cross_entropy
                sums[1] += out.targets
    except DataError:
        leave(True)
        raise
    finally:
        engine.model.train()
    if world.size > 1:
        dist.all_reduce(sums)
    loss_sum, targets = sums.tolist()
    return {
        "val_loss": loss_sum / targets,
        "val_bits_per_byte": loss_sum / math.log(2) / batches.num_bytes,
        "val_targets": targets,
    }
