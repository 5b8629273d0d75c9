"""Tensors into and out of checkpoint folders, through torch.distributed.checkpoint (DCP), on any number of ranks.

The state is canonical names to whole-shaped tensors, so either engine at any world size reads what another wrote; DCP
cuts and joins the pieces. A background save stalls the step only for a copy to host memory. Nothing is unpickled but
DCP's own index, through an allow-list. `checkpoint_folder` decides what makes a folder a checkpoint.
"""

import json
import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pretrain.dist import World, all_ranks_ok, broadcast_object, gather_objects
from pretrain.errors import CheckpointError
from pretrain.parallel.engine import State
from pretrain.train import checkpoint_folder as folder

Event = Callable[..., None]


class Checkpointer:
    """Saves of one run. Every method is collective: all ranks call it at the same step."""

    def __init__(self, run: Path, world: World, *, keep: int, keep_every: int, event: Event) -> None:
        self.run, self.world, self.keep, self.keep_every, self.event = run, world, keep, keep_every, event
        # Saves talk over a group of their own, so that a background save never meets the loop's collectives.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._saver = world._replace(agreement=self._group)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._host_meshes: dict[Any, DeviceMesh] = {}

    def save(self, step: int, state: State, meta: dict[str, Any], *, background: bool) -> None:
        """Write the checkpoint of `step`; with `background`, return once the state is copied to host memory."""
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
        host = {name: self._to_host(tensor) for name, tensor in state.items()}
        stall = time.perf_counter() - start
        self._thread = threading.Thread(
            target=self._guarded, args=(step, host, meta, rng, start, stall), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def writing(self) -> bool:
        """Whether a background save was started that `wait` has not yet seen through; the same on every rank."""
        return self._thread is not None

    def wait(self) -> None:
        """Finish the save in flight and raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
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
        rank = self.world.rank
        dcp.save(state, storage_writer=FileSystemWriter(where), process_group=self._group)
        error, mine = None, {}
        try:
            rng_file = f"rng-{rank:05d}.safetensors"
            save_file(rng, where / rng_file)
            _sync(where / rng_file)
            names = [p.name for p in where.iterdir() if p.name.startswith(f"__{rank}_")] + [rng_file]
            if self.world.first:
                folder.write_synced(where / folder.META, json.dumps(meta, indent=1) + "\n")
                names += [".metadata", folder.META]
            mine = folder.describe_files(where, names)
        except OSError as e:
            error = e
        all_ranks_ok(error, self._saver, CheckpointError)
        files = {name: entry for part in gather_objects(mine, self._saver) for name, entry in part.items()}
        if self.world.first:
            folder.commit(self.run, step, files)
            removed = folder.prune(self.run, self.keep, self.keep_every)
            seconds = time.perf_counter() - start
            self.event(
                "save",
                step,
                seconds=round(seconds, 3),
                stall_seconds=round(stall or seconds, 3),
                bytes=sum(entry["bytes"] for entry in files.values()),
                removed=[path.name for path in removed],
            )
        if self._group is not None:
            dist.barrier(self._group)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        mesh = tensor.device_mesh
        key = (tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
        if key not in self._host_meshes:
            on_cpu = mesh.device_type == "cpu"
            self._host_meshes[key] = mesh if on_cpu else init_device_mesh("cpu", tuple(mesh.shape))
        return DTensor.from_local(
            tensor.to_local().detach().to("cpu", copy=True),
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


def read_state(path: Path, state: State) -> None:
    """Fill the tensors of `state` in place from a checkpoint, resharding as needed; CheckpointError if names differ."""
    reader = SafeReader(path)
    _check_names(reader.read_metadata(), state, path)
    with _quiet_alone():
        dcp.load(state, storage_reader=reader)


def load_model_weights(path: Path) -> State:
    """The fp32 weights of a checkpoint by parameter name, whole, on the CPU, for a single process."""
    stored = SafeReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    read_state(path, state)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def write_weights(path: Path, weights: State, meta: dict[str, Any]) -> None:
    """Make a checkpoint folder that holds weights alone (for `init.from`, `pretrain export`), from a single process."""
    path.mkdir(parents=True)
    with _quiet_alone():
        dcp.save({f"model.{name}": tensor for name, tensor in weights.items()}, storage_writer=FileSystemWriter(path))
    folder.write_synced(path / folder.META, json.dumps(meta, indent=1) + "\n")
    names = sorted(p.name for p in path.iterdir())
    files = folder.describe_files(path, names)
    text = json.dumps({"format": folder.FORMAT, "step": meta["step"], "files": files}, indent=1)
    folder.write_synced(path / folder.MANIFEST, text + "\n")
    folder.write_synced(path / folder.MARKER, "")
    folder.sync_folder(path)


class SafeReader(FileSystemReader):
    """DCP's reader, but its index is unpickled through an allow-list and may name only this folder's files."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path)
        known = folder.read_manifest(path)
        try:
            with open(path / ".metadata", "rb") as f:
                metadata = _AllowList(f).load()
            for place in metadata.storage_data.values():
                if place.relative_path not in known:
                    raise pickle.UnpicklingError(f"it names {place.relative_path!r}, which the manifest does not")
            for name, entry in metadata.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{name} is no tensor")
        except Exception as e:
            raise CheckpointError(f"{path / '.metadata'}: not a checkpoint's index ({type(e).__name__}: {e})") from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _AllowList(pickle.Unpickler):
    _CLASSES: ClassVar[dict[str, set[str]]] = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"},
        "pathlib": {"PosixPath", "PurePosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's index")
        return super().find_class(module, name)


def _check_names(metadata: Metadata, state: State, path: Path) -> None:
    stored = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    missing = sorted(set(state) - set(stored))
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of this run, first {missing[0]}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != stored[name]:
            raise CheckpointError(f"{path}: {name} is {stored[name]} there and {tuple(tensor.shape)} in this run")


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
    file = path / f"rng-{rank:05d}.safetensors"
    if file.name not in folder.read_manifest(path):
        return False
    state = load_file(file)
    torch.set_rng_state(state["torch"])
    keys = state["numpy"].numpy()
    np.random.set_state(("MT19937", keys[:-1].astype(np.uint32), int(keys[-1]), 0, 0.0))
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """DCP warns when it finds no process group; a command of one process has none and needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _sync(path: Path) -> None:
    with open(path, "rb") as f:
        os.fsync(f.fileno())
