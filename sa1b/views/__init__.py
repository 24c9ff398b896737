"""Views: named subsets of the images and masks of a dataset."""
