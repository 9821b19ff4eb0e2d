"""Rectified flow in pure functions: t runs from 0 (an image) to 1 (noise), and the model predicts noise − image."""
