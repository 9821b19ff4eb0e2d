"""Where a shard lies in its matrix, and how whole matrices meet."""
