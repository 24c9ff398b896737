"""Export of a dataset to other formats."""
