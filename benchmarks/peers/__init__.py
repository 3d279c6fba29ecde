"""The parts of benchmarks/peers.py. in_*.py and worker.py run in the peers' environments: nothing of trtspec there."""
