"""Samples and datasets in a notebook and on screen, also if they are damaged."""

import base64
import pickle
import re
import shutil
import tempfile
import tracemalloc
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageDraw, ImageShow
from pycocotools import mask as coco_mask

import sa1b
from sa1b import Sample
from sa1b import masks as runs_of_masks
from sa1b.errors import BadSample, TableError, UsageError
from tests.shards import tiny
from tests.storage.service import Service

IDS = range(100, 112)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("display")
    tiny.make_tar(folder / "sa_000001.tar", IDS)
    return finished(folder, folder / "sa_000001.tar")


def finished(folder: Path, source: Path, **options: Any) -> Path:
    tiny.ingest_tar(source, folder / "root", **options)
    return folder / "root"


@cache
def annotations_of(size: tuple[int, int], masks: int) -> Any:
    """Annotations of an image: ellipses, below them a mask of the whole image if there are five masks."""
    document = tiny.document(7, size=size, masks=masks)
    if masks == 5:
        document["annotations"][2]["segmentation"]["counts"] = tiny.counts_of(np.ones(size, np.bool_))
    members = tiny.pair_members(7, tiny.pair(7, size=size)[0], tiny.encode(document))
    with tempfile.TemporaryDirectory() as folder:
        source = tiny.write_tar(Path(folder, "sa_000001.tar"), members)
        (sample,) = sa1b.open(finished(Path(folder), source))
    return sample.annotations


def sample_of(size: tuple[int, int], masks: int, stored: tuple[int, int] | None = None) -> Sample:
    """A sample with masks of `size` and a grey JPEG of `stored` pixels, each (height, width)."""
    pixels = np.full((*(stored or size), 3), 128, np.uint8)
    jpeg = simplejpeg.encode_jpeg(pixels, 95, "RGB", "444")
    return Sample(7, jpeg, annotations_of(size, masks), "sa1b-000001-0000.tar", 512)


def opened(png: bytes) -> Image.Image:
    image = Image.open(BytesIO(png))
    assert image.format == "PNG"
    return image


# Arrays and PIL images.


def test_masks_are_those_that_pycocotools_decodes(root: Path) -> None:
    for sample in sa1b.open(root):
        masks = sample.masks()
        assert masks.dtype == np.bool_
        document = sample.annotations.to_json()
        strings = [mask["segmentation"] for mask in document["annotations"]]
        np.testing.assert_array_equal(masks, coco_mask.decode(strings).transpose(2, 0, 1).astype(bool))
        np.testing.assert_array_equal(sample.masks([2, 0]), masks[[2, 0]])
        np.testing.assert_array_equal(sample.masks([True, False, True]), masks[[0, 2]])
    with pytest.raises(IndexError):
        sample.masks([3])


def test_masks_of_a_reduced_image_are_at_source_size(tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "sa_000001.tar", [5])
    (sample,) = sa1b.open(finished(tmp_path, tmp_path / "sa_000001.tar", image_size=32))
    assert sample.image.shape == (24, 32, 3)
    assert sample.masks().shape == (3, 48, 64)
    assert sample.overlay().size == (32, 24)


def test_a_sample_without_masks() -> None:
    sample = sample_of((20, 30), 0)
    assert sample.masks().shape == (0, 20, 30)
    np.testing.assert_array_equal(np.asarray(sample.overlay()), sample.image)
    assert opened(sample._repr_png_()).size == (30, 20)
    assert "0 masks" in repr(sample)


def test_pil_has_the_pixels_of_the_image(root: Path) -> None:
    sample = sa1b.open(root)[0]
    assert sample.pil.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(sample.pil), sample.image)


# Drawing.


@pytest.mark.parametrize("stored", [None, (30, 45), (90, 135)])
def test_an_overlay_is_the_smallest_mask_of_each_pixel_with_its_contour(
    stored: tuple[int, int] | None,
) -> None:
    """Compare with the pixels of each mask at the size of the displayed image."""
    sample = sample_of((60, 90), 5, stored)
    plain, found = (np.asarray(sample.overlay(masks=masks, max_side=64)) for masks in ([], None))
    dense = runs_of_masks.rasterize(sample.runs, *found.shape[:2], dtype=np.bool_).astype(np.bool_)
    top = np.full(found.shape[:2], -1)
    for mask in np.argsort(-runs_of_masks.area(sample.runs), kind="stable"):
        top[dense[mask]] = mask
    assert (found[top < 0] == plain[top < 0]).all()
    around = np.pad(dense, ((0, 0), (1, 1), (1, 1)))
    inside = around[:, :-2, 1:-1] & around[:, 2:, 1:-1] & around[:, 1:-1, :-2] & around[:, 1:-1, 2:]
    colours = []
    for mask in np.unique(top[top >= 0]):
        edge, rest = (top == mask) & ~inside[mask], (top == mask) & inside[mask]
        colours.append(found[edge][0].tolist())
        assert (found[edge] == colours[-1]).all()
        mixed = 0.6 * plain[rest] + 0.4 * np.array(colours[-1])
        assert np.abs(found[rest] - mixed).max(initial=0) <= 1
    assert len(set(map(tuple, colours))) == len(colours) >= 4
    assert (top >= 0).all()  # the mask of the whole image


