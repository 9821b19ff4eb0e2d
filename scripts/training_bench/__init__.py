"""Parts of ``scripts/bench_training.py``."""
