"""`sa1b seen`: which images a run was trained on, and how often, computed from its order."""
