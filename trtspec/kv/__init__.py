"""The KV cache: tensors (pool), ownership of blocks (blocks), keeping rows (rewind), finding them again (reuse)."""
