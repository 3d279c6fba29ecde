"""The parts of benchmarks/peers.py. in_*.py and worker.py run in the peers' environments, without trtspec."""
