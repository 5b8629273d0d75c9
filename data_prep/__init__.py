"""Raw text to packed token shards. Knows nothing of training."""
