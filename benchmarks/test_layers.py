"""What a layer costs a stream: processor time of an epoch of full-size images without and with layers.

`pytest benchmarks/test_layers.py -s` prints a table. The streams take turns with each batch, in one thread,
and of each batch the fastest of the rounds counts: the row `none again` shows what is left of the noise.
`added` gives every image as many masks again, with other ids; `replaced` replaces every mask; `some` does so
in a tenth of the images.
"""

import time
from pathlib import Path

import numpy as np
import pytest

import sa1b
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.layer.add import add_layer
from sa1b.programs.synthetic.source_tars import write_tars
from sa1b.shards.documents import Options

IMAGES, BATCH, ROUNDS = 40, 4, 10


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
        name: sa1b.Stream(root, global_batch=BATCH, image_size=1024, masks=64, layers=names)
        for name, names in layers.items()
    }
    seconds = {name: np.zeros((ROUNDS, IMAGES // BATCH)) for name in streams}
    for number in range(ROUNDS):
        for stream in streams.values():
            stream.set_epoch(0)
        batches = {name: iter(stream) for name, stream in streams.items()}
        for at in range(IMAGES // BATCH):
            for name in np.roll([*streams], -number).tolist():  # each is first, second, ... equally often
                began = time.process_time()
                next(batches[name])
                seconds[name][number, at] = time.process_time() - began
    fastest = {name: values.min(axis=0).sum() for name, values in seconds.items()}
    print(f"\n{'layer':12}{'ms an image':>12}{'against none':>14}")
    for name, value in fastest.items():
        print(f"{name:12}{1e3 * value / IMAGES:12.2f}{value / fastest['none'] - 1:14.1%}")
