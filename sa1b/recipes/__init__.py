"""What is trained: the settings, weights and scores of SAM, of distillation and of grounding."""
