"""Work on many machines: job scripts of SLURM."""
