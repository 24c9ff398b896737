"""Training of any model: steps, ranks, logging, checkpoints."""
