"""The same as `sa1b reshard`, started from a clone."""

import sys

from sa1b.cli import main

if __name__ == "__main__":
    main(["reshard", *sys.argv[1:]])
