"""Checkpoints to Hugging Face folders and back: safetensors, config.json, generation_config.json, tokenizer.

`model.hf` knows names and layouts; here files are read and written. Both ways the result is whole or absent: it is
written aside and renamed. Exports hold one file's worth of weights in memory at a time, imports the whole model.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.tokenizer_json import token_text, tokenizer_json
from pretrain.config import ModelConfig
from pretrain.errors import ConfigError
from pretrain.model.hf import from_hf, from_hf_config, hf_name, special_ids, to_hf, to_hf_config
from pretrain.train import checkpoint_folder as folder
from pretrain.train.checkpoint import write_weights
from pretrain.train.stored_model import (
    SPECIAL_IDS,
    TOKENIZER,
    StoredModel,
    read_special_ids,
    read_weights,
    refuse_beyond,
    weight_shapes,
)
from pretrain.untrusted import read_json

MAX_SHARD_BYTES = 5_000_000_000
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Stored = dict[str, tuple[Path, tuple[int, ...]]]
"""Tensor name -> the file that has it, its shape."""
# Tables that old exports stored and that are computed here.
_NO_WEIGHT = ("rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")


class Exported(NamedTuple):
    files: int  # of weights
    num_bytes: int
    vocab_size: int
    tokenizer: str | None  # how it was written; None: the checkpoint has none


def export_model(
    stored: StoredModel,
    out: Path,
    *,
    dtype: Literal["fp32", "bf16"] = "fp32",
    keep_padding: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write `out`, a folder that transformers loads strictly.

    Rows of the embedding and head above the tokenizer's size are no tokens and are left out, unless `keep_padding`.
    (In training they are rivals in the softmax like any row: they are never a target, so they learn to be unlikely.)
    """
    model = stored.model
    rows = model.vocab_size if keep_padding else stored.vocab_size
    sizes = {name: _exported_bytes(name, shape, rows, dtype) for name, shape in weight_shapes(model).items()}
    plan = plan_files(sizes, max_shard_bytes)
    with whole_folder(out, sum(sizes.values())) as aside:
        where: dict[str, str] = {}
        for number, names in enumerate(plan, start=1):
            file = _WEIGHTS if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
            tensors = {}
            for name, weight in read_weights(stored, names).items():
                weight = weight[:rows] if _has_vocab_rows(name) else weight
                tensors[hf_name(name)] = to_hf(name, weight, model).to(_DTYPES[dtype]).contiguous()
            save_file(tensors, aside / file, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, file)
        if len(plan) > 1:
            _write_json(aside / _INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})
        written = None if stored.tokenizer is None else write_tokenizer(stored.tokenizer, model, aside)
        config = to_hf_config(
            model,
            vocab_size=rows,
            dtype=str(_DTYPES[dtype]).removeprefix("torch."),
            bos_id=stored.special.bos_id,
            eos_ids=stored.special.eos_ids,
            pad_id=stored.special.pad_id,
        )
        _write_json(aside / "config.json", config)
        _write_json(aside / "generation_config.json", special_ids(*stored.special))
    return Exported(len(plan), sum(sizes.values()), rows, written)


