"""What a layer costs a stream: processor time of an epoch of full-size images without and with layers.

`pytest benchmarks/test_layers.py -s` prints a table. Epochs take turns, in one thread, so that other work on
the machine affects all of them alike. `added` gives every image as many masks again, with other ids;
`replaced` replaces every mask; `some` does so in a tenth of the images.
"""

import statistics
import time
from pathlib import Path

import pytest

import sa1b
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.layer.add import add_layer
from sa1b.programs.synthetic.source_tars import write_tars
from sa1b.shards.documents import Options

IMAGES, ROUNDS = 40, 9


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    for name, images in (("all", IMAGES), ("some", IMAGES // 10)):
        write_tars(folder / name, tars=1, images_per_tar=images, seed=0, long_side=2250, workers=1)
    root = folder / "shards"
    reshard([folder / "all"], root, Options(), Policy(), IngestRun(quiet=True))
    add_layer(str(root), (folder / "all",), "added", quiet=True)
    add_layer(str(root), (folder / "all",), "replaced", existing="replace", quiet=True)
    add_layer(str(root), (folder / "some",), "some", existing="replace", quiet=True)
    return root


def test_a_layer_costs_a_stream_little(root: Path) -> None:
    layers = {"none": (), "none again": ()} | {name: (name,) for name in ("added", "replaced", "some")}
    streams = {
        name: sa1b.Stream(root, global_batch=4, image_size=1024, masks=64, layers=names)
        for name, names in layers.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(ROUNDS):
        for name, stream in streams.items():
            stream.set_epoch(0)
            began = time.process_time()
            assert sum(len(batch) for batch in stream) == IMAGES
            seconds[name].append(time.process_time() - began)
    print(f"\n{'layer':12}{'ms an image':>12}{'against none':>14}")
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["none"], strict=True))
        print(f"{name:12}{1e3 * statistics.median(values) / IMAGES:12.2f}{ratio - 1:14.1%}")
