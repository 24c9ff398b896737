"""The images of the comparison: synthetic images of full size, or images of the user's shards.

Every contender gets the same JPEG bytes and the same annotations, in its own files. All files are in one
temporary folder.
"""

import io
import platform
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sa1b
from benchmarks.peers.contenders import Contender
from benchmarks.peers.task import Pair, Place, pairs, write_choices
from sa1b.ingest.ingest import ingest
from sa1b.ingest.policy import Policy
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.documents import Options
from sa1b.shards.manifest import read_tasks
from sa1b.shards.sample import location_of
from sa1b.sources.discovery import discover
from sa1b.verify.rebuild import rebuild_root
from sa1b.workers import available_cpus

QUALITY = 95  # JPEG quality of re-encoded images, the default of `sa1b reshard`
MASKS = 64
PACKAGES = (
    "torch", "numpy", "opencv-python-headless", "simplejpeg", "numba", "pycocotools", "webdataset",
    "mosaicml-streaming", "litdata",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Material:
    """The locations of the images.

    Attributes:
        folder: folder of all files.
        roots: by kind, "original" or "1024": this package's shards of the same images. The user's shards of
            re-encoded images have only the second kind.
        origin: the source of the images, as text.
    """

    folder: Path
    roots: dict[str, Path]
    origin: str

    @property
    def root(self) -> Path:
        """The available shards with the largest JPEGs."""
        return next(iter(self.roots.values()))

    def place(self, contender: Contender, kind: str) -> Place:
        """The contender's files, made on first use."""
        folder = self.folder / f"{kind}-{contender.files}"
        if not folder.exists():
            folder.mkdir()
            if contender.convert is not None:
                contender.convert(pairs(self.roots[kind]), folder)
        return Place(self.roots[kind], folder)


def make(folder: Path, images: int, data: Path | str | None = None) -> Material:
    """The material of a run: `images` synthetic pictures, or as many taken evenly from a root."""
    source = folder / "sa_000000.tar"
    if data is None:
        synthetic.write_tar(source, images=images, first_id=1)
        origin = f"{images} synthetic images by the full-size generator (sa1b synthesize)"
        roots = {"original": root_of(source, folder / "root-original", Options())}
    else:
        dataset = sa1b.open(data)
        rows = np.unique(np.linspace(0, len(dataset) - 1, images).astype(int)).tolist()
        rows = rows[
            : len(rows) // 2 * 2
        ]  # complete batches, because not all contenders deliver an incomplete one
        origin = f"{len(rows)} images taken evenly from shards of {len(dataset):,}"
        copy = copied(dataset, rows, folder / "root-stored")
        if dataset.manifest["options"]["image_size"] is not None:
            return Material(folder, {"1024": copy}, f"{origin}, re-encoded ones")
        roots = {"original": copy}
        write_source(source, pairs(copy))
    roots["1024"] = root_of(source, folder / "root-1024", Options(image_size=1024, quality=QUALITY))
    return Material(folder, roots, origin)


def copied(dataset: sa1b.Dataset, rows: Iterable[int], root: Path) -> Path:
    """A dataset directory with some samples of another one, byte for byte."""
    root.mkdir()
    with tarfile.open(root / "sa1b-000000-0000.tar", "w", format=tarfile.USTAR_FORMAT) as out:
        for row in rows:
            place = location_of(dataset.table, row, dataset.shards)
            masks = dataset.reader.read_range(
                place.shard, place.masks_start, place.stop - place.masks_start, place.masks_crc
            )
            for suffix, data in (("jpg", dataset[row].jpeg), ("masks", masks)):
                entry = tarfile.TarInfo(f"sa_{place.image_id}.{suffix}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))
    rebuild_root(root, quiet=True)
    return noted(root, (MASKS,))


def root_of(source: Path, root: Path, options: Options, limits: Iterable[int] = (MASKS,)) -> Path:
    """Shards of one source tar."""
    root.mkdir()
    (found,) = discover([source]).sources
    ingest(found, root, options, Policy())
    write_dataset(root, read_tasks(root))
    return noted(root, limits)


def noted(root: Path, limits: Iterable[int]) -> Path:
    """The same dataset directory, with recorded masks for contenders that cannot compute the choice."""
    write_choices(root, limits)
    (root / "ids.txt").write_text("".join(f"{sample.image_id}\n" for sample in sa1b.open(root)))
    return root


def write_source(path: Path, chosen: Iterable[Pair]) -> None:
    """A source tar of pairs, plain."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as out:
        for pair in chosen:
            for suffix, data in (("jpg", pair.jpeg), ("json", pair.text)):
                entry = tarfile.TarInfo(f"./sa_{pair.image_id}.{suffix}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))


def statistics(material: Material) -> dict[str, Any]:
    """Statistics of the images, for comparison with SA-1B."""
    found: dict[str, Any] = {"origin": material.origin}
    samples = list(sa1b.open(material.root))
    counts = [np.asarray(sample.annotations.runs_count) for sample in samples]
    fractions = np.concatenate(
        [np.asarray(s.annotations.area) / (s.annotations.height * s.annotations.width) for s in samples]
    )
    sizes = {f"{s.annotations.width}x{s.annotations.height}" for s in samples}
    found |= {
        "images": len(samples),
        "sizes": sorted(sizes),
        "masks_per_image": float(np.mean([len(each) for each in counts])),
        "runs_per_mask": float(np.concatenate(counts).mean()),
        "area_fraction_median": float(np.median(fractions)),
        "area_fraction_mean": float(fractions.mean()),
        "jpeg_bytes": float(np.mean([len(sample.jpeg) for sample in samples])),
        "jpeg_bytes_1024": float(np.mean([len(s.jpeg) for s in sa1b.open(material.roots["1024"])])),
        "bytes_per_image": {kind: _bytes_per_image(root) for kind, root in material.roots.items()},
        "annotation_bytes": float(np.mean([len(pair.text) for pair in pairs(material.root)])),
    }
    return found


def _bytes_per_image(root: Path) -> float:
    samples = sa1b.open(root).table
    return float((samples.jpg_bytes.astype(np.int64) + samples.masks_bytes).mean()) + 1024  # tar headers


def machine() -> dict[str, Any]:
    """The machine and versions of the measurement: processor, cores, memory, GPU, packages, date."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "processor": model[1].strip() if model else platform.machine(),
        "cores": available_cpus(),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def name_of(machine: dict[str, Any]) -> str:
    """A file name for the machine: processor, cores, GPU."""
    words = re.sub(r"\((r|tm)\)|processor|cpu|@", " ", machine["processor"].lower())
    gpu = f" {machine['gpu'].lower()}" if machine["gpu"] else ""
    return re.sub(r"[^a-z0-9.]+", "-", f"{words} {machine['cores']} cores{gpu}").strip("-")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
