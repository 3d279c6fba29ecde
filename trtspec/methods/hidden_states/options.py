"""Options for the files of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.methods.options import MethodOptions


@dataclass(frozen=True, kw_only=True)
class HiddenStatesOptions(MethodOptions):
    """Options of the method "extract_hidden_states".

    output_directory: folder of the shards. write_interval: finished requests per file. file_prefix: beginning of the
    file names.
    """

    output_directory: str
    write_interval: int
    file_prefix: str
