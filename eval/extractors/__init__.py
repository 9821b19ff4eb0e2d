"""Networks that turn uint8 images into feature vectors."""

from eval.extractors.extractor import NAMES, FeatureExtractor, load, score_name
from eval.extractors.observation import Observation

__all__ = ["NAMES", "FeatureExtractor", "Observation", "load", "score_name"]
