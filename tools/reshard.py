"""The same as `sa1b reshard`, started from a clone."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # of a clone that is not installed
    from sa1b.cli import main

    main(["reshard", *sys.argv[1:]])
