"""Loops over runs, compiled if numba is installed: see sa1b.kernel."""
