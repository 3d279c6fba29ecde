"""The KV cache: tensors (pool), who owns which block (blocks), keeping rows (rewind), finding them again (reuse)."""
