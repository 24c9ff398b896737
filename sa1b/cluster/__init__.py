"""Work on many machines: job scripts of SLURM, and tasks on Ray."""
