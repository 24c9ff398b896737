"""`sa1b seen` of a run on all of SA-1B: 11.2 million images, with synthetic documents and no shards.

`pytest benchmarks/test_seen.py -s` prints the seconds of whole commands, each in a fresh process, the best of
3: whether one image was seen before a step, and how often each image was.
"""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from sa1b.shards import sample_table as table
from sa1b.stream.sample import SampleOptions

SHARDS, COUNT, BATCH = 11_000, 11_200_000, 256
ROOT = Path(__file__).parents[1]
STARTS = (0, 20_000, 61_000)  # steps at which the run was started; it has 100,000 steps, 2.3 epochs


def make(folder: Path) -> tuple[Path, str]:
    """A dataset directory with documents and a sample table, and the metrics.jsonl of a run on it."""
    draw, root, run = np.random.default_rng(0), folder / "shards", folder / "run"
    root.mkdir()
    run.mkdir()
    columns = {
        "image_id": np.arange(1, COUNT + 1, dtype=np.uint64),
        "shard": np.arange(COUNT) * SHARDS // COUNT,
        "offset": np.arange(COUNT, dtype=np.uint64) % 1024 * 1_000_448 + 512,
        **{name: draw.integers(1, 1 << 20, COUNT) for name in list(table.COLUMNS)[3:]},
    }
    data = table.encode(columns)
    (root / "new.bin").write_bytes(data)
    made = table.open_table(root / "new.bin")
    (root / "new.bin").rename(root / f"samples-{made.digest[:16]}.bin")
    shard = dict.fromkeys(("images", "masks", "bytes", "index_bytes"), 1)
    shard |= dict.fromkeys(("sha256", "index_sha256"), "0" * 64)
    options = {"images_per_shard": 1024, "image_size": None, "quality": None}
    options |= dict.fromkeys(("keep_json", "index_runs", "decode_images"), False)
    document = {
        "format": "sa1b-shards-1",
        "versions": {},
        "options": options,
        "sources": {f"sa_{number:06d}": "0" * 64 for number in range(SHARDS)},
        "totals": {"images": COUNT, "masks": COUNT * 100, "refused": 0, "doubtful": 0}
        | dict.fromkeys(("shard_bytes", "index_bytes"), 1),
        "largest": {"jpg_bytes": 1, "masks": 1, "masks_bytes": 1, "rle_bytes": 1, "runs": 1},
        "samples": {
            "name": f"samples-{made.digest[:16]}.bin",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "ids_sha256": made.ids_digest,
            "columns_sha256": made.digest,
        },
        "shards": [{"name": f"sa1b-{number:06d}-0000.tar", **shard} for number in range(SHARDS)],
    }
    (root / "dataset.json").write_text(json.dumps(document))
    state = {"seed": 0, "order": "shuffle", "block_size": 1, "options": SampleOptions().record()}
    state |= {"ids_sha256": made.ids_digest, "bytes_sha256": made.digest, "masks_where": None, "epochs": None}
    source = {str(root): {"root": str(root), "view": None, "images": COUNT}}
    config = {"parallel": {"mode": "ddp", "shares": None}, "data": {"micro_batch": None}}
    figures = {f"figure_{number}": 0.123456789 for number in range(40)}
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(100_000):
            if step in STARTS:
                stream = {**state, "position": step * BATCH}
                data_of = {"sources": source, "global_batch": BATCH, "stream": stream}
                start = {"step": step, "world_size": 8, "config": config, "data": data_of}
                file.write(json.dumps({"run": start}) + "\n")
            file.write(json.dumps({"step": step + 1, **figures}) + "\n")
    return run, made.digest


def test_the_commands(tmp_path: Path, figures: dict[str, dict[str, object]]) -> None:
    run, _ = make(tmp_path)
    for name, words in (
        ("whether an image was seen before a step, s", ["--image", "223750", "--before-step", "5000"]),
        ("how often an image was seen, s", ["--image", "223750"]),
        ("how often all images were seen, s", []),
    ):
        took = []
        for _ in range(3):
            start = time.perf_counter()
            command = [sys.executable, "-m", "sa1b", "seen", str(run), *words]
            done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            took.append(time.perf_counter() - start)
            assert done.returncode in (0, 1), done.stderr
        figures.setdefault("seen", {})[name] = min(took)
        print(f"\n{name}: {min(took):.2f}; {done.stdout.strip()}")
