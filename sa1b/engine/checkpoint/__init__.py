"""Checkpoints of a run: files and digests, tensors, weights."""
