"""Materials of the pages of documentation: made once, and copied into the folder of each page."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from sa1b.programs.synthetic.source_tars import write_tar
from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.published import write_weights
from tests import processes
from tests.shards.tiny import ingest_tar

QUICK = ("--optim.steps", "2", "--optim.warmup", "1", "--data.global-batch", "2", "--data.masks", "4")
IMAGES = 8  # images in each tar
FIRST_IDS = {"sa_000020": 223750, "sa_000021": 234940}


def downloads(folder: Path) -> None:
    """Two source tars in the form of the download, with images of 256 pixels."""
    folder.mkdir()
    for name, first_id in FIRST_IDS.items():
        write_tar(folder / f"{name}.tar", images=IMAGES, first_id=first_id, long_side=256)


def shards(path: Path) -> None:
    """The dataset directory of `downloads`."""
    for name in FIRST_IDS:
        ingest_tar(path.parent / "downloads" / f"{name}.tar", path)


def run(path: Path) -> None:
    """A finished training run of two steps on `shards`."""
    command = [sys.executable, "-m", "sa1b.train", "--preset", "tiny", "--data.root", "shards"]
    processes.run([*command, "--out", path.name, *QUICK], cwd=path.parent, check=True, capture_output=True)


def weights(path: Path) -> None:
    """Weights of the sizes of `vit_b`, all zero, in the form of the published file."""
    with torch.device("meta"):
        shapes = Sam(PRESETS["vit_b"]).state_dict()
    write_weights(path, {name: torch.zeros(value.shape) for name, value in shapes.items()})


def photo(path: Path) -> None:
    """A photograph of 640 x 480 pixels, in one colour."""
    Image.new("RGB", (640, 480), (90, 120, 150)).save(path)


def captions(path: Path) -> None:
    """A table with a caption for each image but the last one."""
    ids = [first + i for first in FIRST_IDS.values() for i in range(IMAGES)][:-1]
    pq.write_table(pa.table({"image_id": ids, "caption": [f"image {i}" for i in ids]}), path)


# Name in `<!-- with: NAME -->` and of the path -> function; the materials that it needs are made first.
MAKERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "downloads": (downloads, ()),
    "shards": (shards, ("downloads",)),
    "run": (run, ("shards",)),
    "sam_vit_b_01ec64.pth": (weights, ()),
    "photo.jpg": (photo, ()),
    "captions.parquet": (captions, ()),
}


def copy_to(folder: Path, name: str, made: Path) -> None:
    """Copy a material into the folder of a page; on first use it is made in `made`.

    Raises:
        KeyError: no material has this name.
    """
    _make(made, name)
    source, target = made / name, folder / name
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def _make(made: Path, name: str) -> None:
    maker, needs = MAKERS[name]
    for need in needs:
        _make(made, need)
    if not (made / name).exists():
        maker(made / name)
