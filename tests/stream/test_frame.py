"""Positions of images and masks in the square: each mask equals decoding, numpy's crop and indexing, for every frame."""

import json
import textwrap
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
import torch
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as pycocotools
from torch.utils.data import DataLoader

import sa1b
from sa1b.masks import raster_torch
from sa1b.stream import transform
from sa1b.stream.decode import decode
from sa1b.stream.sample import RESIZES, SampleOptions, pick_masks
from sa1b.stream.transform import Frame, RandomCrop, ScaleJitter, TransformError, Visit
from tests.masks.samples import examples, pixel_masks
from tests.stream.annotated import annotations_of
from tests.stream.recorded import make_root
from tests.stream.test_stream import assert_equal

IMAGES = 14
SHIFT: list[Any] = [RandomCrop((0.2, 0.9), (0.5, 2.0)), ScaleJitter(0.3, 2.5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("frame"), IMAGES)


def stream_of(root: Path, **options: Any) -> sa1b.Stream:
    named = {"global_batch": 4, "micro_batch": 2, "image_size": 48, "masks": 4, "flip": 0.5, **options}
    return sa1b.Stream(root, damage_log=root.parent / "log.jsonl", **named)


def by_decode_and_index(pixels: npt.NDArray[Any], frame: Frame, size: int) -> npt.NDArray[Any]:
    """The square at `size` from a decoded mask or image [H, W, ...]: numpy slice, mirror, index."""
    x, y, width, height = frame.window
    part = pixels[y : y + height, x : x + width]
    part = part[:, ::-1] if frame.flip else part
    out = np.zeros((size, size, *part.shape[2:]), part.dtype)
    lines = []
    for source, taken in zip((height, width), frame.taken, strict=True):
        target = np.arange(size)
        read = ((2 * target + 1) * frame.image_size * source) // (2 * size * taken)
        lines.append((target[read < source], read[read < source]))
    (rows, source_rows), (columns, source_columns) = lines
    out[np.ix_(rows, columns)] = part[np.ix_(source_rows, source_columns)]
    return out


@st.composite
def frames(draw: st.DrawFn, height: int, width: int) -> Frame:
    x, y = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    window = (x, y, draw(st.integers(1, width - x)), draw(st.integers(1, height - y)))
    size = draw(st.integers(1, 40))
    return Frame(
        height,
        width,
        size,
        draw(st.sampled_from([window, (0, 0, width, height)])),
        draw(st.integers(1, size)),
        stretch=draw(st.booleans()),
        flip=draw(st.booleans()),
    )


class Fixed:
    """A transform that returns a given frame."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def __call__(self, frame: Frame, visit: Visit) -> Frame:
        return self.frame


@examples
@given(pixel_masks(), st.integers(1, 40), st.data())
def test_masks_boxes_and_points_of_any_frame_are_those_of_the_decoded_pixels(
    masks: npt.NDArray[np.bool_], size: int, data: st.DataObject
) -> None:
    annotations = annotations_of(masks)
    frame = data.draw(frames(*masks.shape[1:]))
    options = SampleOptions(image_size=frame.image_size, masks=10, transform=Fixed(frame))
    sample = pick_masks(annotations, options, 0, 0)
    assert sample.frame == frame
    x, y, width, height = frame.window
    inside = masks[:, y : y + height, x : x + width]
    assert sample.mask_index.tolist() == np.flatnonzero(inside.any((1, 2))).tolist()
    assert sample.areas.tolist() == inside.sum((1, 2))[sample.mask_index].tolist()
    batch = sa1b.stream.batch.collate(
        torch.zeros((1, frame.image_size, frame.image_size, 3), dtype=torch.uint8), [sample], [0], [True], 1
    )
    dense = batch.masks.dense(size)
    in_torch = raster_torch.rasterize_frame(
        batch.masks.runs,
        batch.masks.offsets,
        *batch.masks.sizes.unbind(1),
        frame.image_size,
        size,
        taken=batch.masks.taken,
    )
    assert torch.equal(dense, in_torch)
    assert torch.equal(batch.masks.empty(size), ~(dense != 0).flatten(1).any(1))
    scale = np.array(frame.taken) / (height, width)
    for mask, found, box, point in zip(
        masks[sample.mask_index], dense.numpy(), sample.boxes, sample.points, strict=True
    ):
        np.testing.assert_array_equal(found, by_decode_and_index(mask, frame, size))
        part = mask[y : y + height, x : x + width]
        part = part[:, ::-1] if frame.flip else part
        ys, xs = np.nonzero(part)
        edges = np.array([xs.min(), ys.min(), xs.max(), ys.max()]) + 0.5
        np.testing.assert_allclose(box, edges * [*scale[::-1], *scale[::-1]], rtol=1e-6)
        column, row = point / scale[::-1] - 0.5
        assert part[round(float(row)), round(float(column))]


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("transform", [None, SHIFT], ids=["plain", "transformed"])
def test_a_stream_gives_the_masks_that_pycocotools_decodes(root: Path, resize: str, transform: Any) -> None:
    dataset, compared = sa1b.open(root), 0
    for batch in islice(stream_of(root, resize=resize, transform=transform), 7):
        for size in (48, 13):
            dense = batch.masks.dense(size).numpy()
            for mask, index, image in zip(
                dense, batch.mask_index.tolist(), batch.masks.image.tolist(), strict=True
            ):
                annotations = dataset.by_id(int(batch.ids[image])).annotations
                coded = annotations.to_json()["annotations"][index]["segmentation"]
                x, y, width, height = batch.windows[image].tolist()
                part = pycocotools.decode(coded)[y : y + height, x : x + width]
                part = part[:, ::-1] if batch.flipped[image] else part
                taken = batch.framed_sizes[image].tolist()
                frame = Frame(height, width, 48, (0, 0, width, height), 48)
                assert batch.source_sizes[image].tolist() == [height, width]
                if resize != "pad":
                    assert taken[0] == taken[1]
                if resize == "crop":
                    assert height == width
                if transform is None:
                    assert max(taken) == 48
                    frame = replace(frame, stretch=resize == "stretch")
                    assert taken == list(frame.taken)
                lines = [
                    ((2 * np.arange(size) + 1) * 48 * n) // (2 * size * t)
                    for n, t in zip((height, width), taken, strict=True)
                ]
                rows, columns = (np.minimum(line, n) for line, n in zip(lines, (height, width), strict=True))
                shown = np.pad(part, ((0, 1), (0, 1)))
                np.testing.assert_array_equal(mask, shown[np.ix_(rows, columns)])
                compared += 1
    assert compared > 50


def test_crop_takes_the_middle_square() -> None:
    annotations = annotations_of(np.ones((1, 30, 41), np.bool_))
    sample = pick_masks(annotations, SampleOptions(image_size=64, resize="crop"), 0, 0)
    assert sample.frame.window == (5, 0, 30, 30)
    assert sample.frame.taken == (64, 64)
    assert sample.areas.tolist() == [900]


def smooth(height: int, width: int) -> npt.NDArray[np.uint8]:
    """An image that is nearly linear between pixels, so that resampled values reveal their positions."""
    rows, columns = np.mgrid[:height, :width]
    channels = (rows / height, columns / width, 0.5 + 0.4 * np.sin(rows / 31) * np.cos(columns / 23))
    return (np.stack(channels, axis=2) * 235 + 10).astype(np.uint8)


def resampled(image: npt.NDArray[np.uint8], frame: Frame) -> npt.NDArray[np.float64]:
    """Bilinear in float64 at the centres of the frame's pixels, [rows, columns, 3]."""
    x, y, width, height = frame.window
    rows, columns = frame.taken
    down = (np.arange(rows) + 0.5) * height / rows + y - 0.5
    across = (np.arange(columns) + 0.5) * width / columns + x - 0.5
    across = across[::-1] if frame.flip else across
    down, across = down.clip(y, y + height - 1), across.clip(x, x + width - 1)
    row, column = np.floor(down).astype(int), np.floor(across).astype(int)
    below = np.minimum(row + 1, image.shape[0] - 1)
    right = np.minimum(column + 1, image.shape[1] - 1)
    down, across = (down - row)[:, None, None], (across - column)[None, :, None]
    pixels = image.astype(np.float64)
    upper = pixels[row][:, column] * (1 - across) + pixels[row][:, right] * across
    lower = pixels[below][:, column] * (1 - across) + pixels[below][:, right] * across
    return upper * (1 - down) + lower * down


@pytest.mark.parametrize("stored", [(300, 400), (150, 200), (128, 171), (57, 76)], ids=str)
@pytest.mark.parametrize("side", [200, 64, 17])
def test_the_image_lies_where_its_frame_says(stored: tuple[int, int], side: int) -> None:
    image = smooth(300, 400)
    small = image if stored == (300, 400) else cv2.resize(image, stored[::-1], interpolation=cv2.INTER_AREA)
    jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(small), 98, "RGB", "444")
    random = np.random.default_rng(3)
    for number in range(12):
        width, height = int(random.integers(40, 400)), int(random.integers(40, 300))
        x, y = int(random.integers(0, 401 - width)), int(random.integers(0, 301 - height))
        window = (0, 0, 400, 300) if number == 0 else (x, y, width, height)
        frame = Frame(300, 400, 200, window, side, stretch=number % 3 == 0, flip=number % 2 == 1)
        buffer = np.full((200, 200, 3), 9, np.uint8)
        decode(jpeg, frame, buffer)
        rows, columns = frame.taken
        expected = resampled(image, frame)
        error = (buffer[:rows, :columns] - expected).mean((0, 1))
        # The first channel is a ramp of 235 down the image, the second one across.
        _, _, width, height = frame.window
        pixel = np.array([235 / 300 * height / rows, 235 / 400 * width / columns])
        assert (np.abs(error[:2]) < 0.55 * pixel + 1).all(), (number, frame, error, pixel)
        assert not buffer[rows:].any()
        assert not buffer[:, columns:].any()


