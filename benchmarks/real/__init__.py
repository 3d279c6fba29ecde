"""The parts of benchmarks/real.py."""
