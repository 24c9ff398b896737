"""The forms of a batch that other models take: padded, normalised, and coordinates of other frames."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sa1b
from sa1b import Batch
from sa1b.arguments import BadValue
from sa1b.masks.raster_torch import PIXEL_MEAN, PIXEL_STD
from sa1b.stream.transform import RandomCrop
from tests.stream.recorded import make_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("forms"), 8)


def batches(root: Path, **options: Any) -> list[Batch]:
    named = {"global_batch": 4, "image_size": 48, "masks": 5, "flip": 0.5, "seed": 3, **options}
    return list(sa1b.Stream(root, damage_log=root.parent / "log.jsonl", **named))


@pytest.fixture(scope="module", params=["pad", "stretch", "cropped", "no masks"])
def batch(root: Path, request: pytest.FixtureRequest) -> Batch:
    options: dict[str, dict[str, Any]] = {
        "stretch": {"resize": "stretch"},
        "cropped": {"transform": RandomCrop((0.3, 0.8), (0.5, 2.0))},
        "no masks": {"masks": 0},
    }
    found = batches(root, **options.get(request.param, {}))[0]
    assert found.flipped.any()
    assert not found.flipped.all()
    return found


def test_the_padded_form_is_the_flat_one_with_a_row_for_each_image(batch: Batch) -> None:
    padded = batch.padded(24)
    assert padded.valid.shape == (len(batch), max(batch.masks.counts))
    assert padded.valid.sum(1).tolist() == list(batch.masks.counts)
    assert torch.equal(padded.index[padded.valid], torch.arange(len(batch.masks)))
    assert torch.equal(padded.valid.nonzero()[:, 0], batch.masks.image)
    flat = (batch.masks.dense(24), batch.points, batch.boxes)
    for dense, values in zip((padded.masks, padded.points, padded.boxes), flat, strict=True):
        assert dense.dtype == values.dtype
        assert torch.equal(dense[padded.valid], values)
        assert not dense[~padded.valid].any()


def test_masks_of_invalid_images_are_there_and_not_valid(batch: Batch) -> None:
    batch.valid[1] = False
    padded = batch.padded(24)
    batch.valid[1] = True
    assert not padded.valid[1].any()
    assert torch.equal(padded.index, batch.padded(24).index)


def test_the_padded_form_takes_the_masks_that_the_loader_has_made(root: Path) -> None:
    stream = sa1b.Stream(root, global_batch=4, image_size=48, masks=5, damage_log=root.parent / "log.jsonl")
    for batch in sa1b.Loader(stream, threads=1, dense=16, quiet=True):
        assert batch.dense is not None
        batch.dense.fill_(7)
        assert torch.equal(batch.padded().masks.amax((2, 3)), batch.padded().valid.to(torch.uint8) * 7)
        assert torch.equal(batch.padded(48).masks[batch.padded().valid], batch.masks.dense())


@cache
def cropped(root: Path) -> list[Batch]:
    return batches(root, transform=RandomCrop((0.3, 0.8), (0.5, 2.0)))[:1]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.floats(0, 48, width=32), min_size=4, max_size=4)),
        max_size=6,
    )
)
def test_points_and_boxes_return_from_the_source_unchanged(
    root: Path, rows: list[tuple[int, list[float]]]
) -> None:
    image = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    boxes = torch.tensor([row[1] for row in rows]).reshape(-1, 4)
    for batch in cropped(root):
        for values in (boxes, boxes[:, :2]):
            back = batch.to_square(batch.to_source(values, image), image)
            torch.testing.assert_close(back, values, rtol=0, atol=1e-4)


def test_points_lie_in_their_mask_and_boxes_on_its_edge_in_the_source(root: Path) -> None:
    dataset = sa1b.open(root)
    for batch in batches(root):
        points, boxes = batch.to_source(batch.points), batch.to_source(batch.boxes)
        names = zip(batch.ids[batch.masks.image].tolist(), batch.mask_index.tolist(), strict=True)
        for point, box, (image_id, mask) in zip(points, boxes, names, strict=True):
            pixels = torch.from_numpy(dataset.by_id(image_id).masks([mask])[0])
            x, y = point.round().long().tolist()
            assert pixels[y, x]
            down, across = pixels.nonzero().unbind(1)
            edges = torch.stack((across.min(), down.min(), across.max(), down.max()))
            torch.testing.assert_close(box, edges.float(), rtol=0, atol=1e-3)


def test_edges_of_boxes_are_half_a_source_pixel_outside_of_the_centres(batch: Batch) -> None:
    outside = batch.boxes_xyxy
    assert outside.dtype == torch.float32
    source = batch.to_source(outside)
    expected = batch.to_source(batch.boxes) + torch.tensor([-0.5, -0.5, 0.5, 0.5])
    torch.testing.assert_close(source, expected, rtol=0, atol=1e-3)


def test_normalised_images_are_0_outside_of_the_image(batch: Batch) -> None:
    pixels = batch.normalised()
    assert pixels.dtype == torch.float32
    for image, (rows, columns) in enumerate(batch.framed_sizes.tolist()):
        part = batch.images[image, :, :rows, :columns].permute(1, 2, 0)
        expected = (part - torch.tensor(PIXEL_MEAN)) / torch.tensor(PIXEL_STD)
        torch.testing.assert_close(pixels[image, :, :rows, :columns].permute(1, 2, 0), expected)
        assert not pixels[image, :, rows:].any()
        assert not pixels[image, :, :, columns:].any()
    halved = batch.normalised((0, 0, 0), (2, 2, 2))
    assert torch.equal(halved, batch.images / 2)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import SamConfig, SamModel

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "global_attn_indexes": [0]}
    sizes = {"image_size": 48, "patch_size": 16}
    config = SamConfig(vision_config={**small, **sizes}, prompt_encoder_config=sizes)
    found: torch.nn.Module = SamModel(config).eval()
    return found


@pytest.mark.parametrize("prompts", ["points", "boxes", "both"])
def test_the_model_of_transformers_answers_a_batch_as_it_answers_each_image(
    root: Path, model: torch.nn.Module, prompts: str
) -> None:
    batch = batches(root)[0]
    assert len(set(batch.masks.counts)) > 1
    padded = batch.padded(48)
    with torch.no_grad():
        together = model(**batch.for_transformers(prompts), multimask_output=False).pred_masks
        for image in range(len(batch)):
            mine = batch.masks.image == image
            alone = {"pixel_values": batch.normalised()[image : image + 1]}
            if prompts != "boxes":
                alone["input_points"] = batch.points[mine][None, :, None] - 0.5
            if prompts != "points":
                alone["input_boxes"] = batch.boxes[mine][None] - 0.5
            expected = model(**alone, multimask_output=False).pred_masks[0]
            torch.testing.assert_close(together[image][padded.valid[image]], expected, rtol=1e-3, atol=1e-5)


def test_wrong_coordinates_and_prompts_are_refused(root: Path) -> None:
    batch = batches(root)[0]
    with pytest.raises(BadValue, match=r"coordinates: must be \[\d+, 2\] or \[\d+, 4\], got \[1, 3\]"):
        batch.to_source(torch.zeros(1, 3))
    with pytest.raises(BadValue, match="coordinates: must be"):
        batch.to_square(batch.points[:-1])
    with pytest.raises(BadValue, match="prompts='masks': must be 'points', 'boxes' or 'both'"):
        batch.for_transformers("masks")
