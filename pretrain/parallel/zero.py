"""DeepSpeed ZeRO engine, stages 1, 2 and 3: the one door to deepspeed.

Masters, moments, accumulated and reduced gradients are fp32 at every stage. bf16 compute is DeepSpeed's
`torch_autocast`, since its `bf16` mode starts from bf16-rounded weights; `lower_precision_safe_modules` stays empty,
since the modules in it reduce their gradients in bf16. The price: parameters are gathered (stage 3) and gradients
reduced (all stages) in fp32, twice the bytes of FSDP2's bf16 gathers.
Stage 1 accumulates whole gradients on every rank until the last micro-batch; 2 and 3 reduce each micro-batch.
"""

import fcntl
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pretrain.config import Config
from pretrain.config_deepspeed import swapping
from pretrain.data.loader import Batch
from pretrain.dist import World, host
from pretrain.errors import ConfigError
from pretrain.model.init import fill_parameter, init_weights
from pretrain.model.llama import Llama
from pretrain.model.loss import LossSums
from pretrain.parallel.engine import Held, Keep, State, model_inputs
from pretrain.parallel.optimizer_state import moments
from pretrain.parallel.swap_files import SwapFolder, prepare_swapping


def deepspeed_config(cfg: Config, accumulation: int, device: torch.device) -> dict[str, Any]:
    """The dictionary for deepspeed.initialize: what the tables say, and `[deepspeed]`, which the config has checked."""
    zero = dict(cfg.deepspeed.get("zero_optimization", {}))
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key) and device.type != "cuda":
            raise ConfigError(
                f"deepspeed.zero_optimization.{key}=true needs CUDA devices, but this is {device.type}; leave it out"
            )
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return (
        cfg.deepspeed
        | {
            "train_micro_batch_size_per_gpu": cfg.train.micro_batch_size,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": cfg.train.grad_clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # The memory-efficient linear would replace torch.nn.functional.linear for the whole process.
            "zero_optimization": {"memory_efficient_linear": False} | zero | {"stage": cfg.parallel.zero_stage},
        }
        | ({"torch_autocast": autocast} if cfg.precision.compute == "bf16" else {})
    )