def test_a_window_of_as_many_pixels_as_it_takes_is_a_slice_of_the_decoded_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    jpeg = simplejpeg.encode_jpeg(image, 90, "RGB", "420")
    whole = simplejpeg.decode_jpeg(jpeg)
    for flip in (False, True):
        frame = Frame(90, 120, 64, (17, 5, 64, 48), 64, flip=flip)
        buffer = np.full((64, 64, 3), 9, np.uint8)
        decode(jpeg, frame, buffer)
        part = whole[5:53, 17:81]
        np.testing.assert_array_equal(buffer[:48], part[:, ::-1] if flip else part)
        assert not buffer[48:].any()


# --- Transforms


def test_random_crops_have_their_areas_and_shapes_and_reach_everywhere() -> None:
    annotations = annotations_of(np.ones((1, 60, 80), np.bool_))
    crop = RandomCrop((0.2, 0.6), (0.5, 2.0))
    windows = np.array(
        [crop(Frame.whole_image(60, 80, 64), Visit(1, e, 0, 0, annotations)).window for e in range(2000)]
    )
    x, y, width, height = windows.T
    assert (x + width <= 80).all()
    assert (y + height <= 60).all()
    ratios, areas = width / height, width * height / 4800
    assert ratios.min() >= 0.45
    assert ratios.max() <= 2.2
    assert areas.max() < 0.63
    whole = areas[ratios < 1.5]  # wider ones may be cut by the image
    assert whole.min() > 0.17
    assert abs(whole.mean() - 0.4) < 0.03
    assert abs(np.median(np.log(ratios))) < 0.1
    assert {0, 80 - 30} <= set(x.tolist())
    assert (x == 0).any()
    assert (y + height == 60).any()


