"""Tensors into and out of checkpoint folders, through torch.distributed.checkpoint (DCP), on any number of ranks.

The state is canonical names to whole-shaped tensors, so either engine at any world size reads what another wrote; DCP
plans the pieces, `tensor_files` stores them. A background save stalls the step only for a copy to host memory that is
used again by the next. `checkpoint_folder` decides what makes a folder a checkpoint.
"""

import json
import logging
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pretrain.dist import World, agree_max, all_ranks_ok, broadcast_object, gather_objects
from pretrain.errors import CheckpointError
from pretrain.parallel.engine import State
from pretrain.train import checkpoint_folder as folder
from pretrain.train.tensor_files import Reader, Writer

Event = Callable[..., None]
_LARGEST_RNG = 1 << 20  # bytes


class Checkpointer:
    """Saves of one run. Every method is collective: all ranks call it at the same step."""

    def __init__(self, run: Path, world: World, *, keep: int, keep_every: int, event: Event) -> None:
        self.run, self.world, self.keep, self.keep_every, self.event = run, world, keep, keep_every, event
        # Saves talk over a group of their own, so that a background save never meets the loop's collectives.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._saver = world._replace(agreement=self._group)
        self._thread: threading.Thread | None = None
        self._removal: threading.Thread | None = None  # of checkpoints that are out of the list
        self._error: BaseException | None = None
        self._host_meshes: dict[Any, DeviceMesh] = {}
        self._staged: dict[str, Tensor] = {}  # host memory that background saves copy into, by name

    def save(self, step: int, state: State, meta: dict[str, Any], *, background: bool, copied: bool = False) -> None:
        """Write the checkpoint of `step`; with `background`, return once the state is copied to host memory, which it
        is already where `copied`."""
        self.wait()
        start = time.perf_counter()
        needed = int(sum(t.numel() * t.element_size() for t in state.values()) * 1.01) + (1 << 20)
        error = None
        if self.world.first:
            try:
                folder.require_room(folder.checkpoints_dir(self.run), needed)
                folder.partial_dir(self.run, step).mkdir()
            except (OSError, CheckpointError) as e:
                error = e
        all_ranks_ok(error, self.world, CheckpointError)
        rng = _rng_state()
        if not background:
            self._write(step, state, meta, rng, start)
            return
        host = state if copied else {name: self._to_host(name, tensor) for name, tensor in state.items()}
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        stall = time.perf_counter() - start
        self._thread = threading.Thread(
            target=self._guarded, args=(step, host, meta, rng, start, stall), name="checkpoint", daemon=True
        )
        self._thread.start()

    def writing(self) -> bool:
        """Whether any rank still writes a background save; collective."""
        mine = self._thread is not None and self._thread.is_alive()
        return agree_max(int(mine), self.world) > 0

    def wait(self) -> None:
        """Finish the save in flight, and what it has yet to delete, and raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._removal is not None:
            self._removal.join()
            self._removal = None
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise a background save's error in the loop; cheap, local, called every step."""
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"the save in the background failed: {error}") from error

    def _guarded(self, *args: Any) -> None:
        try:
            self._write(*args)
        except BaseException as e:
            self._error = e

    def _write(
        self, step: int, state: State, meta: dict[str, Any], rng: dict[str, Tensor], start: float, stall: float = 0.0
    ) -> None:
        where = folder.partial_dir(self.run, step)
        mine = _write_tensors(where, state, self.world.rank, self._group)
        error = None
        try:
            rng_file = _rng_file(self.world.rank)
            mine[rng_file] = folder.write_file(where / rng_file, [safetensors_bytes(rng)])
            if self.world.first:
                mine[folder.META] = _write_meta(where, meta)
        except OSError as e:
            error = e
        all_ranks_ok(error, self._saver, CheckpointError)
        files = {name: entry for part in gather_objects(mine, self._saver) for name, entry in part.items()}
        if self.world.first:
            try:
                folder.commit(self.run, step, files)
                retired = folder.retire(self.run, self.keep, self.keep_every, until=step)
                self._removal = threading.Thread(target=_remove, args=(retired,), name="removal", daemon=True)
                self._removal.start()
                seconds = time.perf_counter() - start
                self.event(
                    "save",
                    step,
                    seconds=round(seconds, 3),
                    stall_seconds=round(stall or seconds, 3),
                    bytes=sum(entry["bytes"] for entry in files.values()),
                    removed=[path.stem for path in retired],
                )
            except OSError as e:
                error = e
        all_ranks_ok(error, self._saver, CheckpointError)

    def _to_host(self, name: str, tensor: Tensor) -> Tensor:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        host = self._staged.get(name)
        if host is None:
            host = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._staged[name] = host
        host.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return host
        mesh = tensor.device_mesh
        key = (tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
        if key not in self._host_meshes:
            on_cpu = mesh.device_type == "cpu"
            self._host_meshes[key] = mesh if on_cpu else init_device_mesh("cpu", tuple(mesh.shape))
        return DTensor.from_local(
            host,
            self._host_meshes[key],
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def choose(run: Path, world: World, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, the same on every rank, every byte of it verified (the ranks share the reading).

    None: nothing was ever committed. CheckpointError: there are checkpoints but none is whole.
    """
    found = broadcast_object(folder.list_checkpoints(run) if world.first else None, world)
    newest = ""
    for candidate in reversed(found):
        problem = candidate.problem or verify_together(candidate.path, world)
        if problem is None:
            return Path(candidate.path)
        say(f"checkpoint {candidate.path.name} is passed over: {problem}")
        newest = newest or f"{candidate.path.name}: {problem}"
    if found:
        raise CheckpointError(
            f"{run}: none of {len(found)} checkpoints is whole (newest: {newest}); "
            f"restore one, or start elsewhere: this run is not begun again from step 0 over them"
        )
    return None


def verify_together(path: Path, world: World) -> str | None:
    """`checkpoint_folder.verify`, each rank reading its share of the files; the same answer on every rank."""
    problem = broadcast_object(folder.problem_at_a_glance(path) if world.first else None, world)
    if problem is None:
        files = sorted(folder.read_manifest(path).items())
        mine = (folder.problem_in_file(path, name, entry) for name, entry in files[world.rank :: world.size])
        problem = next(filter(None, gather_objects(next(filter(None, mine), None), world)), None)
    return problem


def read_state(path: Path, state: State, *, part: bool = False) -> None:
    """Fill the tensors of `state` in place from a checkpoint, resharding as needed.

    CheckpointError if names or shapes differ; `state` is a whole model, or a `part` of one.
    """
    reader = Reader(path)
    _check_names(reader.read_metadata(), state, path, part=part)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet_alone():
        dcp.load(state, storage_reader=reader, planner=planner)


def read_whole(path: Path, prefix: str = "") -> State:
    """The tensors of a checkpoint whose names begin with `prefix`, whole, on the CPU, for a single process."""
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in Reader(path).read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    read_state(path, state)
    return state


def load_model_weights(path: Path) -> State:
    """The fp32 weights of a checkpoint by parameter name."""
    return {name.removeprefix("model."): tensor for name, tensor in read_whole(path, "model.").items()}


def write_weights(path: Path, weights: State, meta: dict[str, Any]) -> None:
    """Make a checkpoint folder that holds weights alone (for `init.from`, `pretrain export`), from a single process."""
    path.mkdir(parents=True)
    files = _write_tensors(path, {f"model.{name}": tensor for name, tensor in weights.items()})
    files[folder.META] = _write_meta(path, meta)
    folder.seal(path, meta["step"], files)


def _write_tensors(path: Path, state: State, rank: int = 0, group: Any = None) -> dict[str, folder.Entry]:
    writer = Writer(path, rank)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet_alone():
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as e:  # the same on every rank
        first, (error, _) = min(e.failures.items())
        raise CheckpointError(f"rank {first} could not write into {path}: {error}") from error
    return writer.files


def _write_meta(path: Path, meta: dict[str, Any]) -> folder.Entry:
    return folder.write_file(path / folder.META, [(json.dumps(meta, indent=1) + "\n").encode()])


def _check_names(metadata: Metadata, state: State, path: Path, *, part: bool) -> None:
    stored = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    missing = sorted(set(state) - set(stored))
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of this run, first {missing[0]}")
    extra = sorted(name for name in set(stored) - set(state) if name.startswith("model."))
    if extra and not part:
        raise CheckpointError(
            f"{path} has {len(extra)} tensors that this run's model would drop: {', '.join(extra[:3])}"
            f"{', ...' if len(extra) > 3 else ''}; give [model] the checkpoint's sizes (n_layers, tie_embeddings)"
        )
    for name, tensor in state.items():
        if tuple(tensor.shape) != stored[name]:
            raise CheckpointError(f"{path}: {name} is {stored[name]} there and {tuple(tensor.shape)} in this run")


def _remove(paths: list[Path]) -> None:
    """No step waits for it, and none stops for it: what stays is deleted by the next start."""
    for path in paths:
        try:
            shutil.rmtree(path)
        except OSError as e:
            logging.getLogger(__name__).warning("%s could not be removed: %s", path, e)


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _rng_state() -> dict[str, Tensor]:
    """Random state of this rank: torch's, CUDA's, numpy's and Python's."""
    _, keys, position, _, _ = np.random.get_state(legacy=True)
    python = random.getstate()
    out = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.concatenate([np.asarray(keys, np.int64), [position]])),
        "python": torch.tensor(python[1], dtype=torch.int64),
    }
    if torch.cuda.is_available():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def restore_rng(path: Path, rank: int) -> bool:
    """Give this rank its random state back; False where the checkpoint was written by fewer ranks."""
    file = path / _rng_file(rank)
    entry = folder.read_manifest(path).get(file.name)
    if entry is None:
        return False
    if entry["bytes"] > _LARGEST_RNG:
        raise CheckpointError(f"{file}: not a random state, which has {_LARGEST_RNG:,} bytes at most")
    try:
        state = load_file(file)
        torch.set_rng_state(state["torch"])
        keys = state["numpy"].numpy()
        np.random.set_state(("MT19937", keys[:-1].astype(np.uint32), int(keys[-1]), 0, 0.0))
        random.setstate((3, tuple(state["python"].tolist()), None))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (SafetensorError, RuntimeError, LookupError, ValueError, TypeError, OverflowError) as e:
        raise CheckpointError(f"{file}: not a random state ({type(e).__name__}: {e})") from None
    return True


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """DCP warns when it finds no process group; a command of one process has none and needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
