"""The growth of cost with the number of samples, masks per image, image size and workers.

Each chart compares this package with alternatives. Each point is measured in a separate process or in
interleaved rounds.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.material import QUALITY, Material, root_of, write_source
from benchmarks.peers import measured
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.task import Pair, Place, Task, pairs, write_choices
from sa1b.shards import sample_table as table
from sa1b.shards.documents import Options

ALL = 11_185_362  # number of images of SA-1B
PER_SHARD = 1024
OURS, PEER = "sa1b.Stream in DataLoader", "extracted files"


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart with a curve for each contender.

    Attributes:
        title, axis, unit: labels; axis is the growing quantity, unit the measured one.
        series: name -> points (x, y).
    """

    title: str
    axis: str
    unit: str
    series: dict[str, list[tuple[float, float]]]

    def document(self) -> dict[str, Any]:
        return asdict(self)


# Programs that compute the first sample of a shuffled epoch, each run in a new process.
_FRAME = """
import json, sys, time
from pathlib import Path
def memory():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
count, path = int(sys.argv[1]), sys.argv[2]
{imports}
before, began = memory(), time.perf_counter()
{plan}
print(json.dumps([time.perf_counter() - began, memory() - before]))
"""
_PLANS = {
    "sa1b": (
        """
import numpy as np
from sa1b.shards.sample_table import open_table
from sa1b.stream.order import Order
from sa1b.views.view import whole
Order(10, "warm", 0).rows(np.arange(256))
""",
        """
samples = open_table(Path(path))
view = whole(samples)
rows = view.table_rows(Order(len(view), view.ids_digest, 0).rows(np.arange(256)))
samples.shard[rows], samples.offset[rows]
""",
        None,
    ),
    "file list and RandomSampler": (
        "from torch.utils.data import RandomSampler",
        """
files = [f"sa_{i // 11187:06d}/sa_{i}.jpg" for i in range(count)]
next(iter(RandomSampler(files)))
""",
        None,
    ),
    "MosaicML Streaming, plan of an epoch": (
        """
from benchmarks.peers import torchvision_stand_in
torchvision_stand_in.install()
import numpy as np
from streaming.base.partition import get_partitions
from streaming.base.shuffle import get_shuffle
""",
        """
sizes = np.full(max(1, count // 1024), 1024)
ids = get_partitions("relaxed", int(sizes.sum()), 1, 1, 1, 2, 2)
order = get_shuffle("py1e", sizes, 1, 9176, 0, 4000000)
ids = np.where(ids != -1, order[ids], -1)
""",
        "streaming",
    ),
}


def samples(folder: Path, counts: list[int], rounds: int) -> list[Curve]:
    """Seconds and memory to compute the first sample of an epoch, by number of images in the dataset."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for images in counts:
        path = folder / f"samples-{images}.bin"
        path.write_bytes(_table(images))
        for name, (imports, plan, needs) in _PLANS.items():
            if needs and find_spec(needs) is None:
                continue
            code = _FRAME.format(imports=imports, plan=plan)
            command = [sys.executable, "-c", code, str(images), str(path)]
            found = [
                json.loads(
                    subprocess.run(
                        command, cwd=measured.REPOSITORY, capture_output=True, text=True, check=True
                    ).stdout.splitlines()[-1]
                )
                for _ in range(rounds)
            ]
            seconds.setdefault(name, []).append((images, median(each[0] for each in found)))
            memory.setdefault(name, []).append((images, max(4096, median(each[1] for each in found))))
        path.unlink()
    return [
        Curve("Until the first sample of an epoch is known", "images of the dataset", "seconds", seconds),
        Curve("Memory of that, a page at least", "images of the dataset", "bytes", memory),
    ]


def masks(folder: Path, material: Material, limits: list[int], rounds: int) -> Curve:
    """Milliseconds per image by masks per image, at 256 pixels, in one process."""
    source = folder / "sa_000001.tar"
    write_source(source, _with_masks(material.roots["original"], max(limits)))
    root = root_of(source, folder / "root-masks", Options(image_size=1024, quality=QUALITY), limits)
    places = {name: Place(root, folder / f"masks-{CONTENDERS[name].files}") for name in (OURS, PEER)}
    for name, place in places.items():
        place.folder.mkdir()
        convert = CONTENDERS[name].convert
        if convert is not None:
            convert(pairs(root), place.folder)
    series: dict[str, list[tuple[float, float]]] = {OURS: [], PEER: []}
    for limit in limits:
        _point(series, limit, places, Task(size=256, masks=limit), rounds)
    return Curve("Masks an image, 256 x 256 pixels", "masks an image", "milliseconds an image", series)


def image_sizes(material: Material, sizes: list[int], rounds: int) -> Curve:
    """Milliseconds per image by the size of square and masks, original JPEGs, one process."""
    series: dict[str, list[tuple[float, float]]] = {OURS: [], PEER: []}
    places = {name: material.place(CONTENDERS[name], "original") for name in (OURS, PEER)}
    write_choices(material.roots["original"], (16, 64))
    for size in sizes:
        _point(series, size, places, Task(size=size, image_size=size, masks=16), rounds)
    return Curve("Pixels of the square, 16 masks of the same size", "pixels", "milliseconds an image", series)


def workers(comparison: list[dict[str, Any]]) -> list[Curve]:
    """Images per second by number of workers or threads, from the comparison."""
    curves = []
    for question in comparison:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in question["rows"]:
            if row["kind"] in ("ours", "peer"):
                series.setdefault(row["name"], []).append((row["workers"], row["images_per_second"]))
        kept = {name: points for name, points in series.items() if len(points) > 1}
        if kept:
            curves.append(
                Curve(f"Workers or threads: {question['title']}", "workers", "images a second", kept)
            )
    return curves


def _point(
    series: dict[str, list[tuple[float, float]]], x: float, places: dict[str, Place], task: Task, rounds: int
) -> None:
    entries = [(CONTENDERS[name], place, 0) for name, place in places.items()]
    rows = measured.compare(entries, task, rounds, {"ours": 48, "peer": 8}, quick=True)
    for row in rows:
        series[row.name].append((x, 1e3 * median(row.seconds())))


def _with_masks(root: Path, most: int) -> list[Pair]:
    """A few images whose masks are repeated up to the given number."""
    found = []
    for number, pair in enumerate(pairs(root)):
        document = json.loads(pair.text)
        own = document["annotations"]
        document["annotations"] = [own[i % len(own)] | {"id": number * most + i + 1} for i in range(most)]
        found.append(replace(pair, text=json.dumps(document).encode()))
        if len(found) == 8:
            break
    return found


def _table(images: int) -> bytes:
    """A sample table of `count` images, 1024 per shard."""
    draw = np.random.default_rng(0)
    columns = {
        "image_id": np.arange(1, images + 1, dtype=np.uint64),
        "shard": np.arange(images) // PER_SHARD,
        "offset": np.arange(images, dtype=np.uint64) % PER_SHARD * 1_000_448 + 512,
        **{name: draw.integers(1, 1 << 20, images) for name in list(table.COLUMNS)[3:]},
    }
    return table.encode(columns)
