"""Checkpoint folder in, torch module out."""
