"""From nothing to verified shards and a page of pictures: what `make demo` runs.

Every step is one of the command lines you would use on real tars; each is printed before it runs. Safe to
run again: finished steps are recognised.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tyro.conf import Positional

from sa1b.shards.console import run

TOOLS = Path(os.path.relpath(Path(__file__).parent))
PYTHON = os.path.relpath(sys.executable)


def main(folder: Positional[Path] = Path("demo"), workers: int = 2) -> int:
    """Make synthetic source tars, reshard and verify them, draw a gallery.

    Args:
        folder: Where everything goes, made if need be.
        workers: Processes at a time.
    """
    source, shards, gallery = folder / "source", folder / "shards", folder / "gallery.html"
    began = time.monotonic()
    if not all((source / f"sa_00000{i}.tar").exists() for i in range(2)):
        _step("two synthetic source tars in the download's form", "synthesize.py", source, "--tars", 2,
              "--images-per-tar", 100, "--long-side", 640, "--workers", workers, "--overwrite")  # fmt: skip
    _step("source tars to indexed shards", "reshard.py", source, "--out", shards, "--images-per-shard", 64,
          "--workers", workers)  # fmt: skip
    _step("every byte, image and mask of the shards checked", "verify.py", shards, "--deep",
          "--workers", workers)  # fmt: skip
    _step("pictures with their masks", "gallery.py", shards, "--out", gallery)
    print(f"""
Done in {time.monotonic() - began:.0f} s.
  source tars    {source}
  shards, index  {shards}
  pictures       {gallery.resolve().as_uri()}

Next:
  open {gallery} in a browser
  {PYTHON} -c "import sa1b; print(sa1b.open('{shards}')[0].runs)"
  {PYTHON} {TOOLS}/reshard.py sa_000020.tar --out shards    # with a tar of your own""")
    return 0


def _step(what: str, tool: str, *arguments: object) -> None:
    words = [str(TOOLS / tool), *map(str, arguments)]
    shown = shlex.join([PYTHON, *words])
    print(f"\n== {what}\n$ {shown}", flush=True)
    code = subprocess.run([sys.executable, *words], check=False).returncode
    if code:
        print(f"\nstopped: this command ended with code {code}:\n  {shown}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    run(main, __doc__)
