"""Config files: TOML and `section.key=value` overrides into a `Config`, with errors to act on, and back to TOML.

The one place that reads and writes config files. Knows the tables of `config` only through pydantic.
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from pretrain.config import Config, inactive_keys
from pretrain.errors import ConfigError
from pretrain.untrusted import read_toml

# What other frameworks call our keys.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_steps": "train.steps",
    "batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size (accumulation follows from it)",
    "hidden_size": "model.d_model",
    "intermediate_size": "model.d_ff",
    "num_hidden_layers": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "max_grad_norm": "train.grad_clip",
    "max_norm": "train.grad_clip",
    "warmup": "schedule.warmup_steps",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file with overrides; ConfigError names the key, its value, the nearest key and the mend."""
    path = Path(path)
    try:
        raw = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_nearest_file(path)}") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not valid TOML: {e} (text needs quotes; flags are true or false)") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read as a config file: {e}") from None
    for override in overrides:
        _apply(raw, override)
    try:
        return parse_config(raw)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def parse_config(raw: dict[str, Any]) -> Config:
    """A `Config` from nested plain values."""
    try:
        return Config.model_validate(raw)
    except ValidationError as e:
        raise ConfigError("; ".join(_explain(error) for error in e.errors())) from None


def dump_config(cfg: Config) -> str:
    """The resolved config as TOML: every active key with its value; reading it gives the same config."""
    values = cfg.model_dump(by_alias=True, exclude_none=True)
    for table, key, _ in inactive_keys(cfg):
        field = type(getattr(cfg, table)).model_fields[key]
        values[table].pop(field.alias or key, None)
    return tomli_w.dumps({table: content for table, content in values.items() if content})


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in nested plain values; the text is read as the field's type wants it."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {part} is no table")
    table[parts[-1]] = text if _wants_text(parts) else _toml_value(text)


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # the field's own check says what is wanted


def _wants_text(parts: Sequence[str]) -> bool:
    """Whether the field takes text, so that a run named 08 or 1e3 stays as written."""
    table: Any = Config
    for part in parts:
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return False
        field = next((f for k, f in table.model_fields.items() if part in (k, f.alias)), None)
        if field is None:
            return False
        table = field.annotation
    options = typing.get_args(table) if typing.get_origin(table) in (typing.Union, types.UnionType) else (table,)
    text = str in options or any(
        typing.get_origin(o) is typing.Literal and isinstance(typing.get_args(o)[0], str) for o in options
    )
    return bool(text)


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "config"
    value, kind = error.get("input"), error["type"]
    if kind == "extra_forbidden":
        return f"{where}={value!r}: unknown key; {_nearest_key(error['loc'])}"
    if kind == "missing":
        mend = "set it"
        if error["loc"][0] == "model":
            mend = 'set model.preset (for example "llama3_8b") or all the sizes'
        return f"{where} is missing; {mend}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error" and isinstance(value, dict):
        return f"{where}: {message}"
    return f"{where}={value!r}: {message[:1].lower() + message[1:]}"


def _nearest_key(loc: Sequence[Any]) -> str:
    """Name the likeliest intended key: near in spelling in the same table, else the same word in another one."""
    table: Any = Config
    for part in (p for p in loc[:-1] if not isinstance(p, int)):
        field = table.model_fields.get(part) if isinstance(table, type) and issubclass(table, BaseModel) else None
        table = field.annotation if field else None
        for option in typing.get_args(table):
            if isinstance(option, type) and issubclass(option, BaseModel):
                table = option
    prefix = ".".join(str(part) for part in loc[:-1] if not isinstance(part, int))
    if not (isinstance(table, type) and issubclass(table, BaseModel)):
        return f"[{prefix}] is no table of this program"
    keys = [f.alias or k for k, f in table.model_fields.items()]
    if loc[-1] in _OTHER_NAMES:
        return f"did you mean {_OTHER_NAMES[loc[-1]]}?"
    near = difflib.get_close_matches(str(loc[-1]), keys, 1, 0.6)
    if near:
        return f"did you mean {'.'.join(filter(None, (prefix, near[0])))}?"
    everywhere = {
        f.alias or k: f"{t}.{f.alias or k}"
        for t, tf in Config.model_fields.items()
        if isinstance(tf.annotation, type) and issubclass(tf.annotation, BaseModel)
        for k, f in tf.annotation.model_fields.items()
    }
    if loc[-1] in _OTHER_NAMES:
        return f"did you mean {_OTHER_NAMES[loc[-1]]}?"
    far = difflib.get_close_matches(str(loc[-1]), everywhere, 1, 0.75)
    if far:
        return f"did you mean {everywhere[far[0]]}?"
    return f"the keys {'of [' + prefix + ']' if prefix else 'at the top'} are {', '.join(keys)}"


def _nearest_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    names = sorted(str(p) for p in folder.glob("*.toml"))
    near = difflib.get_close_matches(str(path), names, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""
