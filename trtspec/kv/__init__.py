"""The KV cache: tensors (pool), who owns which block (blocks), keeping and giving back rows (rewind)."""
