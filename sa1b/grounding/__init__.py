"""Grounding: a model that finds the region and predicts the mask that a phrase describes."""
