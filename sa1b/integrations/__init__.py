"""Datasets for the training code of other projects, fed from shards."""
