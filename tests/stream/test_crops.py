"""Several crops of one decode: their windows, their pixels, and what is refused."""

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b.arguments import BadValue
from sa1b.stream import decode
from sa1b.stream.crops import CropGroup, MultiCrop
from sa1b.stream.decode import EncodedImage
from sa1b.stream.decoders import decoder
from sa1b.stream.transform import Frame, TransformError, Visit
from tests.shards import tiny

CROPS = MultiCrop((CropGroup(2, 24, (0.3, 1.0)), CropGroup(3, 10, (0.05, 0.3), flip=0.0)))


def smooth(height: int = 600, width: int = 800) -> Any:
    y, x = np.mgrid[:height, :width]
    waves = 127 + 120 * np.sin(x / 60) * np.cos(y / 45)
    return np.stack([255 * x / width, 255 * y / height, waves], axis=2).astype(np.uint8)


def visit(image_id: int, epoch: int = 0) -> Visit:
    no_annotations: Any = None
    return Visit(image_id, epoch, 7, 0, no_annotations)


def test_the_square_holds_all_crops_without_overlap() -> None:
    for crops in (
        CROPS,
        MultiCrop(),
        MultiCrop((CropGroup(1, 8),)),
        MultiCrop((CropGroup(5, 96), CropGroup(1, 224))),
    ):
        side = crops.image_size
        frame = crops(Frame.whole_image(600, 800, side), visit(1))
        used = np.zeros((side, side), int)
        for one in frame.crops:
            used[one.row : one.row + one.size, one.column : one.column + one.size] += 1
        assert used.max() == 1
        assert used.sum() == sum(one.count * one.size**2 for one in crops.groups)
        assert Counter(one.size for one in frame.crops) == {one.size: one.count for one in crops.groups}
    assert MultiCrop().image_size == 448


def test_windows_have_the_areas_of_their_group_and_depend_on_the_visit_alone() -> None:
    start = Frame.whole_image(600, 800, CROPS.image_size)
    frames = [CROPS(start, visit(image_id, epoch)) for image_id in range(40) for epoch in range(5)]
    assert frames == [CROPS(start, visit(image_id, epoch)) for image_id in range(40) for epoch in range(5)]
    windows = {one.window for frame in frames for one in frame.crops}
    assert len(windows) > 900
    for size, low, high in ((24, 0.3, 1.0), (10, 0.05, 0.3)):
        parts = [
            one.window[2] * one.window[3] / 480_000
            for frame in frames
            for one in frame.crops
            if one.size == size
        ]
        assert low * 0.9 < min(parts) < low * 1.5
        assert high * 0.6 < max(parts) < high * 1.02
    flipped = [one.flip for frame in frames for one in frame.crops if one.size == 24]
    assert 0.4 < np.mean(flipped) < 0.6
    assert not any(one.flip for frame in frames for one in frame.crops if one.size == 10)
    mirrored = CROPS(replace(start, flip=True), visit(0))
    assert [one.flip for one in mirrored.crops] == [not one.flip for one in CROPS(start, visit(0)).crops]


def test_crops_have_the_pixels_of_a_full_decode_that_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = smooth()
    data = simplejpeg.encode_jpeg(pixels, 95, "RGB", "444")
    sizes: list[tuple[int, ...]] = []
    real = decode.jpeg.decode_scaled

    def scaled(*arguments: Any) -> Any:
        image, eighths = real(*arguments)
        sizes.append(image.shape)
        return image, eighths

    monkeypatch.setattr(decode.jpeg, "decode_scaled", scaled)
    for image_id in range(20):
        frame = CROPS(Frame.whole_image(600, 800, CROPS.image_size), visit(image_id))
        out = torch.full((1, CROPS.image_size, CROPS.image_size, 3), 77, dtype=torch.uint8)
        assert decoder("cpu").decode([EncodedImage(data, frame)], out) == [None]
        rest = np.ones(out.shape[1:3], np.bool_)
        for one in frame.crops:
            x, y, width, height = one.window
            place = slice(one.row, one.row + one.size), slice(one.column, one.column + one.size)
            rest[place] = False
            found = out[0].numpy()[place].astype(int)
            wanted = cv2.resize(
                pixels[y : y + height, x : x + width], (one.size, one.size), interpolation=cv2.INTER_AREA
            )
            wanted = wanted[:, ::-1] if one.flip else wanted
            assert np.abs(found - wanted).mean() < 4
        assert not out[0].numpy()[rest].any()
    assert len(sizes) == 20  # one decode for all crops
    assert max(height for height, *_ in sizes) <= 300  # scaled down by the decoder
    assert {height for height, *_ in sizes} == {75, 150, 225, 300} & {height for height, *_ in sizes}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crops")
    tiny.make_tar(folder / "sa_000020.tar", range(1, 7))
    tiny.ingest_tar(folder / "sa_000020.tar", folder / "shards")
    return folder / "shards"


def stream(root: Path, **options: Any) -> sa1b.Stream:
    given = {"masks": 0, "image_size": CROPS.image_size, "transform": CROPS, "global_batch": 3, **options}
    return sa1b.Stream(root, order="sequential", damage_log=root.parent / "damage.jsonl", **given)


def test_a_stream_of_crops_is_the_same_in_workers_and_threads(root: Path) -> None:
    batches = [CROPS.split(batch.images) for batch in stream(root)]
    assert [tuple(one.shape) for one in batches[0]] == [(3, 2, 3, 24, 24), (3, 3, 3, 10, 10)]
    assert all(one.dtype == torch.uint8 for one in batches[0])
    for other in (
        DataLoader(stream(root), batch_size=None, num_workers=2),
        sa1b.Loader(stream(root)),
        pickle.loads(pickle.dumps(stream(root))),
    ):
        for wanted, batch in zip(batches, other, strict=True):
            found = CROPS.split(batch.images)
            assert all(torch.equal(one, two) for one, two in zip(wanted, found, strict=True))
    assert "MultiCrop" in stream(root).state_dict()["options"]["transform"]


def test_what_crops_cannot_be_used_with_is_named(root: Path) -> None:
    with pytest.raises(BadValue, match="must be used with masks=0"):
        stream(root, masks=4)
    with pytest.raises(TransformError, match=f"image_size=64 must be {CROPS.image_size}, the image_size of"):
        next(iter(stream(root, image_size=64)))
