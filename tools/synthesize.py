"""The same as `sa1b synthesize`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["synthesize", *sys.argv[1:]])
