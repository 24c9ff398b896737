"""The same as `sa1b export`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
