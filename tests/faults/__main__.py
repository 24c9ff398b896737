"""The full counts: python -m tests.faults crash|full|eio [options of the driver]; the source is made here."""

import subprocess
import sys
import tempfile
from pathlib import Path

from sa1b.synthetic import source_tars as synthetic
from tests import faults

with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    library = faults.build(work)
    if library is None:
        sys.exit("needs a C compiler")
    source = work / "sa_000000.tar"
    what, *options = sys.argv[1:]
    # A disk that fills up in steps of 64 KB needs a source of some megabytes.
    synthetic.write_tar(source, images=60, first_id=1, long_side=640 if what == "full" else 128)
    command = [sys.executable, "-m", "tests.faults.driver", what, str(source), str(work / "work"), *options]
    sys.exit(subprocess.run(command, env=faults.environment(library), check=False).returncode)
