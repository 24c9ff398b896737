"""A dataset written back in other forms."""
