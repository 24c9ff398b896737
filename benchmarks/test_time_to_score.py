"""Score over wall time of a plain training loop with this package's loader and with extracted files.

`pytest benchmarks/test_time_to_score.py -s` trains the preset tiny on synthetic images of full size with each
loader and the seeds 0, 1 and 2, in turn, in the same time budget (`--seconds` of training for each run, by
default 300): forty minutes on two cores. The scores are mean IoU on 32 held-out images.
`--record` adds them to the figures; `python -m benchmarks.curves` draws them.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import material, plain_loop
from benchmarks.parts import SCORES
from benchmarks.peers import extracted_files
from benchmarks.peers.task import pairs
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.documents import Options

IMAGES, HELD_OUT, SEEDS = 400, 32, (0, 1, 2)


def test_time_to_score(
    tmp_path: Path, request: pytest.FixtureRequest, figures: dict[str, dict[str, object]]
) -> None:
    seconds = request.config.getoption("--seconds")
    for number, (name, images) in enumerate((("shards", IMAGES), ("held-out", HELD_OUT))):
        source = tmp_path / f"sa_{number:06}.tar"
        synthetic.write_tar(source, images=images, first_id=1 + 100_000 * number)
        material.root_of(source, tmp_path / name, Options())
    (tmp_path / "files").mkdir()
    extracted_files.convert(pairs(tmp_path / "shards"), tmp_path / "files")
    runs: dict[str, list[list[dict[str, Any]]]] = {"shards": [], "files": []}
    for seed in SEEDS:
        for kind, of_kind in runs.items():
            out = tmp_path / f"{kind}-{seed}.jsonl"
            arguments = (kind, tmp_path / kind, tmp_path / "held-out", seconds, seed, out)
            subprocess.run([sys.executable, "-m", plain_loop.__name__, *map(str, arguments)], check=True)
            of_kind.append([json.loads(line) for line in out.read_text().splitlines()])
            assert of_kind[-1][-1]["seconds"] >= seconds
    for kind, of_kind in runs.items():
        last = [run[-1] for run in of_kind]
        shown = ", ".join(
            f"{prompt} {mean(each['scores'][name] for each in last):.3f}" for name, prompt in SCORES.items()
        )
        print(f"{kind}: {mean(each['images'] for each in last):,.0f} images, {shown}")
    figures["time to score"] = {"seconds": seconds, "images": IMAGES, "held_out": HELD_OUT, "runs": runs}
