"""The full counts: python -m tests.faults crash|full|eio|power [options of the driver]; this module makes the source."""

import subprocess
import sys
import tempfile
from pathlib import Path

from sa1b.programs.synthetic import source_tars as synthetic
from tests import faults

with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    library = faults.build(work)
    if library is None:
        sys.exit("needs a C compiler")
    source = work / "sa_000000.tar"
    what, *options = sys.argv[1:]
    # A disk that fills up in steps of 64 KB needs a source of some megabytes. A source and its replacement
    # with more images have the same first images.
    long_side = {"full": 640, "power": 96}.get(what, 128)
    synthetic.write_tar(source, images=20 if what == "power" else 60, first_id=1, long_side=long_side)
    for name, images, first_id in (("other/sa_000001.tar", 8, 100), ("larger/sa_000000.tar", 27, 1)):
        (work / name).parent.mkdir()
        synthetic.write_tar(work / name, images=images, first_id=first_id, long_side=96)
    command = [sys.executable, "-m", "tests.faults.driver", what, str(source), str(work / "work"), *options]
    sys.exit(subprocess.run(command, env=faults.environment(library), check=False).returncode)
