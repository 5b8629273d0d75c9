"""A checkpoint as a plain model on one device, with its tokenizer: what generate, eval and export start from.

Training never comes here: it reads checkpoints into sharded engines through `checkpoint`.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer, load_tokenizer
from pretrain.config import ModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.metrics.flops import parameter_counts
from pretrain.model.hf import end_ids
from pretrain.model.llama import Llama
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import read_state
from pretrain.untrusted import read_toml

TOKENIZER = "tokenizer"  # folder beside an imported model's files, or in a run
SPECIAL_IDS = "special_ids"  # in the meta data of an imported model, as its config.json had them


class SpecialIds(NamedTuple):
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None


class StoredModel(NamedTuple):
    """What a checkpoint says of its model; no weight is read yet."""

    path: Path
    model: ModelConfig
    meta: dict[str, Any]
    tokenizer: Tokenizer | None
    special: SpecialIds

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding that stand for a token; those above pad it."""
        return self.model.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError(f"{self.path}: no tokenizer is kept with this model; give one with --tokenizer PATH")
        return self.tokenizer


def open_model(
    path: str | Path, tokenizer: str | Path | None = None, say: Callable[[str], None] = lambda text: None
) -> StoredModel:
    """A checkpoint folder, or the newest whole one of a run folder, every byte of it verified."""
    where = find_checkpoint(Path(path), say)
    meta = folder.read_meta(where)
    try:
        model = ModelConfig.model_validate(meta["config"]["model"])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{where / folder.META}: no model can be made of it ({type(e).__name__}: {e})") from None
    stored = sum(entry["bytes"] for entry in folder.read_manifest(where).values())
    refuse_beyond(model, stored, where / folder.META, per_byte=1 / torch.float32.itemsize)
    found = Path(tokenizer) if tokenizer is not None else _tokenizer_of(where)
    loaded = None if found is None else load_tokenizer(found)
    if loaded is not None and loaded.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer {found} has {loaded.vocab_size} tokens, but the model only vocab_size={model.vocab_size}; "
            f"it is another model's"
        )
    return StoredModel(where, model, meta, loaded, _special_ids(meta, loaded, where / folder.META))


def refuse_beyond(model: ModelConfig, num_bytes: int, said_by: Path, *, per_byte: float) -> None:
    """CheckpointError before anything is made of sizes that a file claims and the weights beside it cannot have."""
    parameters = parameter_counts(model).total
    if parameters > num_bytes * per_byte:
        raise CheckpointError(
            f"{said_by} describes {parameters:,} parameters, but the files beside it have {num_bytes:,} bytes"
        )


def read_special_ids(fields: Any, said_by: Path) -> SpecialIds:
    """What `hf.special_ids` wrote; CheckpointError where a stranger's file has other things there."""
    try:
        ids = SpecialIds(fields.get("bos_token_id"), end_ids(fields.get("eos_token_id")), fields.get("pad_token_id"))
    except (AttributeError, TypeError, ValueError, OverflowError):
        ids = None
    if ids is None or any(one is not None and type(one) is not int for one in (*ids.eos_ids, ids.bos_id, ids.pad_id)):
        raise CheckpointError(f"{said_by}: no token ids can be made of {str(fields)[:200]}")
    return ids


def find_checkpoint(path: Path, say: Callable[[str], None]) -> Path:
    if (path / folder.MANIFEST).exists() or (path / folder.META).exists():
        problem = folder.verify(path)
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}; pretrain checkpoint list shows the run's other checkpoints")
        return path
    if folder.checkpoints_dir(path).is_dir():
        return folder.newest_whole(path, say)
    raise ConfigError(
        f"{path}: neither a checkpoint nor a run folder (it has no {folder.MANIFEST} and no checkpoints/)"
    )


def load_model(stored: StoredModel, device: torch.device, dtype: torch.dtype, **kwargs: Any) -> Llama:
    """The model with its weights in `dtype`, ready to run on `device`; kwargs are Llama's."""
    with torch.device("meta"):
        model = Llama(stored.model, activations=dtype, **kwargs)
    model.to_empty(device="cpu")
    model.tie()
    read_state(stored.path, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    return model.to(device=device, dtype=dtype).requires_grad_(False).eval()


def weight_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Canonical names and shapes of a model's weights; a tied head is no weight of its own."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Llama(model).named_parameters()}


def read_weights(stored: StoredModel, names: Iterable[str]) -> dict[str, Tensor]:
    """Some weights, whole, in fp32, on the CPU."""
    shapes = weight_shapes(stored.model)
    weights = {name: torch.empty(shapes[name]) for name in names}
    read_state(stored.path, {f"model.{name}": weight for name, weight in weights.items()}, part=True)
    return weights


def trained_on(stored: StoredModel) -> dict[str, Any]:
    """The `[data]` table of the run, or nothing for an imported model."""
    data = stored.meta["config"].get("data", {})
    return dict(data) if isinstance(data, dict) else {}


def _tokenizer_of(checkpoint: Path) -> Path | None:
    """Beside an imported model's weights, in the run, or in the data that the run was trained on."""
    run = checkpoint.resolve().parent.parent
    for candidate in (checkpoint / TOKENIZER, run / TOKENIZER):
        if candidate.is_dir():
            return candidate
    try:
        data = Path(read_toml(run / "config.toml")["data"]["sources"][0]["path"]) / TOKENIZER
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return data if data.is_dir() else None


def _special_ids(meta: dict[str, Any], tokenizer: Tokenizer | None, said_by: Path) -> SpecialIds:
    """As an imported model's files had them, else the tokenizer's."""
    kept = meta.get(SPECIAL_IDS)
    if kept is not None:
        return read_special_ids(kept, said_by)
    if tokenizer is None:
        return SpecialIds()
    return SpecialIds(tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id)
