"""`sa1b query`: SQL on the indexes of a dataset directory."""
