"""What may differ between a checkpoint and the run that resumes from it. Pure functions on plain values, no torch."""

import difflib
from typing import Any

from pretrain.errors import ConfigError

# Changing these makes it another model or another stream of data: refused.
_FIXED = ("model", "data", "run.seed", "loss.z_loss", "optimizer.name")
# These bend the course of the run: allowed only by name.
_BY_NAME = ("train", "optimizer", "schedule", "precision")
# These say how, not what, to compute: always free.
_FREE = ("model.attention", "data.prefetch", "data.on_bad_shard", "train.micro_batch_size")
# Compared by what of them decided the rows so far: a data set may move, later stages and skipped ranges may be added.
_FINGERPRINTED = ("data.sources", "data.stages", "data.skip")


def compare_configs(
    before: dict[str, Any], now: dict[str, Any], allowed: set[str], *, fingerprints: tuple[str, str]
) -> dict[str, tuple[Any, Any]]:
    """Changes of course allowed by name: key -> (value before, now); ConfigError for any other that matters."""
    old, new = flatten(before), flatten(now)
    changed: dict[str, tuple[Any, Any]] = {}
    refused, unnamed = [], []
    for key in sorted(old.keys() | new.keys()):
        pair = (old.get(key), new.get(key))
        if pair[0] == pair[1] or key in _FREE or _under(key, _FINGERPRINTED):
            continue
        if _under(key, _FIXED):
            refused.append(f"{key}: {pair[0]!r} -> {pair[1]!r}")
        elif _under(key, _BY_NAME):
            (changed.__setitem__(key, pair) if key in allowed else unnamed.append(f"{key}: {pair[0]!r} -> {pair[1]!r}"))
    if fingerprints[0] != fingerprints[1]:
        refused.append(f"contents of data.sources: fingerprint {fingerprints[0][:12]} -> {fingerprints[1][:12]}")
    if refused:
        raise ConfigError(
            f"this run's checkpoint was trained otherwise: {'; '.join(refused)}; "
            f"restore these, or start another run with [init] from this checkpoint"
        )
    if unnamed:
        keys = ",".join(text.split(":")[0] for text in unnamed)
        raise ConfigError(
            f"this would bend the course of the run: {'; '.join(unnamed)}; "
            f"restore these, or say so with --allow-change {keys}"
        )
    return changed


def check_allowed(allowed: set[str], now: dict[str, Any]) -> None:
    """ConfigError for what `--allow-change` names and no start can change."""
    known = [key for key in flatten(now) if _under(key, _BY_NAME) and not _under(key, _FIXED)]
    for key in sorted(allowed - set(known)):
        word = key.rpartition(".")[2]
        near = [name for name in known if name.endswith(f".{word}")] or difflib.get_close_matches(key, known, n=1)
        mend = f"did you mean {near[0]}?" if near else f"it takes keys of {', '.join(_BY_NAME)}"
        raise ConfigError(f"--allow-change {key}: no setting that may change on resume; {mend}")


def flatten(tables: dict[str, Any]) -> dict[str, Any]:
    """{"train": {"steps": 5}} -> {"train.steps": 5}."""
    return {
        f"{table}.{key}": value
        for table, content in tables.items()
        if isinstance(content, dict)
        for key, value in content.items()
    }


def _under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)
