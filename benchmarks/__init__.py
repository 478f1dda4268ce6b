"""``python -m benchmarks``: what a run, a step, a block and a start cost, on this machine."""
