"""Configuration: what users write, and what checkpoints say."""
