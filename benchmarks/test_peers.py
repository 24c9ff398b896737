"""The speed of the loader, its limiting stage, and the speed of other loaders.

    pytest benchmarks/                               one round of two questions, under five minutes
    pytest benchmarks/test_peers.py                  24 synthetic images, twenty minutes on two cores
    pytest benchmarks/test_peers.py --data ROOT      the user's shards
    pytest benchmarks/test_peers.py --full           all outputs, workers, sizes

Same images, same masks, same output of all contenders: images as uint8 in the padded square of 1024
pixels and at most 64 masks, (a) at 1024 x 1024, (b) at 256 x 256, nearest, as torch tensors on the CPU.
Contenders run in turns, each in a process of its own, and are compared round by round: a machine's speed
drifts, the ratios of a round much less. The tables come at the end, as
benchmarks/results/<machine>.json, and as report.html.

The other loaders: `pip install --no-deps -r benchmarks/peers/requirements.txt`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import sa1b
from benchmarks import growth, material, object_store, own_time, report, tables, tool_rates
from benchmarks.conftest import IMAGES, ROUNDS, TABLES
from benchmarks.peers import extracted_files, measured, pixels
from benchmarks.peers.contenders import CONTENDERS, Contender
from benchmarks.peers.task import Delivered, Pair, Place, Task, pairs
from sa1b.errors import ShardError, SourceError
from sa1b.masks.grid import framed, framed_size
from sa1b.storage.atomic import json_bytes
from sa1b.storage.errors import StorageError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RESULTS = Path(__file__).parent / "results"
QUESTIONS = {
    "a-original": ("(a) masks at 1024 x 1024, original-size JPEGs", "original", 1024),
    "a-1024": ("(a) masks at 1024 x 1024, 1024-px JPEGs", "1024", 1024),
    "b-1024": ("(b) masks at 256 x 256, 1024-px JPEGs", "1024", 256),
    "b-original": ("(b) masks at 256 x 256, original-size JPEGs", "original", 256),
    "c-original": ("(c) images and masks at 512 x 512, original-size JPEGs", "original", 512),
    "runs-original": ("Masks as runs, original-size JPEGs", "original", None),
    "runs-1024": ("Masks as runs, 1024-px JPEGs", "1024", None),
}
BATCHES = 1  # compared pixel by pixel
CORES = 2  # number of workers if only one number is measured; the default is chosen for it
DEFAULT = ("a-original", "a-1024", "b-1024", "runs-original", "runs-1024")
PEERS = [name for name, contender in CONTENDERS.items() if contender.kind != "limit"]


class Clock:
    """A timer that replays measured times. pytest-benchmark measures functions one after the other, and a
    machine's speed drifts meanwhile. So it is given the times of the interleaved rounds.
    """

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def go_on(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(scope="module")
def options(request: pytest.FixtureRequest) -> Any:
    return request.config.option


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, options: Any) -> material.Material:
    try:
        return material.make(tmp_path_factory.mktemp("peers"), options.images, options.data)
    except (SourceError, ShardError, StorageError) as error:
        if options.data is None:
            raise
        pytest.exit(f"--data {options.data}: {error}", returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(scope="module")
def document(
    request: pytest.FixtureRequest, images: material.Material, options: Any
) -> Iterator[dict[str, Any]]:
    """The results: filled by the tests, printed at the end and, if they are complete, written."""
    made: dict[str, Any] = {
        "machine": material.machine(),
        "load": os.getloadavg()[0],
        "options": {name: getattr(options, name) for name in ("images", "rounds", "full")},
        "material": material.statistics(images),
    }
    yield made
    made["growth"] = made.get("growth", []) + [
        curve.document() for curve in growth.workers(made.get("comparison", []))
    ]
    if "stages" in made:
        made["verdict"] = own_time.verdict(made)
    shown = request.config.stash[TABLES]
    shown += tables.all_tables(made)
    missing = {key for key in DEFAULT if QUESTIONS[key][1] in images.roots} - {
        question["key"] for question in made.get("comparison", [])
    }
    if request.session.testsfailed or missing or "stages" not in made:
        why = "a test failed" if request.session.testsfailed else "only a part was measured"
        shown.append(f"\nNothing was written to {RESULTS}: {why}.")
        return
    usual = (options.images, options.rounds, options.data) == (IMAGES, ROUNDS, None)
    path = RESULTS / f"{material.name_of(made['machine'])}{'' if usual else '-own'}.json"
    try:
        RESULTS.mkdir(exist_ok=True)
        path.write_bytes(json_bytes(made))
        (RESULTS / "report.html").write_text(report.page(made))
        shown.append(f"\n{path}\n{RESULTS / 'report.html'}")
    except OSError as error:
        shown.append(f"\nThe results could not be written: {error}")


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("size", [1024, 256])
def test_everybody_delivers_the_same_tensors(images: material.Material, name: str, size: int) -> None:
    """Outputs are equal bit for bit; with OpenCV's resize, where it takes the same pixel."""
    contender, task = installed(name), Task(size=size)
    sources = {pair.image_id: pair for pair in pairs(images.root)}
    place = images.place(contender, next(iter(images.roots)))
    for image_id, (picture, masks) in first(contender.batches(place, task, 0), BATCHES):
        source = sources[image_id]
        expected_picture, expected_masks = expected(place, task, source)
        assert np.abs(picture.astype(np.int16) - expected_picture).mean() < 2
        if contender.kind == "peer":
            size_of_source = json.loads(source.text)["image"]
            rows, columns = (
                same_pixel(size_of_source["height"], size_of_source["width"], size, axis) for axis in (0, 1)
            )
            assert rows.any()
            assert columns.any()
            assert np.array_equal(masks[:, rows][:, :, columns], expected_masks[:, rows][:, :, columns])
        else:
            assert np.array_equal(masks, expected_masks)