def import_deepspeed(device: torch.device) -> Any:
    """The module, told which accelerator it has and to keep to warnings; ConfigError where it is not installed."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # a lone process, or srun's ranks, have none
    try:
        import deepspeed
    except ImportError:
        raise ConfigError(
            'parallel.engine="zero" needs the package deepspeed; pip install "llama-pretrain[zero]"'
        ) from None
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    return deepspeed


def load_op(name: str) -> bool:
    """Compile an op that DeepSpeed builds at its first use, one process at a time; False where it cannot be built here.

    torch guards a build with a file that a killed process leaves behind, and every later one then waits for ever. The
    lock here goes with its process, so a guard that is there while it is held is such a leftover.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    # Another ninja than before builds everything anew, and a shell that did not enter the environment may have none.
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + os.environ.get("PATH", "")
    builder = get_accelerator().create_op_builder(name)
    if builder is None or not builder.is_compatible():
        return False
    folder = Path(_get_build_directory(builder.NAME, verbose=False))
    with open(folder / "pretrain.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        builder.load(verbose=False)
    return True


def load_swap_ops() -> None:
    """The ops that read and write swap files; ConfigError where they cannot be built, which takes minutes once."""
    try:
        load_op("PinMemoryBuilder")  # the next one's own, of which it would wait for a leftover guard
        if load_op("AsyncIOBuilder"):
            return
        why = "its headers or a C++ compiler are not there"
    except (RuntimeError, OSError) as e:
        why = f"they did not build: {str(e).splitlines()[0]}"
    raise ConfigError(
        f'deepspeed.zero_optimization has device="nvme", which needs DeepSpeed\'s async_io op on {host()}, but {why}; '
        f'install libaio-dev (libaio-devel) and g++, or set device="cpu"'
    )


class ZeroEngine:
    def __init__(
        self,
        cfg: Config,
        build_model: Callable[[], Llama],
        build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        accumulation: int,
        world: World,
    ) -> None:
        self.cfg, self.device = cfg, world.device
        self.stage = cfg.parallel.zero_stage
        settings = deepspeed_config(cfg, accumulation, world.device)
        deepspeed = import_deepspeed(world.device)
        if world.device.type == "cpu":
            load_op("ShareMemCommBuilder")
        zero = settings["zero_optimization"]
        self._folders: dict[str, SwapFolder] = {}
        if swapping(zero):
            with torch.device("meta"):
                sizes = [param.numel() for param in build_model().parameters()]
            settings["zero_optimization"], self._folders = prepare_swapping(settings, sizes, world, load_swap_ops)
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_init_required=False)
        model = self._build(deepspeed, build_model, settings)
        self.engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model), config=settings, dist_init_required=False
        )
        self.model: Llama = model
        self.base = self.engine.optimizer.optimizer
        self._update = self.engine.optimizer._optimizer_step
        self.engine.optimizer._optimizer_step = self._update_if_kept
        self._keep: Keep | None = None
        self._kept: bool | None = None
        self._names = {name: p for name, p in model.named_parameters()}
        offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        where = "cpu" if offloaded else world.device.type  # copies for a checkpoint are as large as what was offloaded
        self._mesh = init_device_mesh(where, (dist.get_world_size(),), mesh_dim_names=("world",))
        self.state_is_copied = where == "cpu"
        self._make_moments()

    def _build(self, deepspeed: Any, build_model: Callable[[], Llama], settings: dict[str, Any]) -> Llama:
        cfg = self.cfg
        if self.stage < 3:
            with torch.device("meta"):
                model = build_model()
            model.to_empty(device=self.device)
            model.tie()
            init_weights(model, cfg.run.seed, cfg.model.n_layers)
            return model
        # fp32 by the settings, where no 16-bit mode is on; its own dtype argument gives bf16 on CPU (seen with 0.19).
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = build_model()
        for name, param in model.named_parameters():
            # Every rank computes the same whole tensor; rank 0's is the one that is partitioned.
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if dist.get_rank() == 0:
                    fill_parameter(name, param.data, param.data.shape, cfg.run.seed, cfg.model.n_layers)
        return model

    def forward(self, batch: Batch) -> LossSums:
        inputs = model_inputs(batch, mask_documents=self.cfg.data.mask_documents, kernel=self.model.kernel)
        return LossSums(*self.engine(batch.inputs, **inputs))

    def backward(self, loss: Tensor, *, last: bool, reduce: bool = False) -> None:
        assert last or not reduce, "refused by the config"
        # DeepSpeed averages over ranks; the loop has already divided by the global number of targets.
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def grad_squares(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {n: safe_get_full_grad(p).norm().square() / dist.get_world_size() for n, p in self._names.items()}

    def step(self, lr: float, keep: Keep | None = None) -> Tensor:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._keep, self._kept = keep, None
        self.engine.step()
        norm = self._norm()
        if keep is not None and self._kept is None:
            keep(norm)  # DeepSpeed has left the update out by itself
        return norm

    def _update_if_kept(self, group: int) -> None:
        """In DeepSpeed's place for the update of one group of parameters; it knows the norm of all by the first."""
        if self._kept is None:
            self._kept = self._keep is None or self._keep(self._norm())
        if self._kept:
            self._update(group)

    def _norm(self) -> Tensor:
        zero = self.engine.optimizer
        norm = torch.as_tensor(zero._global_grad_norm, dtype=torch.float32, device=self.device)
        # DeepSpeed leaves a non-finite update out; its signs for such a norm are -1 and infinity.
        return torch.full_like(norm, torch.nan) if zero.overflow else norm.where(norm >= 0, torch.nan)

    def state(self) -> State:
        """Copies of this rank's rows of every tensor; one whole tensor exists at a time."""
        out: State = {}
        for number, names in enumerate(self._groups()):
            with self._in_memory(number):
                for name in names:
                    param = self._names[name]
                    for prefix, key in self._tensors_of(name):
                        out[prefix] = self._rows(self._full(param, key), _shape(param))
        if "exp_avg" in moments(self.base):
            out["optim.step"] = next(self._flat_states())["step"].detach().clone().float()
        return out

    def held(self) -> Iterator[Held]:
        for number, flat in enumerate(self._flats()):
            with self._in_memory(number):
                yield Held(f"masters of group {number}", flat)
                for key in moments(self.base):
                    yield Held(f"{key} of group {number}", self.base.state[flat][key])
        # Stage 3 keeps small parameters gathered between steps; of the others nobody has a copy.
        whole = set(self._names.values() if self.stage < 3 else self.engine.optimizer.persistent_parameters)
        for name, param in self._names.items():
            if param in whole:
                yield Held(f"model.{name}", param.data, (None,))

    def load(self, state: State) -> None:
        if self.stage == 3:  # small parameters stay gathered between steps, and would keep what they were
            self.engine.optimizer.checkpoint_event_prologue()
        for number, names in enumerate(self._groups()):
            with self._in_memory(number, changed=True):
                for name in names:
                    for prefix, key in self._tensors_of(name):
                        if prefix not in state:
                            continue  # weights alone
                        value = state[prefix]
                        self._set(self._names[name], key, value.full_tensor() if isinstance(value, DTensor) else value)
                if self.stage == 3:  # from the masters to what is gathered for computing
                    self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if "optim.step" in state:
            for flat in self._flat_states():
                flat["step"].fill_(float(state["optim.step"]))
        if self.stage == 3:
            self.engine.optimizer.checkpoint_event_epilogue()

    def close(self) -> None:
        for folder in self._folders.values():
            folder.remove()

    def _tensors_of(self, name: str) -> list[tuple[str, str | None]]:
        named: list[tuple[str, str | None]] = [(f"model.{name}", None)]
        return named + [(f"optim.{key}.{name}", key) for key in moments(self.base)]

    def _make_moments(self) -> None:
        """Give the flat partitions zero moments, as torch's first step would."""
        for number, flat in enumerate(self._flats()):
            with self._in_memory(number, changed=True):
                state = self.base.state[flat]
                if "exp_avg" in moments(self.base):
                    state.setdefault("step", torch.zeros((), dtype=torch.float32, device=flat.device))
                for key in moments(self.base):
                    if state.get(key) is None:
                        state[key] = torch.zeros_like(flat, requires_grad=False)

    def _flats(self) -> list[Tensor]:
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _flat_states(self) -> Iterator[dict[str, Tensor]]:
        return (self.base.state[flat] for flat in self._flats())

    def _groups(self) -> list[list[str]]:
        """Names of the parameters by what is in memory together: at stage 3 DeepSpeed's groups, as `_flats`."""
        if self.stage < 3:
            return [list(self._names)]
        names = {param.ds_id: name for name, param in self._names.items()}  # type: ignore[attr-defined]
        return [[names[param.ds_id] for param in group] for group in self.engine.optimizer.fp16_groups]

    @contextmanager
    def _in_memory(self, number: int, *, changed: bool = False) -> Iterator[None]:
        """Around the use of a group's masters and moments, which may lie in swap files; written there if `changed`."""
        zero = self.engine.optimizer
        swapped = self.stage == 3 and zero._swappable_optimizer_subgroup(number)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if swapped and changed:
                zero._optimizer_states_and_gradient_swap_out(number)
            elif swapped:
                zero._release_swap_buffers(number)

    def _fragment(self, param: nn.Parameter, key: str | None) -> tuple[Tensor, int] | None:
        """This rank's flat piece of a master or moment, and its place in the flattened parameter."""
        if self.stage == 3:
            number, start, numel = self.engine.optimizer.grad_position[param.ds_id]  # type: ignore[attr-defined]
            flat = self._flats()[number]
            source = flat if key is None else self.base.state[flat][key]
            return source.narrow(0, start, numel), numel * dist.get_rank()
        mapping = getattr(param, "_hp_mapping", None)
        if mapping is None:
            return None
        flat = self._flats()[mapping.param_group_index]
        address = mapping.hp_fragment_address
        source = flat if key is None else self.base.state[flat][key]
        return source.narrow(0, address.start, address.numel), mapping.lp_fragment_address.start

    def _full(self, param: nn.Parameter, key: str | None) -> Tensor:
        piece = self._fragment(param, key)
        if self.stage == 3:
            assert piece is not None
            return self.engine.optimizer._fp32_state_allgather(param, piece[0])
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if piece is not None:
            whole.narrow(0, piece[1], piece[0].numel()).copy_(piece[0])
        dist.all_reduce(whole)
        return whole.view_as(param)

    def _set(self, param: nn.Parameter, key: str | None, value: Tensor) -> None:
        piece = self._fragment(param, key)
        if piece is not None:
            flat, start = piece
            mine = value.flatten()[start : start + flat.numel()]
            flat.data[: mine.numel()].copy_(mine)
            flat.data[mine.numel() :].zero_()  # a last rank's piece may be padded
        if key is None and self.stage < 3:
            param.data.copy_(value)

    def _rows(self, full: Tensor, shape: torch.Size) -> DTensor:
        """This rank's rows of a whole tensor, as fully_shard would lay them out over all ranks."""
        pieces = torch.chunk(full, self._mesh.size(), dim=0)
        rank = self._mesh.get_local_rank()
        local = pieces[rank] if rank < len(pieces) else full.new_empty((0, *shape[1:]))
        folder = self._folders.get("offload_optimizer")
        local = local.to(self._mesh.device_type, copy=True) if folder is None else folder.hold(local)
        return DTensor.from_local(
            local,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


def _shape(param: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(param, "ds_shape", param.shape))