def test_a_crop_of_the_whole_area_keeps_the_image_and_one_of_aspect_1_is_the_square() -> None:
    annotations = annotations_of(np.ones((1, 60, 80), np.bool_))
    frame = Frame.whole_image(60, 80, 64)
    found = {RandomCrop((1, 1), (1, 1))(frame, Visit(1, e, 0, 0, annotations)).window for e in range(500)}
    assert found == {(x, 0, 60, 60) for x in range(21)}
    assert RandomCrop((1, 1), None)(frame, Visit(1, 0, 0, 0, annotations)) == frame


def test_scale_jitter_pads_below_one_and_crops_above() -> None:
    annotations = annotations_of(np.ones((1, 600, 800), np.bool_))
    frame = Frame.whole_image(600, 800, 64)
    for epoch in range(300):
        visit = Visit(1, epoch, 0, 0, annotations)
        scale = 0.1 + 1.9 * float(visit.uniforms(3)[0])
        found = ScaleJitter(0.1, 2.0)(frame, visit)
        pixels = max(found.taken) / max(found.window[2:])  # of the square for one of the source
        assert pixels == pytest.approx(scale * 64 / 800, abs=0.01 * scale + 0.5 / 800)
        assert found.is_whole == (scale <= 1)


def test_random_values_of_a_transform_depend_on_image_epoch_seed_and_its_number() -> None:
    annotations = annotations_of(np.ones((1, 60, 80), np.bool_))
    visit = Visit(1, 0, 0, 0, annotations)
    values = visit.uniforms(3).tolist()
    assert visit.uniforms(5).tolist()[:3] == values
    for other in ({"image_id": 2}, {"epoch": 1}, {"seed": 1}, {"number": 1}):
        assert not set(replace(visit, **other).uniforms(3).tolist()) & set(values)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_and_loaders_see_the_same_transforms(root: Path, context: str) -> None:
    own = list(islice(stream_of(root, transform=SHIFT), 6))
    loader = DataLoader(
        stream_of(root, transform=SHIFT), batch_size=None, num_workers=2, multiprocessing_context=context
    )
    for one, other in zip(own, loader, strict=False):
        assert_equal(one, other)
    for one, other in zip(
        own, sa1b.Loader(stream_of(root, transform=SHIFT), threads=3, quiet=True), strict=False
    ):
        assert_equal(one, other)


