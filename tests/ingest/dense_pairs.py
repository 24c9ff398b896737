"""Legal pairs that are small as stored and large once decoded: millions of runs in one annotation file."""

import resource
import sys
import tempfile
from pathlib import Path

import numpy as np
import simplejpeg

import sa1b
from tests import forked_workers
from tests.shards import tiny

HEIGHT, WIDTH, RUNS = 1950, 2000, 3_900_000


def write_dense(path: Path, images: int, runs: int = RUNS) -> Path:
    """A source tar of `images` pairs with one mask of `runs` runs each, every second pixel of the image."""
    lengths = np.ones(runs, np.int64)
    lengths[0] = 0
    lengths[-1] += HEIGHT * WIDTH - lengths.sum()
    counts = tiny.counts_from(lengths, HEIGHT, WIDTH)
    jpeg = simplejpeg.encode_jpeg(np.zeros((HEIGHT, WIDTH, 3), np.uint8), 75, "RGB", "420")
    members = []
    for image_id in range(1, images + 1):
        found = tiny.document(image_id, size=(HEIGHT, WIDTH), masks=0)
        mask = tiny.document(image_id, masks=1)["annotations"][0]
        full = [0.0, 0.0, WIDTH - 1.0, HEIGHT - 1.0]
        mask |= {"bbox": full, "area": int(lengths[1::2].sum()), "crop_box": [0.0, 0.0, WIDTH, HEIGHT]}
        mask |= {"segmentation": {"size": [HEIGHT, WIDTH], "counts": counts}}
        mask["crop_box"] = [float(value) for value in mask["crop_box"]]
        found["annotations"] = [mask]
        members += tiny.pair_members(image_id, jpeg, tiny.encode(found))
    return tiny.write_tar(path, members)


def main() -> None:
    """Ingest argv[1] into argv[2], in an address space that may grow by argv[3] MB; say what became of it.

    The images and what the worker held at most in MB, or the error.
    """
    forked_workers.use_fork()
    with tempfile.TemporaryDirectory() as folder:  # loads all that a worker needs
        tiny.ingest_tar(tiny.write_tar(Path(folder, "sa_000009.tar"), tiny.pairs([1])), Path(folder, "root"))
    if growth := int(sys.argv[3]):
        limit = (status("VmSize") + growth) << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    made = sa1b.reshard(sys.argv[1], sys.argv[2], quiet=True)
    worker_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(*(made.failed.values() or (made.images, worker_mb)))


def status(field: str) -> int:
    """A figure of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
