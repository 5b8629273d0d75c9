"""FSDP2 engine: `fully_shard` per block; fp32 masters, bf16 compute, fp32 reduction; HSDP with dp_replicate.

Parameters cut by tensor parallel arrive as DTensors, and leave sharded over both axes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from pretrain.config import Config
from pretrain.data.loader import Batch
from pretrain.model.init import init_weights
from pretrain.model.llama import Llama
from pretrain.model.loss import LossSums
from pretrain.parallel.collectives import axis_group
from pretrain.parallel.context_parallel import split_batch
from pretrain.parallel.engine import Held, Keep, State, clip_factor, compute_dtype, model_inputs
from pretrain.parallel.mesh import Meshes
from pretrain.parallel.optimizer_state import optimizer_state, set_update_count


class FsdpEngine:
    state_is_copied = False

    def __init__(
        self,
        cfg: Config,
        build_model: Callable[[], Llama],
        build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        meshes: Meshes,
        device: torch.device,
        *,
        materialise: Callable[[Llama], None] | None = None,
    ) -> None:
        """`materialise` gives the sharded model, still on the meta device, storage and initial weights."""
        self.cfg = cfg
        with torch.device("meta"):
            model = build_model()
        shard_model(model, cfg, meshes, device)
        if materialise is not None:
            materialise(model)
        else:
            model.to_empty(device="cpu" if cfg.parallel.cpu_offload else device)
            init_weights(model, cfg.run.seed, cfg.model.n_layers)
        self.model: Llama = model
        self.optimizer = build_optimizer(model)
        self._replicated = meshes.shard.ndim == 2
        self._local = cfg.parallel.accumulate == "local"
        self._context = None if meshes.cp is None else axis_group(meshes.cp)
        self._counts = meshes.tp is None or meshes.tp.get_local_rank() == 0

    def forward(self, batch: Batch) -> LossSums:
        if self._context is not None:
            batch = split_batch(batch, self._context)
        inputs = model_inputs(batch, mask_documents=self.cfg.data.mask_documents, kernel=self.model.kernel)
        sums: LossSums = self.model(batch.inputs, **inputs)
        if self._counts:
            return sums
        # All ranks of tp have the same loss to differentiate; in sums over all ranks the first one's counts.
        return LossSums(sums.total, *(torch.zeros_like(part) for part in sums[1:]))

    def backward(self, loss: Tensor, *, last: bool, reduce: bool = False) -> None:
        root, reduce = self.model, last or reduce
        assert isinstance(root, FSDPModule)
        root.set_is_last_backward(reduce)
        if self._local:
            root.set_requires_gradient_sync(reduce)
        elif self._replicated:
            root.set_requires_all_reduce(reduce)
        loss.backward()

    def grad_squares(self) -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return dict(zip(grads, square_shares(list(grads.values())), strict=True))

    def step(self, lr: float, keep: Keep | None = None) -> Tensor:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = global_norm(grads)
        if keep is not None and not keep(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return norm
        if self.cfg.train.grad_clip:
            torch._foreach_mul_([_local(g) for g in grads], clip_factor(norm, self.cfg.train.grad_clip))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> State:
        # A forward without a backward (validation) leaves gathered, 16-bit weights in place of the masters.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        return model | optimizer_state(self.optimizer, dict(self.model.named_parameters()))

    def held(self) -> Iterator[Held]:
        for name, tensor in self.state().items():
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, enumerate(tensor.placements)
                groups = [mesh.get_group(axis) for axis, how in placements if isinstance(how, Replicate)]
                yield Held(name, tensor.to_local(), tuple(groups))

    def load(self, state: State) -> None:
        """The tensors that `state()` gave are live and were read in place; only the update count is left to set."""
        if "optim.step" in state:
            set_update_count(self.optimizer, float(state["optim.step"]))

    def close(self) -> None:
        pass


def shard_model(model: Llama, cfg: Config, meshes: Meshes, device: torch.device) -> None:
    """fully_shard every block, the embedding, the head with its norm, and the root with what is left.

    Inputs are never cast: the residual stream is in the compute dtype from the embedding on, and the fp32 RoPE tables
    must stay fp32. Sums over ranks are plain sums (no division): the loss is already a share of the global one.
    """
    dtype = compute_dtype(cfg)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32 if cfg.precision.reduce == "fp32" else torch.bfloat16,
        cast_forward_inputs=False,
    )
    pin = device.type == "cuda"  # pinned host memory is copied while the device computes
    offload = CPUOffloadPolicy(pin_memory=pin) if cfg.parallel.cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=meshes.shard, mp_policy=policy, offload_policy=offload)
    reshard = cfg.parallel.reshard_after_forward
    if not cfg.model.tie_embeddings:
        embeddings = shard(model.tok_embeddings, reshard_after_forward=reshard)
        embeddings.set_unshard_in_backward(False)  # a row's gradient does not depend on it
        # Backward starts with the head: freeing it after forward would only gather it again.
        shard([model.norm, model.output], reshard_after_forward=False)
    for block in model.layers:
        shard(block, reshard_after_forward=reshard)
    shard(model)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)
        if meshes.shard.size() > 1:  # a lone rank's gradients would be copied to be divided by 1
            module.set_gradient_divide_factor(1.0)
    if cfg.parallel.prefetch:
        gather_ahead([m for m in modules if m not in (model, model.norm)], cfg.parallel.prefetch)


def gather_ahead(modules: list[FSDPModule], count: int) -> None:
    """Let each of `modules`, in the order of forward, gather the weights of the `count` that are used after it."""
    for index, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + count])
        module.set_modules_to_backward_prefetch(modules[max(0, index - count) : index][::-1])


def global_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients as one vector, the same on every rank, whatever part of each a rank holds."""
    total = square_shares(grads).sum()
    dist.all_reduce(total)
    return total.sqrt()


def square_shares(grads: list[Tensor]) -> Tensor:
    """This rank's share of each gradient's squared norm: the sums over ranks are whole."""
    squares = torch.stack(torch._foreach_norm([_local(g) for g in grads])).square()
    return squares / torch.tensor([_copies(g) for g in grads], dtype=squares.dtype, device=squares.device)


def _copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    mesh = tensor.device_mesh
    return math.prod(mesh.size(axis) for axis, how in enumerate(tensor.placements) if isinstance(how, Replicate))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
