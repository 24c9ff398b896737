"""Layers of masks beside the shards of a dataset directory: made from files, listed, verified, removed."""
