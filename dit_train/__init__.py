"""Pretraining Diffusion Transformers with FSDP2 and matrix optimizers; ``python -m dit_train --help``."""
