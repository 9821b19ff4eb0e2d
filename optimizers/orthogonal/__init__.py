"""Newton–Schulz iterations on batches of matrices."""
