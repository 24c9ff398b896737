"""`sa1b.generate_masks` finds the masks of the published SamAutomaticMaskGenerator, with the same weights.

The original class runs unchanged. It takes non-maximum suppression and the resizing of images from torchvision,
which does not import beside a CPU build of torch: `suppress` and `resize` are written here, from their
documentation.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import sa1b
import sa1b.masks
from sa1b.masks import Runs, raster
from sa1b.masks.grid import framed_size
from sa1b.programs.synthetic.source_tars import write_tar
from sa1b.sam.mask_generator import GeneratedMasks, GeneratorConfig
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.prediction import framed_image
from sa1b.shards.jpeg import decode
from tests import processes
from tests.sam import published
from tests.shards.tiny import ingest_tar

SMALL = ModelConfig(
    image_size=64, patch_size=4, width=32, depth=2, heads=2, global_blocks=(1,), window=4, channels=32
)
POINTS = {"points_per_side": 12, "points_per_batch": 50}
# Our names -> those of the published class.
NAMES = {
    "points_per_side": "points_per_side",
    "points_per_batch": "points_per_batch",
    "min_predicted_iou": "pred_iou_thresh",
    "min_stability": "stability_score_thresh",
    "stability_offset": "stability_score_offset",
    "max_box_iou": "box_nms_thresh",
    "crop_layers": "crop_n_layers",
    "crop_overlap": "crop_overlap_ratio",
    "crop_points_divisor": "crop_n_points_downscale_factor",
    "crop_max_box_iou": "crop_nms_thresh",
}


def suppress(boxes: Tensor, scores: Tensor, categories: Tensor, iou_threshold: float) -> Tensor:
    """torchvision.ops.batched_nms of boxes in one category: x0, y0, x1, y1."""
    left = torch.argsort(scores, descending=True, stable=True)
    kept = []
    while len(left):
        kept.append(left[0])
        best, others = boxes[left[0]], boxes[left[1:]]
        sides = torch.minimum(best[2:], others[:, 2:]) - torch.maximum(best[:2], others[:, :2])
        common = sides.clamp(min=0).prod(dim=1)
        union = (best[2:] - best[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(dim=1) - common
        left = left[1:][~(common / union > iou_threshold)]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.int64)


def box_area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)


def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """torchvision.transforms.functional.resize of a PIL image: size is height and width."""
    return image.resize(size[::-1], Image.Resampling.BILINEAR)


def resize_as_ours(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    return framed_image(np.asarray(image), *size, max(size))[: size[0], : size[1]]


@pytest.fixture(scope="module")
def original() -> Iterator[Any]:
    """The module with the published class, with torchvision's functions."""
    generator, transforms = published.modules(
        "segment_anything.automatic_mask_generator", "segment_anything.utils.transforms"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "batched_nms", suppress)
        patch.setattr(generator, "box_area", box_area)
        patch.setattr(transforms, "to_pil_image", Image.fromarray)
        patch.setattr(transforms, "resize", resize)
        generator.transforms = transforms
        yield generator


