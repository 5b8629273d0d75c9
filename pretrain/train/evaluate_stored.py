"""Validation of a checkpoint outside of a run: one process, one device, the same sums as in training."""

from pathlib import Path

import torch
from torch import nn

from pretrain.config import DataConfig, Source
from pretrain.data.loader import Batch, Validation
from pretrain.dist import World
from pretrain.errors import ConfigError
from pretrain.model.attention import choose_kernel
from pretrain.model.loss import LossSums
from pretrain.parallel.engine import model_inputs
from pretrain.train.evaluate import evaluate
from pretrain.train.stored_model import StoredModel, load_model, trained_on

LOSS_CHUNKS = 8


def evaluate_stored(
    stored: StoredModel,
    data: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seq_len: int | None = None,
    micro_batch_size: int = 4,
) -> dict[str, float]:
    """val_loss, val_bits_per_byte and val_targets on a data set's validation rows, cut as the run cut its own."""
    table = trained_on(stored)
    length = seq_len or table.get("seq_len")
    if length is None:
        raise ConfigError(f"{stored.path} is of no run, so the length of rows is not known; give --seq-len N")
    if length > stored.model.max_seq_len:
        raise ConfigError(f"--seq-len {length} is above model.max_seq_len={stored.model.max_seq_len}")
    rules = {key: table[key] for key in ("packing", "mask_documents") if key in table}
    cfg = DataConfig(sources=[Source(path=str(data))], seq_len=length, **rules)
    rows = Validation(cfg, micro_batch_size=micro_batch_size, dp_rank=0, dp_world=1, device=device)
    if not rows.targets:
        raise ConfigError(f"{data} has no validation rows; build it with pretrain-data build --val-fraction F")
    _check_tokenizer(stored, data)
    kernel, _ = choose_kernel("auto", device, dtype, mask_documents=cfg.mask_documents)
    model = load_model(stored, device, dtype, kernel=kernel, loss_chunks=LOSS_CHUNKS)
    metrics = evaluate(_Plain(model, kernel, cfg.mask_documents), rows, World(0, 1, 0, device))
    assert metrics is not None
    return metrics


class _Plain:
    """As much of an engine as validation needs, for a model that no engine shards."""

    def __init__(self, model: nn.Module, kernel: str, mask_documents: bool) -> None:
        self.model, self._kernel, self._mask = model, kernel, mask_documents

    def forward(self, batch: Batch) -> LossSums:
        out = self.model(batch.inputs, **model_inputs(batch, mask_documents=self._mask, kernel=self._kernel))
        assert isinstance(out, LossSums)
        return out


def _check_tokenizer(stored: StoredModel, data: str | Path) -> None:
    """Losses on the ids of another tokenizer would mean nothing."""
    from data_prep.shard import Manifest

    theirs = Manifest.read(data).tokenizer
    ours = stored.tokenizer
    if ours is not None and ours.hash != theirs.hash:
        raise ConfigError(
            f"{data} was built with tokenizer {theirs.hash[:12]} ({theirs.kind}, {theirs.vocab_size} tokens), "
            f"the model was trained with {ours.hash[:12]} ({ours.kind}, {ours.vocab_size} tokens); "
            f"build the data with the model's"
        )
    if theirs.vocab_size > stored.model.vocab_size:
        raise ConfigError(
            f"the tokenizer of {data} has {theirs.vocab_size} tokens, "
            f"the model only vocab_size={stored.model.vocab_size}"
        )
