"""The ranks of a run: what each holds, what they exchange, and the optional ways to divide the work."""
