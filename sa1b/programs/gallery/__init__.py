"""A gallery: images of a dataset directory and their masks as one HTML page."""
