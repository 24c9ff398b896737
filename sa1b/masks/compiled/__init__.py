"""Loops over runs, compiled by numba: see sa1b.kernel."""
