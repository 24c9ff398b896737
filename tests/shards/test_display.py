"""Samples and datasets in a notebook and on screen, also if they are damaged."""

import base64
import pickle
import re
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageShow
from pycocotools import mask as coco_mask

import sa1b
from sa1b import Sample
from sa1b.errors import BadSample, UsageError
from sa1b.masks import Runs, raster
from sa1b.shards import display
from sa1b.shards.annotation import parse_annotation
from sa1b.shards.display import colour, decode_for_display, display_size, largest_first, overlay
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


def sample_of(size: tuple[int, int], masks: int, stored: tuple[int, int] | None = None) -> Sample:
    """A sample with masks of `size` and a JPEG of `stored` pixels, each (height, width)."""
    annotations = parse_annotation(tiny.encode(tiny.document(7, size=size, masks=masks)), 7).annotations
    pixels = np.full((*(stored or size), 3), 128, np.uint8)
    return Sample(
        7, simplejpeg.encode_jpeg(pixels, 95, "RGB", "444"), annotations, "sa1b-000001-0000.tar", 512
    )


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
    """Compare with a loop over masks and pixels, at the size of the displayed image."""
    sample = sample_of((60, 90), 5, stored)
    pixels = decode_for_display(sample.jpeg, 64)
    height, width = pixels.shape[:2]
    dense = raster.rasterize(sample.runs, height, width, dtype=np.bool_)
    expected = pixels.astype(float)
    for number, mask in enumerate(largest_first(sample.runs)):
        for y, x in np.argwhere(dense[mask]):
            around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            edge = not all(0 <= v < height and 0 <= u < width and dense[mask, v, u] for v, u in around)
            share = 1.0 if edge else 0.4
            expected[y, x] = (1 - share) * pixels[y, x] + share * np.array(colour(number))
    found = overlay(pixels, sample.runs)
    assert np.abs(found - expected).max() <= 0.51
    np.testing.assert_array_equal(np.asarray(sample.overlay(max_side=64)), found)


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


def test_the_largest_image_is_decoded_at_a_fraction_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = simplejpeg.encode_jpeg(np.zeros((3000, 4000, 3), np.uint8), 50, "RGB", "420")
    decoded = []
    decode = simplejpeg.decode_jpeg

    def noting(*arguments: Any, **named: Any) -> Any:
        decoded.append(decode(*arguments, **named))
        return decoded[-1]

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noting)
    assert decode_for_display(data, 640).shape == (480, 640, 3)
    assert decoded[0].shape == (750, 1000, 3)  # 2/8: the smallest n/8 that is not below
    assert display_size(3000, 4000, 640) == (480, 640)


# In a notebook.


def test_a_dataset_is_a_contact_sheet_of_the_same_few_images(root: Path) -> None:
    dataset = sa1b.open(root)
    sheet = dataset._repr_png_()
    assert sheet == sa1b.open(root)._repr_png_()
    assert opened(sheet).width == 752
    html = dataset._repr_html_()
    assert "12 images" in html
    assert re.search(r'src="data:image/jpeg;base64,([^"]+)"', html)


def drawn_text(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    write = display._write
    monkeypatch.setattr(display, "_write", lambda pen, at, text: (texts.append(text), write(pen, at, text)))
    return texts


def test_a_contact_sheet_names_its_images_and_counts_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = drawn_text(monkeypatch)
    sa1b.open(root)._repr_png_()
    assert texts == [*(f"{i}: 3 masks" for i in range(100, 112, 2)), "6 of 12 images; 6 more"]


def test_a_contact_sheet_reads_its_own_images_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A display reads the images once, although IPython requests HTML and PNG."""
    began = []
    from sa1b.storage.reader import Reader

    submit = Reader.submit
    monkeypatch.setattr(Reader, "submit", lambda self, item: (began.append(item), submit(self, item))[1])
    bundle = sa1b.open(root)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    assert len(began) == display.SHEET_IMAGES
    assert opened(base64.b64decode(bundle["image/png"]))


def damaged(root: Path, folder: Path, image_id: int) -> Path:
    """A copy of a dataset with a changed byte in one image."""
    copy = Path(shutil.copytree(root, folder / "copy"))
    sample = sa1b.open(copy).by_id(image_id)
    with (copy / sample.shard).open("r+b") as file:
        file.seek(sample.offset + 200)
        file.write(b"\xff\x00\xff")
    return copy


def test_a_damaged_sample_is_named_in_its_cell(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = drawn_text(monkeypatch)
    assert opened(sa1b.open(damaged(root, tmp_path, 104))._repr_png_())
    assert "104: unreadable" in texts
    assert "sa_104.jpg is damaged" in " ".join(texts)
    assert "106: 3 masks" in texts


def test_a_missing_shard_is_named_in_every_cell(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    dataset = sa1b.open(copy)
    for shard in copy.glob("*.tar"):
        shard.unlink()
    texts = drawn_text(monkeypatch)
    assert opened(dataset._repr_png_())
    assert len([text for text in texts if text.endswith(": unreadable")]) == 6
    assert ".tar" in "".join(texts)


def test_a_damaged_table_is_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = sa1b.open(shutil.copytree(root, tmp_path / "copy"))
    dataset.shards = []  # the error for a table with other shard numbers
    monkeypatch.setattr("sa1b.shards.dataset.is_intact", lambda table: False)
    texts = drawn_text(monkeypatch)
    assert opened(dataset._repr_png_())
    assert "the columns do not match their digest" in " ".join(texts)


def test_a_sample_that_does_not_decode_is_displayed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sample_of((60, 90), 2)
    sample = Sample(7, whole.jpeg[:-40], whole.annotations, whole.shard, whole.offset)
    texts = drawn_text(monkeypatch)
    assert opened(sample._repr_png_())
    assert "JPEG" in " ".join(texts)
    with pytest.raises(BadSample):
        sample.overlay()


def test_a_dataset_of_a_url_is_displayed_and_an_unreachable_one_says_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root, tmp_path / "data" / "shards")
    with Service("range_server", tmp_path) as service:
        options = {"anon": True, "endpoint_url": service.url}
        dataset = sa1b.open("s3://data/shards", storage_options=options)
        assert dataset._repr_png_() == sa1b.open(root)._repr_png_()
    # The deadline of a display, not the dataset's deadline of 5 minutes.
    monkeypatch.setattr("sa1b.shards.dataset.SHEET_DEADLINE", 0.5)
    texts = drawn_text(monkeypatch)
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


def test_a_mask_of_the_whole_image_has_a_contour_at_its_edge() -> None:
    pixels = np.full((20, 30, 3), 90, np.uint8)
    found = overlay(pixels, Runs.from_pixels(np.ones((1, 20, 30), np.bool_)))
    edge = np.ones((20, 30), np.bool_)
    edge[1:-1, 1:-1] = False
    assert np.abs(found[edge] - np.array(colour(0))).max() <= 0.51
    assert (found[~edge] == found[10, 10]).all()
    assert (found[10, 10] != found[0, 0]).any()
    assert (found[10, 10] != pixels[10, 10]).any()
