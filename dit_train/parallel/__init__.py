"""Process group, mesh, sharding and compute precision."""
