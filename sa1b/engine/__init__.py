"""How it is trained: configuration, precision, ranks, gradients, optimizer, checkpoints, health, metrics."""
