"""Checks of a dataset directory, and indexes made again from the tars."""