def test_transforms_are_the_same_at_any_world_size_and_new_in_the_next_epoch(root: Path) -> None:
    def seen(rank: int, world_size: int) -> dict[int, list[int]]:
        options = {"rank": rank, "world_size": world_size, "micro_batch": 1, "global_batch": 7}
        stream = stream_of(root, transform=SHIFT, **options)
        found = {}
        for batch in chain(stream, stream):  # two epochs
            for position, window in zip(batch.positions.tolist(), batch.windows.tolist(), strict=True):
                found[position] = window
        return found

    whole = seen(0, 1)
    assert len(whole) == 2 * IMAGES
    assert seen(0, 2) | seen(1, 2) == whole
    stream = stream_of(root, transform=SHIFT)
    first, second = (
        {
            image_id: window
            for b in stream
            for image_id, window in zip(b.ids.tolist(), b.windows.tolist(), strict=True)
        }
        for _ in range(2)
    )
    assert first.keys() == second.keys()
    assert all(first[image_id] != second[image_id] for image_id in first)


def large_masks_only(frame: Frame, visit: Visit) -> Frame:
    """The documented example: the box of the largest mask."""
    x, y, width, height = visit.annotations.bbox[visit.annotations.area.argmax()].astype(int)
    return frame.crop(x, y, width + 1, height + 1)


def test_a_transform_of_ones_own_sees_the_masks(root: Path) -> None:
    dataset = sa1b.open(root)
    batch = next(iter(stream_of(root, transform=large_masks_only, masks=9)))
    for image, image_id in enumerate(batch.ids.tolist()):
        annotations = dataset.by_id(image_id).annotations
        largest = int(annotations.area.argmax())
        own = batch.masks.image == image
        assert largest in batch.mask_index[own].tolist()
        assert int(batch.areas[own].max()) <= int(annotations.area[largest])


