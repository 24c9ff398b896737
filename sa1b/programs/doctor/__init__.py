"""Checks of machine, ranks and storage before a run, each with result, figure and remedy."""
