"""The same as `sa1b view`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["view", *sys.argv[1:]])
