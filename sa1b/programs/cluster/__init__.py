"""Job scripts of SLURM."""
