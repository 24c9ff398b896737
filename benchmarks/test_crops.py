"""Two crops of 224 and six of 96 pixels of each image, as DINOv2 trains: this package beside the usual ways.

`pytest benchmarks/test_crops.py -s` prints the processor time of an image in one thread, for synthetic images
of 2250 pixels, and for the photographs in a folder that SA1B_PHOTOGRAPHS names. Contenders take turns, so
that other work on the machine affects all of them alike. All give uint8 tensors of the same shapes, from
files in memory. The crops of the others are those of torchvision's RandomResizedCrop: `Image.crop` and
`Image.resize` of Pillow, bicubic, or slices and `cv2.resize` of OpenCV, bilinear. `decoder alone` is
libjpeg-turbo's time for the files at the scale that the crops need: this package cannot be faster.
"""

import io
import itertools
import os
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

import sa1b
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.synthetic.source_tars import write_tars
from sa1b.shards import jpeg
from sa1b.shards.documents import Options
from sa1b.sources.discovery import formats_with
from sa1b.sources.images import ImageFolder
from sa1b.stream import decode
from sa1b.stream.crops import MultiCrop

IMAGES, ROUNDS = 24, 5
CROPS = MultiCrop()
Windows = list[tuple[int, tuple[int, int, int, int]]]


def windows(random: np.random.Generator, height: int, width: int) -> Windows:
    """Size and window of each crop; as torchvision's RandomResizedCrop, without its central crop."""
    found: Windows = []
    for group in CROPS.groups:
        while len([one for one in found if one[0] == group.size]) < group.count:
            area = height * width * random.uniform(*group.area)
            ratio = np.exp(random.uniform(*np.log(group.aspect)))
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                x, y = random.integers(0, width - w + 1), random.integers(0, height - h + 1)
                found.append((group.size, (int(x), int(y), w, h)))
    return found


def tensors(crops: list[Any], random: np.random.Generator) -> list[torch.Tensor]:
    """The crops by group, some mirrored."""
    arrays = [np.asarray(one) for one in crops]
    mirrored = [one[:, ::-1] if random.random() < 0.5 else one for one in arrays]
    stacks = [np.stack(mirrored[:2]), np.stack(mirrored[2:])]
    return [torch.from_numpy(one).permute(0, 3, 1, 2).contiguous() for one in stacks]


def by_pillow(data: bytes, random: np.random.Generator) -> list[torch.Tensor]:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    crops = [
        image.crop((x, y, x + w, y + h)).resize((size, size), Image.Resampling.BICUBIC)
        for size, (x, y, w, h) in windows(random, image.height, image.width)
    ]
    return tensors(crops, random)


def by_opencv(data: bytes, random: np.random.Generator) -> list[torch.Tensor]:
    image = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    crops = [
        cv2.resize(image[y : y + h, x : x + w], (size, size), interpolation=cv2.INTER_LINEAR)
        for size, (x, y, w, h) in windows(random, *image.shape[:2])
    ]
    return tensors(crops, random)


def of_folder(files: list[Path]) -> Iterator[bytes]:
    return (path.read_bytes() for path in files)


def of_webdataset(tar: Path) -> Iterator[bytes]:
    return (
        sample["jpg"] for sample in webdataset.WebDataset(str(tar), shardshuffle=False, empty_check=False)
    )


def photographs(folder: Path, origin: str) -> list[Path]:
    """The files of a benchmark, with their names in a new folder."""
    files = folder / "images"
    files.mkdir()
    if origin == "synthetic":
        write_tars(folder / "tars", tars=1, images_per_tar=IMAGES, seed=0, long_side=2250, workers=1)
        with tarfile.open(next((folder / "tars").glob("*.tar"))) as tar:
            found = [tar.extractfile(member) for member in tar.getmembers() if member.name.endswith(".jpg")]
            data = [file.read() for file in found if file is not None]
    else:
        data = [path.read_bytes() for path in sorted(Path(origin).glob("*.jpg"))]
    for number, one in enumerate(itertools.islice(itertools.cycle(data), IMAGES)):
        (files / f"{number}.jpg").write_bytes(one)
    return sorted(files.iterdir())


def decoder_alone(stream: sa1b.Stream, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that decodes what the stream decodes, and does nothing else."""
    calls: list[Any] = []
    real = jpeg.decode_scaled

    def recorded(data: Any, *arguments: Any) -> Any:
        calls.append((bytes(data), *arguments[:2]))
        return real(data, *arguments)

    with monkeypatch.context() as context:
        context.setattr(decode.jpeg, "decode_scaled", recorded)
        assert sum(len(batch) for batch in stream) == IMAGES

    def run() -> int:
        for data, stored, least in calls:
            real(data, stored, least, jpeg.scratch("decode", *stored))
        return len(calls)

    return run


@pytest.mark.parametrize("origin", ["synthetic", os.environ.get("SA1B_PHOTOGRAPHS", "")])
def test_crops_of_one_decode(origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not origin:
        pytest.skip("set SA1B_PHOTOGRAPHS to a folder of JPEGs")
    files = photographs(tmp_path, origin)
    tar = tmp_path / "images.tar"
    with tarfile.open(tar, "w") as archive:
        for path in files:
            archive.add(path, path.name)
    run = IngestRun(formats=formats_with(ImageFolder(Policy().max_pixels)), quiet=True)
    reshard([tmp_path / "images"], tmp_path / "shards", Options(), Policy(), run)
    stream = sa1b.Stream(
        tmp_path / "shards", global_batch=4, masks=0, image_size=CROPS.image_size, transform=CROPS
    )
    random = np.random.default_rng(0)
    cv2.setNumThreads(1)
    torch.set_num_threads(1)

    def ours() -> int:
        return sum(len(CROPS.split(batch.images)[0]) for batch in stream)

    def others(read: Callable[[], Iterator[bytes]], crop: Callable[..., Any]) -> Callable[[], int]:
        return lambda: sum(len(crop(data, random)) == 2 for data in read())

    contenders: dict[str, Callable[[], int]] = {
        "sa1b.Stream, MultiCrop": ours,
        "decoder alone": decoder_alone(stream, monkeypatch),
        "folder, OpenCV": others(lambda: of_folder(files), by_opencv),
        "webdataset, OpenCV": others(lambda: of_webdataset(tar), by_opencv),
        "folder, Pillow": others(lambda: of_folder(files), by_pillow),
        "webdataset, Pillow": others(lambda: of_webdataset(tar), by_pillow),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            stream.set_epoch(0)
            began = time.process_time()
            assert run() == IMAGES
            seconds[name].append(time.process_time() - began)
    megapixels = np.mean([np.prod(Image.open(path).size) for path in files]) / 1e6
    print(f"\n{origin}, {megapixels:.1f} megapixels")
    print(f"{'':24}{'ms an image':>12}{'images/s, 2 cores':>19}{'times sa1b':>12}")
    for name, values in seconds.items():
        each = statistics.median(values) / IMAGES
        ratio = statistics.median(
            a / b for a, b in zip(values, seconds["sa1b.Stream, MultiCrop"], strict=True)
        )
        print(f"{name:24}{1e3 * each:12.2f}{2 / each:19.0f}{ratio:12.2f}")
