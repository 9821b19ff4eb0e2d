"""The loop and what keeps it alive: checkpoints, EMA, faults, metrics, tracking, randomness."""
