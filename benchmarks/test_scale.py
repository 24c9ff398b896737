"""Steps on a simulation of all of SA-1B: 1000 sources, 10,923 shards, 11,185,362 images.

`pytest benchmarks/test_scale.py` prints time and peak memory of each step, without imports, and compares them
with the targets. It takes 2.5 GB of the temporary folder (--basetemp) and some minutes, most of them to make
the directory; `--scale 0.01` is a hundredth of it. The contents of the tars are simulated, see
benchmarks/simulated.py, so no step that reads every shard is measured.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

from benchmarks import simulated
from benchmarks.conftest import TABLES
from benchmarks.simulated import Size
from sa1b.programs.synthetic import source_tars

ROOT = Path(__file__).parents[1]
REACH = {  # step -> seconds, MB; None: only shown
    "finish": (60, 1500),
    "finish again, nothing new": (None, None),
    "open": (0.1, None),
    "check the sample table": (None, None),
    "view of a tenth by ids": (None, None),
    "stream, first batch": (None, None),
    "stream, first batch at 90 %": (None, None),
    "add one source": (30, 1500),
}


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> Size:
    return Size.of(request.config.getoption("--scale"))


@pytest.fixture(scope="module")
def root(size: Size, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("scale")
    if shutil.disk_usage(folder).free < (free := 300 * size.images):
        pytest.skip(f"{folder} has less than {free / 1e9:.1f} GB free; name another with --basetemp")
    with tqdm(total=size.images, desc="simulated images", unit="image", unit_scale=True) as bar:
        simulated.make(folder / "root", size, bar.update)
    yield folder / "root"
    shutil.rmtree(folder)


def measure(name: str, root: Path, *arguments: object) -> dict[str, float]:
    """Seconds and peak memory of a step in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.simulated", name, str(root), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_scale(
    size: Size, root: Path, pytestconfig: pytest.Config, figures: dict[str, dict[str, object]]
) -> None:
    folder = root.parent
    ids = folder / "ids.txt"
    chosen = np.random.default_rng(1).choice(simulated.image_ids(size), size.images // 10, replace=False)
    ids.write_text("\n".join(map(str, chosen)) + "\n")
    more = folder / "sa_100000.tar"
    source_tars.write_tar(more, images=20, first_id=1 << 40, long_side=256)
    found = {
        "finish": measure("finish", root),
        "finish again, nothing new": measure("finish", root),
        "open": measure("open", root),
        "check the sample table": measure("check", root),
        "view of a tenth by ids": measure("view", root, ids),
        "stream, first batch": measure("start", root),
        "stream, first batch at 90 %": measure("start", root, simulated.resume_position(size)),
        "add one source": measure("add", root, more),
    }
    document = json.loads((root / "dataset.json").read_bytes())
    assert document["totals"]["images"] == size.images + 20
    figures["scale"] = {"images": size.images, **found}
    lines = [
        f"{size.sources:,} sources, {size.shards:,} shards, {size.images:,} images",
        f"{'':<28} {'seconds':>9} {'peak MB':>9}  {'of it imports':>14}  to reach",
    ]
    missed = []
    for name, step in found.items():
        seconds, megabytes = REACH[name]
        reach = []
        if seconds is not None:
            reach.append(f"{seconds} s")
            if step["seconds"] > seconds:
                missed.append(f"{name}: {step['seconds']:.2f} s")
        if megabytes is not None:
            reach.append(f"{megabytes:,} MB")
            if step["peak_mb"] > megabytes:
                missed.append(f"{name}: {step['peak_mb']:,.0f} MB")
        numbers = f"{step['seconds']:>9.3f} {step['peak_mb']:>9,.0f}  {step['imports_mb']:>14,.0f}"
        lines.append(f"{name:<28} {numbers}  {', '.join(reach)}")
    pytestconfig.stash[TABLES].append("\n".join(["", *lines]))
    assert missed == []