def test_the_documented_transforms_run(root: Path) -> None:
    assert transform.__doc__ is not None
    text = textwrap.dedent(transform.__doc__[transform.__doc__.index("    def largest_mask") :])
    names: dict[str, Any] = {
        "Frame": Frame,
        "Visit": Visit,
        "replace": replace,
        "partial": partial,
        "cv2": cv2,
    }
    exec(text, names)
    plain = next(iter(stream_of(root, transform=large_masks_only)))
    batch = next(iter(stream_of(root, transform=[names["largest_mask"], names["contrast"]])))
    assert torch.equal(batch.windows, plain.windows)
    assert torch.equal(batch.masks.runs, plain.masks.runs)
    assert not torch.equal(batch.images, plain.images)


def inverted(frame: Frame, visit: Visit) -> Frame:
    return replace(frame, pixels=partial(np.subtract, 255))


def test_a_transform_may_change_pixels_and_leaves_the_padding_alone(root: Path) -> None:
    plain, changed = (next(iter(stream_of(root, transform=one))) for one in (None, inverted))
    assert torch.equal(plain.masks.runs, changed.masks.runs)
    for before, after, (rows, columns) in zip(
        plain.images, changed.images, plain.framed_sizes.tolist(), strict=True
    ):
        assert torch.equal(after[:, :rows, :columns], 255 - before[:, :rows, :columns])
        assert not after[:, rows:].any()
        assert not after[:, :, columns:].any()


def broken(frame: Frame, visit: Visit) -> Frame:
    raise KeyError("caption")


def none(frame: Frame, visit: Visit) -> Any:
    return None


def outside(frame: Frame, visit: Visit) -> Frame:
    return frame.crop(0, 0, frame.width + 1, 1)


def another(frame: Frame, visit: Visit) -> Frame:
    return Frame.whole_image(3, 3, frame.image_size)


def halved(frame: Frame, visit: Visit) -> Frame:
    return replace(frame, pixels=lambda image: image[::2])


