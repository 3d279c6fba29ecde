"""Where hidden states go."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class HiddenStatesOptions(MethodOptions):
    """output_directory: folder of the shards. write_interval: finished requests per file. file_prefix: how file names
    begin."""

    output_directory: str
    write_interval: int
    file_prefix: str
