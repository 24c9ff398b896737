"""Conversion of sources to shards: the task of one source, and the run over many sources."""