def plan_files(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, cut into files of at most `max_bytes`; one larger tensor has a file of its own."""
    plan: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not plan or size > room:
            plan.append([])
            room = max_bytes
        plan[-1].append(name)
        room -= size
    return plan


def write_tokenizer(tokenizer: Tokenizer, model: ModelConfig, target: Path) -> str:
    """The tokenizer's files, and what transformers needs beside them; says which form it has."""
    tokenizer.save(target)
    config_path = target / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    text = tokenizer_json(tokenizer)
    form = "tokenizer files as they were"
    if text is not None:
        (target / "tokenizer.json").write_text(text, encoding="utf-8")
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the one that follows tokenizer.json to the letter
        form = f"tokenizer.json, equal to the {tokenizer.kind} model beside it"
    config.setdefault(
        "tokenizer_class", "GPT2Tokenizer" if "vocab.json" in tokenizer.files else "PreTrainedTokenizerFast"
    )
    config.setdefault("model_max_length", model.max_seq_len)
    config.setdefault("clean_up_tokenization_spaces", False)
    for key, token_id in (
        ("bos_token", tokenizer.bos_id),
        ("eos_token", tokenizer.eos_id),
        ("pad_token", tokenizer.pad_id),
    ):
        if token_id is not None and token_id in tokenizer.special_tokens.values():
            config.setdefault(key, token_text(tokenizer, token_id))
    _write_json(config_path, config)
    return form


def import_model(source: Path, out: Path, say: Callable[[str], None] = lambda text: None) -> ModelConfig:
    """Make `out` a checkpoint (weights in fp32, step 0, tokenizer) of a Hugging Face folder with safetensors."""
    raw = _read_json(source / "config.json")
    model = from_hf_config(raw, str(source / "config.json"))
    stored = _stored_tensors(source)
    num_bytes = sum(path.stat().st_size for path in {path for path, _ in stored.values()})
    # What is less absurd is refused below, with the names that are missing.
    refuse_beyond(model, num_bytes, source / "config.json", per_byte=100)
    shapes = weight_shapes(model)
    with whole_folder(out, sum(4 * shape.numel() for shape in shapes.values())) as aside:
        weights = _read_folder(source, stored, model, shapes)
        aside.rmdir()  # write_weights makes it
        meta: dict[str, Any] = {
            "step": 0,
            "rows_consumed": 0,
            "tokens": 0,
            "targets": 0,
            "imported_from": str(source),
            "config": {"model": model.model_dump(mode="json", exclude_none=True)},
            SPECIAL_IDS: _read_special_ids(source, raw),
        }
        write_weights(aside, weights, meta)
        try:
            tokenizer = load_tokenizer(source)
        except DataError as e:
            say(f"no tokenizer was imported: {e}")
        else:
            tokenizer.save(aside / TOKENIZER)
    return model


@contextmanager
def whole_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """A folder beside `out` to write into, renamed to `out` at the end; nothing stays of a failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not empty; choose another folder or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out} cannot be made: {e}") from None
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    folder.require_room(out.parent, num_bytes + (1 << 20))
    aside.mkdir()
    try:
        yield aside
        if out.exists():
            out.rmdir()
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    folder.sync_folder(out.parent)


def _stored_tensors(source: Path) -> Stored:
    stored: Stored = {}
    for path in _weight_files(source):
        try:
            with safe_open(path, "pt") as f:
                for name in f.keys():  # noqa: SIM118 (it has no iterator)
                    if name in stored:
                        raise ConfigError(f"{path}: {name} is in {stored[name][0].name} as well")
                    stored[name] = (path, tuple(f.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"{path}: cannot be read as safetensors: {e}") from None
    return stored


def _read_folder(source: Path, stored: Stored, model: ModelConfig, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """All weights of a folder, in fp32, by our names; every name and shape is checked before any is read."""
    wanted = {hf_name(name): name for name in shapes}
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted and not name.endswith(_NO_WEIGHT)]
    tied_head = model.tie_embeddings and extra == ["lm_head.weight"]
    if missing or (extra and not tied_head):
        raise ConfigError(
            f"{source}: weights and config.json do not belong together: {len(missing)} missing{_first(missing)}, "
            f"{len(extra)} unknown{_first(extra)}"
        )
    for theirs, ours in wanted.items():
        if stored[theirs][1] != tuple(shapes[ours]):
            raise ConfigError(
                f"{stored[theirs][0]}: {theirs} is {stored[theirs][1]}, but config.json makes it {tuple(shapes[ours])}"
            )
    weights = {ours: from_hf(ours, _read(stored[theirs][0], theirs).float(), model) for theirs, ours in wanted.items()}
    if tied_head and not torch.equal(
        _read(stored["lm_head.weight"][0], "lm_head.weight").float(), weights["tok_embeddings.weight"]
    ):
        raise ConfigError(
            f"{source}: config.json says tie_word_embeddings=true, but lm_head.weight is not the embedding; "
            f"set tie_word_embeddings=false there to keep both"
        )
    return {name: weight.contiguous() for name, weight in weights.items()}


def _weight_files(source: Path) -> list[Path]:
    if (source / _INDEX).is_file():
        mapped = _read_json(source / _INDEX).get("weight_map")
        names = sorted({str(name) for name in mapped.values()}) if isinstance(mapped, dict) else []
        strange = [name for name in names if Path(name).name != name]
        if strange:
            raise ConfigError(f"{source / _INDEX}: {strange[0]!r} is no file of this folder")
        gone = [name for name in names if not (source / name).is_file()]
        if gone or not names:
            raise ConfigError(f"{source / _INDEX}: {len(gone)} of its {len(names)} files are missing{_first(gone)}")
        return [source / name for name in names]
    if (source / _WEIGHTS).is_file():
        return [source / _WEIGHTS]
    raise ConfigError(
        f"{source}: no {_WEIGHTS} and no {_INDEX}; pickled weights are not read, "
        f"save them again with save_pretrained(..., safe_serialization=True)"
    )


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as f:
        tensor: Tensor = f.get_tensor(name)
        return tensor


def _read_special_ids(source: Path, config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json goes before config.json, as in transformers; absent fields there mean Llama 2's."""
    path = source / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    found = {key: generation.get(key, config.get(key, default)) for key, default in defaults.items()}
    return special_ids(*read_special_ids(found, path if generation else source / "config.json"))


def _exported_bytes(name: str, shape: torch.Size, rows: int, dtype: str) -> int:
    count = shape.numel() // shape[0] * rows if _has_vocab_rows(name) else shape.numel()
    return count * _DTYPES[dtype].itemsize


def _has_vocab_rows(name: str) -> bool:
    return name in ("tok_embeddings.weight", "output.weight")


def _first(names: list[str]) -> str:
    return f" (first {names[0]})" if names else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face model folder has one") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is wanted, this is a {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    folder.write_file(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])
