"""The same as `sa1b slurm`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["slurm", *sys.argv[1:]])
