"""Readers of a checkpoint's config.json."""
