"""A simulated dataset directory as large as all of SA-1B, and steps on it, each in a separate process.

    python -m benchmarks.simulated finish ROOT      prints {"seconds": ..., "peak_mb": ...}

Real: task files, rows of the sample table, names, image ids, sizes, the samples that the stream reads first
and the indexes of some shards. The tars are sparse: they have their size and take no space.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SOURCES, SHARDS, IMAGES = 1000, 10_923, 11_185_362
INDEXES = 4  # shards with a real index
BATCH = 16  # samples that are read at the start, and at 90 %
SEED = 0
_BLOCK = 512
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the simulation; images and shards are distributed evenly over the sources."""

    sources: int
    shards: int
    images: int

    @staticmethod
    def of(scale: float) -> "Size":
        """A part of SA-1B, at least two sources."""
        sources = max(2, round(SOURCES * scale))
        return Size(sources, SHARDS * sources // SOURCES, IMAGES * sources // SOURCES)

    def first_images(self) -> Numbers:
        """Number of the first image of each source, and of all images."""
        return np.arange(self.sources + 1, dtype=np.int64) * self.images // self.sources

    def first_shards(self) -> Numbers:
        return np.arange(self.sources + 1, dtype=np.int64) * self.shards // self.sources


def image_ids(size: Size) -> npt.NDArray[np.uint64]:
    """All ids, sorted: a block for each source with a gap after it, as in SA-1B."""
    ids = np.arange(size.images, dtype=np.uint64)
    sources = np.searchsorted(size.first_images(), ids.astype(np.int64), side="right") - 1
    return ids + sources.astype(np.uint64) * np.uint64(2)


def read_first(size: Size) -> set[int]:
    """Ids of the samples that a stream reads first, at its start and at 90 %."""
    from sa1b.stream.order import Order
    from sa1b.views.view import ids_digest

    ids = image_ids(size)
    order = Order(size.images, ids_digest(ids), SEED)
    starts = np.array([0, resume_position(size)])
    positions = (starts[:, None] + np.arange(4 * BATCH)).reshape(-1)
    return set(ids[order.rows(positions)].tolist())


def resume_position(size: Size) -> int:
    """The position at 90 % of the first epoch, at the start of a step."""
    return size.images * 9 // 10 // BATCH * BATCH


def make(root: Path, size: Size, progress: Callable[[int], object]) -> None:
    """Write the directory without dataset.json and its table; `progress` is called with numbers of images."""
    from sa1b.programs.synthetic.source_tars import scene

    real = read_first(size)
    picture = scene(1)[:2]
    (root / "tasks").mkdir(parents=True)
    ids, first, shards = image_ids(size), size.first_images(), size.first_shards()
    for source in range(size.sources):
        own = ids[first[source] : first[source + 1]]
        _write_source(root, source, own, int(shards[source + 1] - shards[source]), real, picture)
        progress(len(own))


def _write_source(
    root: Path, source: int, ids: npt.NDArray[np.uint64], shards: int, real: set[int], picture: Any
) -> None:
    """The files of one source."""
    import hashlib

    from sa1b.shards.documents import Options, ShardInfo, Task
    from sa1b.shards.manifest import FORMAT, LARGEST, versions
    from sa1b.shards.sample_table import encode
    from sa1b.storage.atomic import json_bytes

    rng = np.random.default_rng([SEED, source])
    ids = rng.permutation(ids)
    count = len(ids)
    numbers = np.arange(count) * shards // count  # of the shard of each image
    columns = {
        "image_id": ids,
        "shard": numbers,
        "jpg_bytes": rng.integers(300_000, 1_700_000, count),
        "masks_bytes": rng.integers(8_000, 24_000, count),
        "jpg_crc32c": rng.integers(0, 1 << 32, count),
        "masks_crc32c": rng.integers(0, 1 << 32, count),
    }
    contents: dict[int, tuple[bytes, bytes]] = {}
    for row in np.flatnonzero(np.isin(ids, np.fromiter(real, np.uint64, len(real)))):
        contents[int(row)] = _real_sample(picture, int(ids[row]))
        for name, value in zip(_CONTENT, _facts(*contents[int(row)]), strict=True):
            columns[name][row] = value
    taken = 2 * _BLOCK + _padded(columns["jpg_bytes"]) + _padded(columns["masks_bytes"])
    ends = np.cumsum(taken)
    starts = np.searchsorted(numbers, np.arange(shards + 1))
    before = np.concatenate([[0], ends])[starts]  # bytes of the shards before each
    columns["offset"] = ends - taken - before[numbers] + _BLOCK
    stem = f"{source:06d}"
    found = []
    for number in range(shards):
        name = f"sa1b-{stem}-{number:04d}"
        total = int(before[number + 1] - before[number]) + 2 * _BLOCK
        rows = slice(int(starts[number]), int(starts[number + 1]))
        with (root / f"{name}.tar").open("wb") as file:
            for row in range(rows.start, rows.stop):
                if row in contents:
                    _write_members(
                        file, {key: int(value[row]) for key, value in columns.items()}, contents[row]
                    )
            file.truncate(total)
        index = root / f"{name}.parquet"
        if source == 0 and number < INDEXES:
            _write_index(index, {key: value[rows] for key, value in columns.items()}, picture)
        else:
            index.touch()
            os.truncate(index, 60_000_000)
        images = rows.stop - rows.start
        digest = hashlib.sha256(name.encode()).hexdigest()
        found.append(
            ShardInfo(f"{name}.tar", images, 100 * images, total, digest, index.stat().st_size, digest)
        )
    table = encode(columns)
    (root / "tasks" / f"sa_{stem}.samples").write_bytes(table)
    refused = {"jpeg_truncated": source % 3} if source % 3 else {}
    task = Task(
        source={
            "name": f"sa_{stem}",
            "kind": "tar",
            "size": 11_300_000_000,
            "mtime_ns": 1_700_000_000_000_000_000,
            "sha256": hashlib.sha256(stem.encode()).hexdigest(),
            "md5": None,
        },
        options=Options(images_per_shard=1119),
        versions=versions(),
        shards=found,
        counts={
            "members": 2 * count + 2 * (source % 3),
            "images": count,
            "masks": 100 * count,
            "jpg_bytes": int(columns["jpg_bytes"].sum()),
            "refused_members": 2 * (source % 3),
            "refused": refused,
            "doubtful": {},
        },
        damage=[],
        largest=dict.fromkeys(LARGEST, 1_700_000),
        samples={"bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()},
    )
    fields = {name: value for name, value in asdict(task).items() if value is not None}
    document = json_bytes({"format": FORMAT, **fields})
    (root / "tasks" / f"sa_{stem}.json").write_bytes(document)


_CONTENT = ("jpg_bytes", "masks_bytes", "jpg_crc32c", "masks_crc32c")


def _padded(sizes: Numbers) -> Numbers:
    return -(-sizes // _BLOCK) * _BLOCK


def _facts(jpeg: bytes, masks: bytes) -> tuple[int, int, int, int]:
    from crc32c import crc32c

    return len(jpeg), len(masks), crc32c(jpeg), crc32c(masks)


def _real_sample(picture: Any, image_id: int) -> tuple[bytes, bytes]:
    """A JPEG and the mask record of an image of this id."""
    from sa1b.shards import annotation, record

    jpeg, document = picture
    document["image"].update(image_id=image_id, file_name=f"sa_{image_id}.jpg")
    parsed = annotation.parse_annotation(json.dumps(document).encode(), image_id)
    return jpeg, record.encode(parsed.annotations)


def _write_members(file: Any, row: dict[str, int], sample: tuple[bytes, bytes]) -> None:
    """Write both members of a sample with their headers at their offsets."""
    import tarfile

    position = row["offset"] - _BLOCK
    for data, ending in zip(sample, ("jpg", "masks"), strict=True):
        info = tarfile.TarInfo(f"sa_{row['image_id']}.{ending}")
        info.size = len(data)
        file.seek(position)
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + data)
        position += _BLOCK + len(data) + -len(data) % _BLOCK


def _write_index(path: Path, columns: dict[str, Numbers], picture: Any) -> None:
    """An index with the rows of a shard; every image has the masks of one."""
    from sa1b.shards import annotation
    from sa1b.shards.index import IndexWriter, Row

    _, document = picture
    writer = IndexWriter(path, with_runs=True)
    parsed = annotation.parse_annotation(json.dumps(document).encode(), document["image"]["image_id"])
    annotations = parsed.annotations
    for i in range(len(columns["image_id"])):
        row = {key: int(value[i]) for key, value in columns.items()}
        offset = row["offset"]
        writer.add(
            Row(
                annotations=replace(annotations, image_id=row["image_id"]),
                runs=parsed.runs,
                image_height=annotations.height,
                image_width=annotations.width,
                jpg_offset=offset,
                masks_offset=-(-(offset + row["jpg_bytes"]) // _BLOCK) * _BLOCK + _BLOCK,
                **{name: row[name] for name in _CONTENT},
            )
        )
    writer.close()


# Steps, each in a separate process.


def finish(root: Path) -> Callable[[], object]:
    from sa1b.ingest.finish import finish

    return lambda: finish(root)


def open_dataset(root: Path) -> Callable[[], object]:
    import sa1b

    opener = sa1b.open
    return lambda: opener(root)


def view_by_ids(root: Path, ids: str) -> Callable[[], object]:
    from sa1b.views.selection import Selection, select

    return lambda: select(root, Selection(ids=ids), quiet=True)


def check_table(root: Path) -> Callable[[], object]:
    import sa1b

    dataset = sa1b.open(root)
    return dataset.check_table


def add_source(root: Path, source: str) -> Callable[[], object]:
    """Ingest one tar of some images; measures the memory beyond its size."""
    from sa1b.ingest.policy import IngestRun, Policy
    from sa1b.ingest.reshard import reshard
    from sa1b.shards.documents import Options

    run = IngestRun(quiet=True, space_check=False)

    def add() -> None:
        summary = reshard([Path(source)], root, Options(images_per_shard=1119), Policy(), run)
        assert summary.exit_code() == 0, summary.failed

    return add


def start(root: Path, position: str = "0") -> Callable[[], object]:
    """A stream until its first batch, at the start or at the position of a state."""
    from sa1b.stream.dataset import Stream

    def first_batch() -> None:
        stream = Stream(
            root, global_batch=BATCH, seed=SEED, masks=8, damage_log=root.parent / "damaged.jsonl"
        )
        stream.load_state_dict({**stream.state_dict(), "position": int(position)})
        batch = next(iter(stream))
        assert bool(batch.valid.all())

    return first_batch


STEPS: dict[str, Callable[..., Callable[[], object]]] = {
    "finish": finish,
    "open": open_dataset,
    "view": view_by_ids,
    "check": check_table,
    "add": add_source,
    "start": start,
}


def peak_mb() -> float:
    """Largest resident memory of this process so far; ru_maxrss would count that of its parent too."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def main() -> None:
    name, root, *arguments = sys.argv[1:]
    step = STEPS[name](Path(root), *arguments)
    loaded = peak_mb()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb(), "imports_mb": loaded}))


if __name__ == "__main__":
    main()
