"""Scores generated images: feature extractors, Fréchet distance, KID, and distributed generation.

The package knows nothing of a trainer. It is handed a function ``images(indices) -> uint8 NCHW`` and never a model.
Importing ``eval`` imports nothing else; take what you need from its modules, e.g. ``from eval.frechet import frechet``.
"""
