"""Training: configuration, precision, ranks, gradients, optimizer, checkpoints, health, metrics."""
