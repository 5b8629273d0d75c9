"""From a config to an engine: the order in which a model is built and wrapped, as prose.

Model on the meta device -> tensor parallel, context parallel -> activation checkpointing -> compile each block -> shard
-> materialise -> initial weights -> optimizer. (DeepSpeed's stage 3 partitions while it builds, so its engine takes the
same two functions and goes its own way.) Adding a parallelism is one file beside this one, one mesh axis, one line
here, one config field.
"""

from collections.abc import Callable

import torch
from torch import nn

from pretrain.config import Config, Layout
from pretrain.dist import World
from pretrain.model.attention import Kernel, choose_kernel
from pretrain.model.llama import Llama
from pretrain.parallel.activation_checkpoint import apply_activation_checkpoint
from pretrain.parallel.compile import compile_blocks
from pretrain.parallel.context_parallel import apply_context_parallel
from pretrain.parallel.engine import Engine, compute_dtype
from pretrain.parallel.fsdp import FsdpEngine
from pretrain.parallel.mesh import Meshes, build_meshes
from pretrain.parallel.tensor_parallel import apply_tensor_parallel, overlap_collectives


def build_model(cfg: Config, device: torch.device, meshes: Meshes | None = None) -> Llama:
    """The model as this config trains it, on the current default device, before sharding over data-parallel ranks."""
    kernel, _ = describe_attention(cfg, device)
    model = Llama(
        cfg.model,
        kernel=kernel,
        activations=compute_dtype(cfg),
        loss_chunks=cfg.loss.chunks,
        z_loss=cfg.loss.z_loss,
    )
    if meshes is not None and meshes.tp is not None:
        apply_tensor_parallel(model, meshes.tp)
        if cfg.parallel.async_tp:
            overlap_collectives(meshes.tp, device)
    if meshes is not None and meshes.cp is not None:
        apply_context_parallel(model, meshes.cp)
    apply_activation_checkpoint(model, cfg.activation_checkpoint)
    if cfg.compile.enabled:
        compile_blocks(model, memory_budget=cfg.activation_checkpoint.memory_budget)
    return model


def describe_attention(cfg: Config, device: torch.device) -> tuple[Kernel, str]:
    """The attention kernel of this run and the line for the log."""
    return choose_kernel(cfg.model.attention, device, compute_dtype(cfg), mask_documents=cfg.data.mask_documents)


def build_engine(
    cfg: Config, layout: Layout, world: World, build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> Engine:
    if cfg.parallel.engine == "zero":
        from pretrain.parallel.zero import ZeroEngine

        return ZeroEngine(cfg, lambda: build_model(cfg, world.device), build_optimizer, layout.accumulation, world)
    meshes = build_meshes(layout, world.device)
    return FsdpEngine(cfg, lambda: build_model(cfg, world.device, meshes), build_optimizer, meshes, world.device)
