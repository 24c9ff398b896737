"""Named subsets of a dataset's images and masks."""