def test_masks_and_max_side_select_what_is_drawn() -> None:
    sample = sample_of((60, 90), 4)
    plain = np.asarray(sample.overlay(masks=[]))
    np.testing.assert_array_equal(plain, sample.image)
    changed = (np.asarray(sample.overlay(masks=[2])) != plain).any(axis=2)
    np.testing.assert_array_equal(changed, sample.masks([2])[0])
    np.testing.assert_array_equal(
        np.asarray(sample.overlay(masks=np.array([False, False, True, False]))), sample.overlay(masks=[2])
    )
    assert sample.overlay(max_side=45).size == (45, 30)
    assert sample.overlay(max_side=5000).size == (90, 60)  # never enlarged


def test_wrong_arguments_are_named() -> None:
    sample = sample_of((60, 90), 4)
    for masks in ([4], [True], ["a"], [0.5]):
        with pytest.raises(
            ValueError, match=r"masks=.* must be indices from 0 to 3 of the 4 masks of image 7"
        ):
            sample.overlay(masks=masks)
    for side in (0, -1, 1.5, "640"):
        with pytest.raises(ValueError, match="max_side="):
            sample.overlay(max_side=side)


def test_a_large_image_is_decoded_at_a_fraction_of_its_size() -> None:
    sample = sample_of((60, 80), 1, (3000, 4000))
    sample.overlay(max_side=64)  # loads what it needs
    tracemalloc.start()
    try:
        assert sample.overlay(max_side=640).size == (640, 480)
        assert tracemalloc.get_traced_memory()[1] < 3000 * 4000 * 3  # bytes of all its pixels
    finally:
        tracemalloc.stop()


# In a notebook.


