"""What a page of documentation may start with: made once for all pages, copied into the folder of each."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sa1b.sam.model import PRESETS, Sam
from sa1b.sam.published import write_weights
from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import read_tasks
from sa1b.synthetic.source_tars import write_tar
from tests.docs.blocks import REPOSITORY
from tests.shards.tiny import ingest_tar

IMAGES = 8  # in each tar
FIRST_IDS = {"sa_000020": 223750, "sa_000021": 234940}
# Training in a page is this small, whatever its flags say: later flags replace earlier ones.
TRAINING = (
    *("--model.image-size", "64", "--model.width", "32", "--model.depth", "2", "--model.heads", "2"),
    *("--model.global-blocks", "1", "--model.window", "2", "--model.channels", "32", "--optim.steps", "2"),
    *("--optim.warmup", "1", "--data.global-batch", "2", "--data.masks", "4", "--data.threads", "1"),
    *("--checkpoint.every", "2", "--logging.tensorboard", "False"),
)


def downloads(folder: Path) -> None:
    """Two source tars in the download's form, longer side 256 pixels."""
    folder.mkdir()
    for name, first_id in FIRST_IDS.items():
        write_tar(folder / f"{name}.tar", images=IMAGES, first_id=first_id, long_side=256)


def shards(path: Path) -> None:
    """The dataset directory of `downloads`."""
    for name in FIRST_IDS:
        ingest_tar(path.parent / "downloads" / f"{name}.tar", path)
    write_dataset(path, read_tasks(path))


def run(path: Path) -> None:
    """A finished training run on `shards`, of two steps."""
    command = [sys.executable, "-m", "sa1b.train", "--preset", "tiny", "--data.root", "shards"]
    subprocess.run(
        [*command, "--out", path.name, *TRAINING],
        cwd=path.parent,
        env=environment(),
        check=True,
        capture_output=True,
    )


def weights(path: Path) -> None:
    """Weights in the form of the published files, of the model that `TRAINING` asks for."""
    small = replace(
        PRESETS["tiny"], image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32
    )
    write_weights(path, Sam(small).state_dict())


def photo(path: Path) -> None:
    """A photograph of 640 x 480 pixels, in one colour."""
    Image.new("RGB", (640, 480), (90, 120, 150)).save(path)


def captions(path: Path) -> None:
    """A table with a caption for each image but the last one."""
    ids = [first + i for first in FIRST_IDS.values() for i in range(IMAGES)][:-1]
    pq.write_table(pa.table({"image_id": ids, "caption": [f"image {i}" for i in ids]}), path)


# By the name that `<!-- with: NAME -->` gives and the path has; what each needs is made before it.
MAKERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "downloads": (downloads, ()),
    "shards": (shards, ("downloads",)),
    "run": (run, ("shards",)),
    "sam_vit_b_01ec64.pth": (weights, ()),
    "photo.jpg": (photo, ()),
    "captions.parquet": (captions, ()),
}


def copy_to(folder: Path, name: str, made: Path) -> None:
    """Copy a material into the folder of a page; it is made in `made` on first use.

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


def environment(commands: Path | None = None) -> dict[str, str]:
    """The environment of a page: this checkout's package, and `commands` before all other folders of PATH."""
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "PATH": f"{commands}{os.pathsep}{path}" if commands else path,
    }


def write_commands(folder: Path) -> None:
    """`sa1b` and `python` of this interpreter and this checkout; `sa1b train` trains the smallest model."""
    small = " ".join(TRAINING)
    scripts = {
        "python": f'exec {sys.executable} "$@"',
        "sa1b": f'if [ "${{1-}}" = train ] && [ "${{2-}}" != --help ]; then set -- "$@" {small}; fi\n'
        f'exec {sys.executable} -m sa1b "$@"',
    }
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
