"""Training small checkpoints for speculative decoding: data, target, distilled draft, evaluation, export."""
