"""Duration of the demo: `pytest benchmarks/test_demo.py -s` runs the commands of `make demo`."""

import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_demo(tmp_path: Path, figures: dict[str, dict[str, object]]) -> None:
    began = time.perf_counter()
    command = [sys.executable, "tools/demo.py", str(tmp_path / "demo")]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    figures["demo"] = {"seconds": time.perf_counter() - began}
    print(f"\nmake demo: {figures['demo']['seconds']:.0f} s")
