"""Synthetic source tars with the format, the statistics and the irregularities of SA-1B."""