class Colours(nn.Module):
    """Stands for a trained model, which random weights cannot: three masks of the pixels like the one clicked.

    The comparison of the networks is in test_prediction.py and test_references.py.
    """

    def forward(self, pixels: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [P, 3, R, R] and predicted IoU [P, 3].

        Args:
            pixels: normalised, [1, 3, S, S].
            points: [P, 2], pixels of the square; the centre of a pixel has integer coordinates.
        """
        small = functional.interpolate(pixels, (SMALL.side * 4,) * 2, mode="area")[0]
        x, y = (points * (SMALL.side * 4 / SMALL.image_size)).round().long().clamp(0, SMALL.side * 4 - 1).T
        distance = (small[None] - small[:, y, x].T[:, :, None, None]).norm(dim=1)
        limits = torch.tensor([0.2, 0.6, 1.5])
        logits = 6 * (limits[:, None, None] - distance[:, None])
        return logits, 0.75 + 0.3 * torch.sin(points @ torch.tensor([[0.021], [0.0337]]) + limits)


class Ours(Sam):
    """Sam with `Colours` in place of image encoder and decoder."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.image_encoder.forward = lambda pixels, keep: pixels  # type: ignore[method-assign]

    def decode(self, embeddings: Tensor, image: Tensor, points: Tensor, *_: Any, **__: Any) -> Any:
        return Colours()(embeddings, points[:, 0])


class Encoder(nn.Module):
    img_size = SMALL.image_size

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels


class Prompts(nn.Module):
    def forward(self, points: Any, boxes: Any, masks: Any) -> tuple[Tensor, Any]:
        return points[0].float(), None

    def get_dense_pe(self) -> None:
        return None


class Decoder(nn.Module):
    def forward(self, image_embeddings: Tensor, sparse_prompt_embeddings: Tensor, **_: Any) -> Any:
        return Colours()(image_embeddings, sparse_prompt_embeddings[:, 0])


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The published model with `Colours` in place of encoder and decoder."""
    model = published.build(SMALL)
    model.image_encoder, model.prompt_encoder, model.mask_decoder = Encoder(), Prompts(), Decoder()
    return model


@pytest.fixture(scope="module")
def model() -> Sam:
    return Ours().eval()


def photo(height: int, width: int) -> np.ndarray:
    """Discs of random colours."""
    random = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width]
    pixels = np.full((height, width, 3), 128, np.uint8)
    for _ in range(12):
        inside = np.hypot(x - random.uniform(0, width), y - random.uniform(0, height)) < random.uniform(4, 25)
        pixels[inside] = random.integers(0, 256, 3)
    return pixels


def by_theirs(original: Any, theirs: Any, image: np.ndarray, config: GeneratorConfig) -> GeneratedMasks:
    named = {NAMES[name]: getattr(config, name) for name in NAMES}
    found = original.SamAutomaticMaskGenerator(theirs, output_mode="coco_rle", **named).generate(image)
    runs = sa1b.masks.decode([one["segmentation"]["counts"] for one in found], *image.shape[:2])
    for column, values in (("area", sa1b.masks.area(runs)), ("bbox", sa1b.masks.bbox_sa1b(runs))):
        assert np.array_equal([one[column] for one in found], values) or not found
    return GeneratedMasks(
        runs,
        *(
            np.array([one[name] for one in found], np.float32)
            for name in ("predicted_iou", "stability_score")
        ),
        np.array([one["point_coords"][0] for one in found], np.float64).reshape(-1, 2),
        np.array([one["crop_box"] for one in found], np.int64).reshape(-1, 4),
    )


@pytest.mark.parametrize("size", [(48, 64), pytest.param((300, 200), marks=pytest.mark.slow), (40, 150)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_predicted_iou": 0.5, "min_stability": 0.5, "stability_offset": 2.0},
        {"min_predicted_iou": 0.5, "min_stability": 0.5, "max_box_iou": 0.3},
        {"min_predicted_iou": 0.5, "min_stability": 0.5, "crop_layers": 2, "crop_points_divisor": 3},
    ],
    ids=["defaults", "filters", "suppression", "crops"],
)
def test_masks_are_those_of_the_published_class(
    original: Any, theirs: Any, model: Sam, size: tuple[int, int], settings: dict[str, Any]
) -> None:
    image, config = photo(*size), GeneratorConfig(**POINTS, **settings)
    with pytest.MonkeyPatch.context() as patch:  # the pixels of both models are the same
        patch.setattr(original.transforms, "resize", resize_as_ours)
        expected = by_theirs(original, theirs, image, config)
    found = sa1b.generate_masks(model, image, **POINTS, **settings)
    assert len(found) == len(expected) > 0
    # Masks of equal predicted IoU may have another order.
    mine, other = (
        one.select(np.lexsort((*one.points.T, sa1b.masks.area(one.runs), -one.predicted_iou.round(4))))
        for one in (found, expected)
    )
    assert sa1b.masks.iou(mine.runs, other.runs).diagonal().min() > 0.99
    assert np.allclose(mine.points, other.points)
    assert np.array_equal(mine.crop_boxes, other.crop_boxes)
    assert np.allclose(mine.predicted_iou, other.predicted_iou, atol=1e-4)
    assert np.allclose(mine.stability_score, other.stability_score, atol=2e-3)
    found.runs.check()
    assert sa1b.masks.area(found.runs).min() > 0


def test_an_image_resized_by_torchvision_has_nearly_the_same_masks(
    original: Any, theirs: Any, model: Sam
) -> None:
    image, settings = photo(300, 200), {"min_predicted_iou": 0.0, "min_stability": 0.7}
    expected = by_theirs(original, theirs, image, GeneratorConfig(**POINTS, **settings))
    found = sa1b.masks.iou(sa1b.generate_masks(model, image, **POINTS, **settings).runs, expected.runs)
    assert (found.max(axis=0) > 0.9).mean() > 0.8


def test_batches_of_points_and_the_form_of_the_image_change_nothing(model: Sam) -> None:
    image = photo(70, 50)
    settings = {"points_per_side": 9, "min_predicted_iou": 0.5, "min_stability": 0.5}
    found = sa1b.generate_masks(model, image, **settings)
    assert len(found) > 5
    for other in (
        sa1b.generate_masks(model, image, **settings, points_per_batch=1),
        sa1b.generate_masks(model, Image.fromarray(image).convert("RGBA"), **settings),
    ):
        assert np.array_equal(other.runs.runs, found.runs.runs)
        assert np.array_equal(other.points, found.points)


def test_scores_are_those_of_dense_masks_of_the_real_model() -> None:
    torch.manual_seed(0)
    model = Sam(replace(SMALL, pixel_features=8)).eval()
    with torch.no_grad():
        for perceptron in model.mask_decoder.output_hypernetworks_mlps:
            perceptron.layers[-1].weight.mul_(300)
    image = photo(90, 131)
    found = sa1b.generate_masks(
        model, image, points_per_side=3, min_predicted_iou=0, min_stability=0, max_box_iou=1
    )
    at = framed_size(90, 131, 64)[1] / 131
    prompts = (found.points * at + 0.5) / at - 0.5  # the pixels that predict scales to the same input
    inside = (prompts < (130.4, 89.4)).all(axis=1)
    best = sa1b.predict(model, image, points=prompts[inside][:, None])
    dense = raster.rasterize(found.runs, dtype=np.bool_)
    for mask, quality in zip(best.masks, best.predicted_iou, strict=True):
        same = np.isclose(found.predicted_iou, quality, atol=1e-5)
        assert not mask.any() or (dense[same] != mask).mean(axis=(1, 2)).min() < 1e-3
    assert np.array_equal(sa1b.masks.area(found.runs), dense.sum(axis=(1, 2)))


def test_no_mask_and_one_pixel(model: Sam) -> None:
    none = sa1b.generate_masks(model, photo(48, 64), points_per_side=2, min_predicted_iou=2)
    assert (len(none), none.points.shape, none.crop_boxes.shape) == (0, (0, 2), (0, 4))
    assert isinstance(none.runs, Runs)
    for shape in ((1, 1), (1, 200), (3, 2)):
        found = sa1b.generate_masks(
            model, photo(*shape), points_per_side=2, min_predicted_iou=0, crop_layers=2
        )
        found.runs.check()
        assert (found.runs.height, found.runs.width) == shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"points_per_side": 0}, "points_per_side=0 must be a whole number from 1 to 1024"),
        ({"points_per_batch": 1.5}, "points_per_batch=1.5 must be a whole number"),
        ({"min_stability": 1.5}, "min_stability=1.5 must be from 0 to 1"),
        ({"min_predicted_iou": float("nan")}, "min_predicted_iou=nan must be"),
        ({"max_box_iou": "x"}, "max_box_iou='x' must be"),
        ({"crop_layers": 5}, "crop_layers=5 must be a whole number from 0 to 4"),
    ],
)
def test_a_setting_that_is_out_of_range_is_named(model: Sam, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sa1b.generate_masks(model, photo(8, 8), **settings)
    with pytest.raises(ValueError, match="a str is not a SAM; pass sa1b.load_model"):
        sa1b.generate_masks("run", photo(8, 8))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_trained_model_has_the_same_masks_in_the_published_class(original: Any, tmp_path: Any) -> None:
    """Trains `tiny`, without its addition to the published model, for a minute or two."""
    write_tar(tmp_path / "sa_000000.tar", images=60, first_id=1, long_side=480, simple=True)
    ingest_tar(tmp_path / "sa_000000.tar", tmp_path / "shards")
    command = [sys.executable, "-m", "sa1b.train", "--preset", "tiny", "--model.pixel-features", "0"]
    command += ["--data.root", str(tmp_path / "shards"), "--out", str(tmp_path / "run")]
    processes.run([*command, "--optim.steps", "300", "--logging.tensorboard", "False"], check=True)
    model = sa1b.load_model(tmp_path / "run")
    theirs = published.build(model.config)
    theirs.load_state_dict(model.state_dict())
    settings = {"min_predicted_iou": 0.4, "min_stability": 0.8}
    masks = shared = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(original.transforms, "resize", resize_as_ours)
        for sample in sa1b.open(tmp_path / "shards"):
            if masks > 40:  # how many an image has depends on the rounding of the machine that trained
                break
            image = decode(sample.jpeg)
            expected = by_theirs(original, theirs, image, GeneratorConfig(**settings))
            found = sa1b.generate_masks(model, image, **settings)
            both = sa1b.masks.iou(found.runs, expected.runs)
            masks += max(len(found), len(expected))
            shared += int((both.max(axis=1, initial=0) > 0.9).sum())
    assert masks > 40
    assert shared > 0.95 * masks
