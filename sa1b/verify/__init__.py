"""Checks of a dataset directory, and rebuilds of indexes from the tars."""