@pytest.mark.parametrize("key", QUESTIONS)
def test_comparison(images: material.Material, document: dict[str, Any], options: Any, key: str) -> None:
    """All contenders in interleaved rounds."""
    if key not in DEFAULT and not options.full:
        pytest.skip("only with --full")
    title, kind, size = QUESTIONS[key]
    having(images, kind)
    task = Task(size=size, image_size=512 if size == 512 else 1024)
    entries, missing = [], {}
    for name, contender in CONTENDERS.items():
        if size is None and (contender.kind != "ours" or contender.function == "drawn"):
            continue
        if contender.missing():
            missing[name] = f"not run: {', '.join(contender.missing())} not installed"
            continue
        entries += [
            (contender, images.place(contender, kind), workers)
            for workers in numbers_of_workers(contender, key, full=options.full)
        ]
    count = len(sa1b.open(images.root))
    ours = (2 if kind == "original" else 4) * count  # some tenths of a second
    others = 2 * count // 3  # images of an epoch, whose first batches are delivered before the measurement
    rounds = {"ours": ours, "peer": others, "tuned": others, "limit": 4 * count}
    rows = measured.compare(entries, task, options.rounds, rounds, resume=key == "a-original")
    best = measured.best(rows, "ours")
    documents = [row.document() for row in rows]
    for row, made in zip(rows, documents, strict=True):
        if row.kind in ("peer", "tuned"):
            made["slower"] = measured.ratio(row, best)
    ratios = {}
    for other_kind in ("peer", "tuned"):
        if any(row.kind == other_kind for row in rows):
            other = measured.best(rows, other_kind)
            ratios[other_kind] = measured.ratio(other, best) | {
                "name": other.name,
                "workers": other.workers,
                "cpu": other.document()["cpu_seconds"] / best.document()["cpu_seconds"],
            }
    delivered = [row.delivered for row in rows if row.kind != "limit"]
    assert len({tuple(each["ids"]) for each in delivered}) == 1
    levels = [each["level"] for each in delivered]
    assert max(levels) - min(levels) < 2
    if size is not None:
        assert len({each["masks"] for each in delivered}) == 1
        foreground = [each["foreground"] for each in delivered]
        assert max(foreground) < 1.005 * min(foreground)
    document.setdefault("comparison", []).append(
        {
            "key": key,
            "title": title,
            "jpegs": kind,
            "rows": documents,
            "best": best.name,
            "best_workers": best.workers,
            "ratios": ratios,
            "missing": missing,
        }
    )


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("key", QUESTIONS)
@pytest.mark.parametrize(
    ("name", "workers"), [(each.name, workers) for each in CONTENDERS.values() for workers in each.workers]
)
def test_seconds_an_image(
    benchmark: Any, document: dict[str, Any], key: str, name: str, workers: int
) -> None:
    """The rounds of the comparison as groups of pytest-benchmark, for its options and its JSON."""
    questions = {question["key"]: question for question in document.get("comparison", [])}
    rows = {(row["name"], row["workers"]): row for row in questions.get(key, {"rows": []})["rows"]}
    if (name, workers) not in rows:
        pytest.skip("not in this run's comparison")
    best = questions[key]["ratios"].get("peer", {"name": None, "workers": None})
    benchmark.group = f"{questions[key]['title']}: an image"
    benchmark.extra_info["reference"] = (best["name"], best["workers"]) == (name, workers)
    seconds = rows[name, workers]["seconds_of_rounds"]
    rounds = iter(seconds)
    benchmark.pedantic(lambda: CLOCK.go_on(next(rounds)), rounds=len(seconds))


