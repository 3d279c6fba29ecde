"""The parts of benchmarks/steps.py."""
