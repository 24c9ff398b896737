"""How a model is trained, whichever it is: the step, the ranks, what is watched, checkpoints."""