def test_where_our_time_goes(images: material.Material, document: dict[str, Any], options: Any) -> None:
    document["stages"] = {kind: own_time.stages(root, Task(size=1024)) for kind, root in images.roots.items()}
    document["storage"] = own_time.storage(images.folder, images.root, options.data)


def test_tools(images: material.Material, document: dict[str, Any], options: Any) -> None:
    having(images, "original")
    document["tools"] = tool_rates.measure(images.folder / "tools", images.roots["original"], options.rounds)


def test_growth(images: material.Material, document: dict[str, Any], options: Any) -> None:
    counts = [10_000, 100_000, 1_000_000, growth.ALL] if options.full else [10_000, 1_000_000]
    sizes = [256, 512, 1024, 2048] if options.full else [512, 1024]
    rounds = options.rounds if options.full else 1
    curves = growth.samples(images.folder, counts, rounds)
    assert [len(next(iter(curve.series.values()))) for curve in curves] == [len(counts)] * 2
    document["growth"] = [curve.document() for curve in curves]
    having(images, "original")
    curves = [
        growth.masks(images.folder, images, [10, 100, 400], rounds),
        growth.image_sizes(images, sizes, rounds),
    ]
    assert [len(next(iter(curve.series.values()))) for curve in curves] == [3, len(sizes)]
    document["growth"] += [curve.document() for curve in curves]


def test_object_store(images: material.Material, document: dict[str, Any], options: Any) -> None:
    latencies = object_store.LATENCIES
    some = {"original": latencies if options.full else latencies[1:2], "1024": latencies}
    document["object_store"] = object_store.measure(images.folder / "store", images, some, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no GPU here")
def test_device(images: material.Material, document: dict[str, Any]) -> None:
    document["gpu"] = own_time.device(images.root, Task(size=1024), images.folder)


def numbers_of_workers(contender: Contender, key: str, *, full: bool) -> tuple[int, ...]:
    """The numbers of workers: all for our default and the limits; for others the cores, unless --full."""
    every = full or contender.kind == "limit" or (contender.kind == "ours" and key == DEFAULT[0])
    return contender.workers if every else (CORES,)


def having(images: material.Material, kind: str) -> None:
    if kind not in images.roots:
        pytest.skip(f"not run: these shards hold no JPEGs of {kind} size")


def installed(name: str) -> Contender:
    contender = CONTENDERS[name]
    if contender.missing():
        pytest.skip(f"{', '.join(contender.missing())}: see benchmarks/peers/requirements.txt")
    return contender


def expected(place: Place, task: Task, source: Pair) -> tuple[Any, Any]:
    """Pixels and masks of an image by pycocotools and integer indexing."""
    how = {"picture": extracted_files.scaled, "mask": pixels.pick}
    ((_, parts),) = split(pixels.collate(place, task, [(source.jpeg, source.text)], **how))
    return parts


def first(batches: Iterator[Delivered], count: int) -> list[tuple[int, tuple[Any, Any]]]:
    """The images of the first batches, copied: id, picture [S, S, 3] and masks."""
    return [each for _ in range(count) for each in split(next(batches))]


def split(batch: Delivered) -> Iterator[tuple[int, tuple[Any, Any]]]:
    assert batch.images is not None
    assert batch.masks is not None
    ends = np.cumsum(batch.counts)
    for i, image_id in enumerate(batch.ids):
        masks = batch.masks[ends[i] - batch.counts[i] : ends[i]]
        yield image_id, (batch.images[i].permute(1, 2, 0).numpy().copy(), masks.numpy().copy())


def same_pixel(height: int, width: int, size: int, axis: int) -> Any:
    """Whether OpenCV's nearest takes the source pixel of the integer rule, along one axis; bool [size]."""
    own = framed((height, width), 1024, size)[axis].sources()
    taken = framed_size(height, width, size)[axis]
    line = np.arange((height, width)[axis], dtype=np.int32)
    theirs = np.full(size, -1)
    theirs[:taken] = cv2.resize(line[None], (taken, 1), interpolation=cv2.INTER_NEAREST_EXACT)[0]
    same = own == theirs
    same[taken:] &= own[taken:] == -1
    return same
