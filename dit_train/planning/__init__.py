"""What a run will need before it has a GPU: memory, traffic, FLOPs and time, from the real code on fake ranks."""
