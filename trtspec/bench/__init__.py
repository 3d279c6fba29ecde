"""Measurements of an engine.

decode: speed. profile: time per phase of a step. acceptance: drafts kept. adaptive: "auto" while the load changes.
"""

from trtspec.bench.acceptance import bench_acceptance
from trtspec.bench.adaptive import bench_adaptive
from trtspec.bench.decode import DecodeRun, bench_decode, decode_once, read_bandwidth, versions
from trtspec.bench.profile import profile_decode

__all__ = [
    "DecodeRun",
    "bench_acceptance",
    "bench_adaptive",
    "bench_decode",
    "decode_once",
    "profile_decode",
    "read_bandwidth",
    "versions",
]
