"""Packed token shards to the batches of this rank: which rows, in which order, as tensors."""
