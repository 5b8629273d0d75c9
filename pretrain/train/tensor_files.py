"""Tensors on disk: a safetensors file a rank and index.json, the storage that torch.distributed.checkpoint (DCP) gets.

DCP plans who writes and reads which piece; here bytes go to disk, hashed on the way, and come back through a memory
map, so that a rank reads no more than it needs. DCP's own index is a pickle; this one is JSON, and nothing in it is
believed before it agrees with the manifest's sizes.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pretrain import untrusted
from pretrain.errors import CheckpointError
from pretrain.train import checkpoint_folder as folder

INDEX = "index.json"
_LARGEST_INDEX = 1 << 29  # bytes; that of 1,000 tensors on 4,000 ranks is near it
_PIECE = 16 << 20  # bytes hashed and written at once
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Writer(StorageWriter):
    """Writes this rank's pieces into `path`; `files` is what the manifest has to say of them."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._name = path, f"rank-{rank:05d}.safetensors"
        self.files: dict[str, folder.Entry] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # Wide elements first, so that each tensor begins at a multiple of its element's size.
        items = sorted(plan.items, key=lambda item: -_dtype(item).itemsize)
        header: dict[str, Any] = {}
        end = 0
        for item in items:
            begin, end = end, end + math.prod(_chunk(item).sizes) * _dtype(item).itemsize
            key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            shape = list(_chunk(item).sizes)
            header[key] = {"dtype": _NAMES[_dtype(item)], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text

        def pieces() -> Iterator[Any]:
            yield head
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                yield from _bytes_of(tensor)

        self.files[self._name] = folder.write_file(self._path / self._name, pieces())
        results = [
            WriteResult(item.index, entry["data_offsets"][1] - entry["data_offsets"][0], (self._name, at))
            for item, entry in zip(items, header.values(), strict=True)
            for at in [len(head) + entry["data_offsets"][0]]
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = []
            for chunk in stored.chunks:
                file, at = places[MetadataIndex(name, chunk.offsets)]
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "at": at})
            tensors[name] = {
                "dtype": _NAMES[stored.properties.dtype],
                "shape": list(stored.size),
                "chunks": chunks,
            }
        self.files[INDEX] = folder.write_file(self._path / INDEX, [json.dumps({"tensors": tensors}).encode()])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Reads what `Writer`s of any number of ranks wrote; CheckpointError where the index is not what it should be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self) -> Metadata:
        sizes = {name: entry["bytes"] for name, entry in folder.read_manifest(self._path).items()}
        left = dict(sizes)
        try:
            index = untrusted.read_json(self._path / INDEX, _LARGEST_INDEX)
            places: dict[MetadataIndex, tuple[str, int]] = {}
            tensors: Any = {
                name: _checked(name, entry, sizes, left, places) for name, entry in index["tensors"].items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as e:
            raise CheckpointError(f"{self._path / INDEX}: not a checkpoint's index ({type(e).__name__}: {e})") from None
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
            assert isinstance(stored, TensorStorageMetadata)
            chunk = next(chunk for chunk in stored.chunks if chunk.offsets == item.storage_index.offset)
            file, at = self._metadata.storage_data[item.storage_index]
            dtype = stored.properties.dtype
            flat = self._mapped(file).narrow(0, at, math.prod(chunk.sizes) * dtype.itemsize)
            piece = flat.view(dtype).view(chunk.sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        self._files.clear()
        return _done(None)

    def _mapped(self, name: str) -> Tensor:
        if name not in self._files:
            path = self._path / name
            self._files[name] = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        return self._files[name]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _checked(
    name: str,
    entry: dict[str, Any],
    sizes: dict[str, int],
    left: dict[str, int],
    places: dict[MetadataIndex, tuple[str, int]],
) -> TensorStorageMetadata:
    """One tensor of the index; ValueError unless its pieces make it up and lie inside files of the manifest, of whose
    bytes `left` are not taken by other tensors."""
    dtype, shape, chunks, elements = _DTYPES[entry["dtype"]], torch.Size(_counts(entry["shape"])), [], 0
    for chunk in entry["chunks"]:
        offsets, extent = (torch.Size(_counts(chunk[key])) for key in ("offsets", "sizes"))
        file, [at] = str(chunk["file"]), _counts([chunk["at"]])
        if not len(offsets) == len(extent) == len(shape):
            raise ValueError(f"{name} has {len(shape)} dims, a piece of it {len(offsets)} and {len(extent)}")
        if any(o + n > whole for o, n, whole in zip(offsets, extent, shape, strict=True)):
            raise ValueError(f"{name} has a piece at {tuple(offsets)} of {tuple(extent)} outside its {tuple(shape)}")
        if file not in sizes:
            raise ValueError(f"it names {file!r}, which the manifest does not")
        place, num_bytes = MetadataIndex(name, offsets), math.prod(extent) * dtype.itemsize
        if at + num_bytes > sizes[file] or at % dtype.itemsize:
            raise ValueError(f"{name} at byte {at} of {file} does not fit into its {sizes[file]:,} bytes")
        left[file] -= num_bytes
        if left[file] < 0 or (num_bytes and place in places):
            raise ValueError(f"{name} takes bytes or has a place that another piece has")
        elements += math.prod(extent)
        chunks.append(ChunkStorageMetadata(offsets, extent))
        places[place] = (file, at)
    if elements != math.prod(shape):
        raise ValueError(f"{name} of {tuple(shape)} has pieces of {elements} elements in all")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} where counts belong")
    return values


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    return item.tensor_data.properties.dtype


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return (flat[begin : begin + _PIECE] for begin in range(0, len(flat), _PIECE))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
