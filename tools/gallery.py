"""The same as `sa1b gallery`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["gallery", *sys.argv[1:]])