def raising(frame: Frame, visit: Visit) -> Frame:
    return replace(frame, pixels=lambda image: image.no_such_attribute)


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (broken, "KeyError: 'caption'"),
        (none, "it returned NoneType, no Frame"),
        (outside, "BadValue: window x 0, y 0, .* must be inside the image"),
        (another, "it returned a frame of another image"),
        (halved, r"it returned uint8 .* for an image uint8"),
        (raising, "AttributeError: .*no_such_attribute"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_a_transform_that_fails_is_named_with_its_image(
    root: Path, transform: Any, reason: str, loaded: bool
) -> None:
    stream = stream_of(root, transform=transform)
    first = int(next(iter(stream_of(root))).ids[0])
    with pytest.raises(TransformError, match=rf"transform .* failed for image \d+: {reason}") as caught:
        next(iter(sa1b.Loader(stream, threads=1, quiet=True) if loaded else stream))
    assert f"image {first}" in str(caught.value)
    assert not stream.damage_log.entries()


# --- Options


def test_options_that_make_no_sense_are_refused_by_name(root: Path) -> None:
    for options, message in (
        ({"resize": "squash"}, "resize='squash' must be one of pad, crop, stretch"),
        ({"transform": 3}, "transform=3 must be a callable object"),
        ({"transform": "crop"}, "transform='crop' must be a callable object"),
        ({"transform": [broken, "x"]}, "transform='x' must be a callable object"),
        ({"min_pixels": -1}, "min_pixels=-1 must be at least 0"),
        ({"min_pixels_size": 0}, "min_pixels_size=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            stream_of(root, **options)
    for made in (
        lambda: RandomCrop((0, 1)),
        lambda: RandomCrop((0.5, 0.4)),
        lambda: RandomCrop(aspect=(2, 1)),
        lambda: ScaleJitter(0, 1),
        lambda: ScaleJitter(2, 1),
        lambda: Frame(3, 4, 8, (0, 0, 4, 3), 9),
        lambda: Frame(3, 4, 8, (0, 0, 0, 3), 8),
    ):
        with pytest.raises(ValueError, match="must be|outside"):
            made()


def test_images_only_decode_no_masks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("masks are decoded")

    expected = [batch.images for batch in islice(stream_of(root), 3)]
    monkeypatch.setattr("sa1b.shards.annotation.Annotations.runs", refused)
    for strategy in ("uniform", "area", "quality", "coverage"):
        for loaded in (False, True):
            stream = stream_of(
                root, masks=0, strategy=strategy, min_pixels=5, transform=RandomCrop((1, 1), None)
            )
            batches = sa1b.Loader(stream, threads=2, dense=16, quiet=True) if loaded else stream
            for images, batch in zip(expected, batches, strict=False):
                assert torch.equal(batch.images, images)
                assert len(batch.masks) == 0
                assert batch.masks.dense(16).shape == (0, 16, 16)
                assert batch.boxes.shape == (0, 4)


@examples
@given(pixel_masks(), st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.booleans(), st.data())
def test_min_pixels_drops_exactly_the_masks_with_fewer_in_the_dense_mask(
    masks: npt.NDArray[np.bool_], image_size: int, size: int, least: int, flip: bool, data: st.DataObject
) -> None:
    annotations = annotations_of(masks)
    resize = data.draw(st.sampled_from(RESIZES))
    options = {"image_size": image_size, "masks": 50, "flip": float(flip), "resize": resize}
    every = pick_masks(annotations, SampleOptions(**options), 0, 0)
    some = pick_masks(annotations, SampleOptions(**options, min_pixels=least, min_pixels_size=size), 0, 0)
    pixels = np.array([by_decode_and_index(mask, every.frame, size).sum() for mask in masks])
    assert some.mask_index.tolist() == [i for i in every.mask_index.tolist() if pixels[i] >= least]
    at_own_size = pick_masks(annotations, SampleOptions(**options, min_pixels=1), 0, 0)
    own = np.array([by_decode_and_index(mask, every.frame, image_size).any() for mask in masks])
    assert at_own_size.mask_index.tolist() == [i for i in every.mask_index.tolist() if own[i]]


def test_with_min_pixels_no_mask_of_a_stream_is_empty(root: Path) -> None:
    few = torch.cat([batch.masks.empty(4) for batch in islice(stream_of(root, masks=9), 7)])
    assert few.any()
    for batch in islice(stream_of(root, masks=9, min_pixels=1, min_pixels_size=4), 7):
        assert not batch.masks.empty(4).any()


def test_the_area_strategy_of_a_crop_uses_what_is_seen() -> None:
    masks = np.zeros((4, 40, 40), np.bool_)
    masks[0, :, :20] = True  # the largest, of which the window shows 10 pixels
    masks[0, 5:15, 20] = True
    masks[1, 20:30, 25:30] = True
    masks[2, 0:10, 21:31] = True
    masks[3, 10:35, 21:39] = True
    frame = Frame.whole_image(40, 40, 32).crop(20, 0, 20, 40)
    options = SampleOptions(image_size=32, masks=2, strategy="area", transform=Fixed(frame))
    for epoch in range(40):
        small, large = pick_masks(annotations_of(masks), options, 0, epoch).mask_index.tolist()
        assert {small, large} & {0, 1}
        assert {small, large} & {2, 3}


def test_the_record_of_options_is_json_and_differs_where_samples_do() -> None:
    every = [
        SampleOptions(),
        SampleOptions(transform=RandomCrop()),
        SampleOptions(transform=[RandomCrop((0.5, 1.0))]),
        SampleOptions(transform=[RandomCrop(), ScaleJitter()]),
        SampleOptions(transform=large_masks_only),
        SampleOptions(resize="crop"),
        SampleOptions(min_pixels=3),
    ]
    records = [json.dumps(options.record(), sort_keys=True) for options in every]
    assert len(set(records)) == len(every)
    assert "tests.stream.test_frame.large_masks_only" in records[4]
    assert SampleOptions(min_pixels_size=7).record() == SampleOptions().record()
    assert SampleOptions(min_pixels=2).record() == SampleOptions(min_pixels=2, min_pixels_size=1024).record()
    assert SampleOptions(transform=RandomCrop()).record() == SampleOptions(transform=[RandomCrop()]).record()
