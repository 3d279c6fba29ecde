"""Backends that run a step module; each implements the `Executable` protocol."""
