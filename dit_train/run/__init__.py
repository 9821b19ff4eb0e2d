"""The loop and what keeps it alive: EMA, faults, metrics, tracking, randomness."""
