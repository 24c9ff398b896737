"""Grounding: a model that finds the region and draws the mask that a phrase describes."""