def test_a_dataset_is_a_contact_sheet_of_the_same_few_images(root: Path) -> None:
    dataset = sa1b.open(root)
    sheet = dataset._repr_png_()
    assert sheet == sa1b.open(root)._repr_png_()
    assert opened(sheet).width == 752
    html = dataset._repr_html_()
    assert "12 images" in html
    assert re.search(r'src="data:image/jpeg;base64,([^"]+)"', html)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written into images."""
    found: list[str] = []
    write = ImageDraw.ImageDraw.text

    def noting(pen: Any, place: Any, text: str, *arguments: Any, **options: Any) -> Any:
        found.append(text)
        return write(pen, place, text, *arguments, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noting)
    return found


def test_a_contact_sheet_names_its_images_and_counts_the_others(root: Path, texts: list[str]) -> None:
    sa1b.open(root)._repr_png_()
    assert texts == [*(f"{i}: 3 masks" for i in range(100, 112, 2)), "6 of 12 images; 6 more"]


def damaged(root: Path, folder: Path, image_id: int) -> Path:
    """A copy of a dataset with a changed byte in one image."""
    copy = Path(shutil.copytree(root, folder / "copy"))
    sample = sa1b.open(copy).by_id(image_id)
    with (copy / sample.shard).open("r+b") as file:
        file.seek(sample.offset + 200)
        file.write(b"\xff\x00\xff")
    return copy


def test_damage_is_named_in_the_cells_that_it_concerns(root: Path, tmp_path: Path, texts: list[str]) -> None:
    assert opened(sa1b.open(damaged(root, tmp_path, 104))._repr_png_())
    assert "104: unreadable" in texts
    assert "sa_104.jpg is damaged" in " ".join(texts)
    assert "106: 3 masks" in texts
    texts.clear()
    dataset = sa1b.open(tmp_path / "copy")
    for shard in (tmp_path / "copy").glob("*.tar"):
        shard.unlink()
    assert opened(dataset._repr_png_())
    assert len([text for text in texts if text.endswith(": unreadable")]) == 6
    assert ".tar" in "".join(texts)


def test_a_damaged_table_is_named(root: Path, tmp_path: Path, texts: list[str]) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    (table,) = copy.glob("samples-*.bin")
    with table.open("r+b") as file:
        file.seek(128 + 8 * len(IDS))  # numbers of shards follow the image ids
        file.write(b"\xff" * 4 * len(IDS))
    dataset = sa1b.open(copy)
    assert opened(dataset._repr_png_())
    assert len([text for text in texts if text.endswith(": unreadable")]) == 6
    assert table.name in "".join(texts)
    with pytest.raises(TableError, match=table.name):
        dataset[0]


def test_a_sample_that_does_not_decode_is_displayed_with_the_reason(texts: list[str]) -> None:
    whole = sample_of((60, 90), 2)
    sample = Sample(7, whole.jpeg[:-40], whole.annotations, whole.shard, whole.offset)
    assert opened(sample._repr_png_())
    assert "JPEG" in " ".join(texts)
    with pytest.raises(BadSample):
        sample.overlay()


def test_a_dataset_of_a_url_is_displayed_and_an_unreachable_one_says_so(
    root: Path, tmp_path: Path, texts: list[str]
) -> None:
    """IPython requests HTML and PNG: the images are read once, and no others."""
    shutil.copytree(root, tmp_path / "data" / "shards")
    with Service("range_server", tmp_path) as service:
        options = {"anon": True, "endpoint_url": service.url}
        shown = sa1b.open("s3://data/shards", storage_options=options)
        dataset = sa1b.Dataset("s3://data/shards", deadline=1.0, storage_options=options)
        before = service.ask({"do": "counts"})["GET"]
        bundle = shown._repr_mimebundle_()
        assert service.ask({"do": "counts"})["GET"] - before == 6
        assert set(bundle) == {"text/plain", "text/html", "image/png"}
        assert base64.b64decode(bundle["image/png"]) == sa1b.open(root)._repr_png_()
    texts.clear()
    assert opened(dataset._repr_png_())
    assert len([text for text in texts if text.endswith(": unreadable")]) == 6
    assert "s3://data/shards" in "".join(texts)


# Text.


def test_text_forms_are_one_short_line(root: Path) -> None:
    dataset = sa1b.open(root)
    sample = dataset[0]
    size = (root / sample.shard).stat().st_size
    assert repr(dataset) == (f"Dataset({str(root)!r}: 12 images, 36 masks, {size / 1e3:.1f} kB in 1 shard)")
    assert repr(sample) == (
        f"Sample(100: 3 masks, 64 x 48 pixels, JPEG of {len(sample.jpeg):,} bytes in "
        f"'sa1b-000001-0000.tar' at offset {sample.offset:,})"
    )
    assert repr(sample.annotations) == "Annotations(100: 3 masks, 64 x 48 pixels)"
    assert repr(sample.runs) == f"Runs(3 masks, {len(sample.runs.runs)} runs, 64 x 48 pixels)"
    assert repr(pickle.loads(pickle.dumps(sample))) == repr(sample)


def test_a_partial_dataset_says_so_in_text_and_html(root: Path) -> None:
    dataset = sa1b.open(root)
    dataset.failed = {"sa_000002.tar": "truncated <gzip>"}
    assert repr(dataset).endswith("1 shard; partial: 1 source failed (sa_000002.tar))")
    assert "partial: 1 source failed" in dataset._repr_html_()


def test_html_escapes_the_path(root: Path) -> None:
    dataset = sa1b.open(root)
    dataset.root = "/<b>&"
    assert "<b>" not in dataset._repr_html_()


# On screen.


class Viewer(ImageShow.Viewer):
    """Records the displayed objects."""

    def __init__(self) -> None:
        self.shown: list[tuple[Image.Image, dict[str, Any]]] = []

    def show(self, image: Image.Image, **options: Any) -> int:
        self.shown.append((image, options))
        return 1


@pytest.fixture
def viewer(monkeypatch: pytest.MonkeyPatch) -> Viewer:
    found = Viewer()
    monkeypatch.setattr(ImageShow, "_viewers", [found])
    monkeypatch.setenv("DISPLAY", ":99")
    return found


def test_show_uses_the_viewer_of_pil(viewer: Viewer) -> None:
    sample = sample_of((60, 90), 3)
    sample.show(masks=[1], max_side=45)
    ((image, options),) = viewer.shown
    assert options["title"] == "sa_7"
    np.testing.assert_array_equal(np.asarray(image), sample.overlay(masks=[1], max_side=45))


def test_show_on_a_machine_without_display_says_what_to_do(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(UsageError, match=r"no display .*sample\.overlay\(\)\.save"):
        sample_of((60, 90), 3).show()
    assert not viewer.shown


def test_show_without_an_image_viewer_says_what_to_do(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageShow, "_viewers", [])
    with pytest.raises(UsageError, match=r"no image viewer .*sample\.overlay\(\)\.save"):
        sample_of((60, 90), 3).show()
