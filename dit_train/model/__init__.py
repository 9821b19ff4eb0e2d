"""The Diffusion Transformer: `dit` (the model), `init` (its first weights), `sizes` (named sizes; needs no torch)."""
