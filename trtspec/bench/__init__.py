"""Measurements of an engine: speed (decode), time per phase of a step (profile), drafts kept (acceptance)."""

from trtspec.bench.acceptance import bench_acceptance
from trtspec.bench.decode import DecodeRun, bench_decode, decode_once, read_bandwidth, versions
from trtspec.bench.profile import profile_decode

__all__ = [
    "DecodeRun",
    "bench_acceptance",
    "bench_decode",
    "decode_once",
    "profile_decode",
    "read_bandwidth",
    "versions",
]
