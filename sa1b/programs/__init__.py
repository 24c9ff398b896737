"""Programs on top of the core: each has its functions and its verb; none imports another."""
