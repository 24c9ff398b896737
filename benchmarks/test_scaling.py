"""How training scales from 1 to 2 ranks here: `pytest benchmarks/test_scaling.py -s`, three minutes.

Runs `sa1b bench scaling` in all modes of two ranks, in fp32 and bf16. Each rank has one thread, on a separate
CPU. The data are shards of 1024 pixels of full-size synthetic images. `taskset -c 0,1` selects CPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.programs.scaling.page import judge
from sa1b.programs.scaling.result import Scaling
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from sa1b.sources.discovery import discover

IMAGES = 32
FLAGS = ("--preset", "tiny", "--ranks", "1,2", "--threads", "1", "--device", "cpu", "--micro-batch", "1")
LENGTH = ("--steps", "3", "--rounds", "3")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_scaling(tmp_path: Path, figures: dict[str, dict[str, object]]) -> None:
    synthetic.write_tar(tmp_path / "sa_000000.tar", images=IMAGES, first_id=1)
    (source,) = discover([tmp_path / "sa_000000.tar"]).sources
    root = tmp_path / "root"
    root.mkdir()
    ingest(source, root, Options(image_size=1024, quality=90), Policy())
    write_dataset(root, read_tasks(root))
    command = [sys.executable, "-m", "sa1b", "bench", "scaling", "root", *FLAGS, *LENGTH, "--json"]
    done = subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    document = json.loads(done.stdout)
    figures["scaling"] = document
    found = Scaling.of_document(document)
    print(f"\n{found.table()}\n\n{judge(found)}")
