"""Loops over runs, compiled with numba where it is there: see sa1b.kernel."""
