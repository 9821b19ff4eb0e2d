"""The parts of ``scripts/bench_optimizers.py``: the problem, who runs on it, how it is timed, what is reported."""
