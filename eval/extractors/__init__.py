"""Networks that turn uint8 images into feature vectors."""

from eval.extractors.extractor import NAMES, FeatureExtractor, load, score_name

__all__ = ["NAMES", "FeatureExtractor", "load", "score_name"]
