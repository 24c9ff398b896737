"""A training step: samples, gradients and precision, optimizer."""
