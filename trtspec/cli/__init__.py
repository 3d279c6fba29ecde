"""The `trtspec` command."""

from trtspec.cli.main import main

__all__ = ["main"]
