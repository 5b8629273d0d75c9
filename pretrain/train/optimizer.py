"""The optimizer and its parameter groups: matrices and embeddings decay, norm gains do not.

Groups are made from names, never from the number of dims, which sharding may change. Masters and moments are fp32.
"""

from typing import Any

import torch
from torch import nn

from pretrain.config import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, `decay` and `no_decay`; a tied weight is in them once."""
    decay: list[tuple[str, nn.Parameter]] = []
    no_decay: list[tuple[str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        (no_decay if name.endswith("norm.weight") else decay).append((name, param))
    return [
        {"name": "decay", "params": [p for _, p in decay], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for _, p in no_decay], "weight_decay": 0.0},
    ]


def describe_groups(model: nn.Module, weight_decay: float) -> str:
    """One line with the tensors and parameters of each group; they sum to all parameters."""
    parts = []
    for group in parameter_groups(model, weight_decay):
        count = sum(global_numel(p) for p in group["params"])
        parts.append(
            f"{group['name']} ({group['weight_decay']:g}): {len(group['params'])} tensors, {count:,} parameters"
        )
    return "weight decay | " + " | ".join(parts)


def global_numel(param: torch.Tensor) -> int:
    """Elements of the whole parameter, also where ZeRO-3 has emptied it."""
    return int(getattr(param, "ds_numel", None) or param.numel())


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (fused: one kernel for all tensors, on CPU too) or SGD. The rate is set before every update."""
    groups = parameter_groups(model, cfg.weight_decay)
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, foreach=True)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps, fused=True)
