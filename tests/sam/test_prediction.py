"""`sa1b.predict` returns the masks of the published predictor, at the size of the passed image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

import sa1b
from sa1b.errors import UsageError
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.prediction import Prediction
from sa1b.sam.published import WeightsError, write_weights
from tests.sam import published

SMALL = ModelConfig(image_size=64, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32)
HEIGHT, WIDTH = 90, 123
POINTS = np.array([[[3.0, 5.0]], [[100.0, 80.5]], [[60.0, 44.0]]])
BOXES = np.array([[10.0, 20.0, 60.0, 70.0], [0.0, 0.0, 122.0, 89.0], [50.0, 40.0, 55.0, 41.0]])


@pytest.fixture(scope="module")
def theirs() -> Any:
    return published.build(SMALL)


@pytest.fixture(scope="module")
def model(theirs: Any) -> Sam:
    ours = Sam(SMALL)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval()


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


@torch.no_grad()
def by_theirs(
    theirs: Any,
    image: np.ndarray,
    points: np.ndarray | None,
    labels: np.ndarray | None,
    boxes: Any,
    best: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The published modules on the same resized image and prompts."""
    rows, columns = 47, 64
    cv2 = pytest.importorskip("cv2")
    small = cv2.resize(image, (columns, rows), interpolation=cv2.INTER_AREA)
    embeddings = theirs.image_encoder(
        theirs.preprocess(torch.from_numpy(small).permute(2, 0, 1)[None].float())
    )

    def moved(values: np.ndarray) -> Tensor:
        return torch.from_numpy((values + 0.5) * (columns / WIDTH, rows / HEIGHT) - 0.5).float()

    given = None if points is None else (moved(points), torch.from_numpy(labels))
    corners = None if boxes is None else moved(boxes.reshape(-1, 2, 2)).reshape(-1, 4)
    sparse, dense = theirs.prompt_encoder(points=given, boxes=corners, masks=None)
    low, iou = theirs.mask_decoder(
        image_embeddings=embeddings,
        image_pe=theirs.prompt_encoder.get_dense_pe(),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=best,
    )
    chosen = iou.argmax(dim=1)
    each = torch.arange(len(iou))
    low, iou = low[each, chosen], iou[each, chosen]
    large = functional.interpolate(low[:, None], (64, 64), mode="bilinear", align_corners=False)
    masks = functional.interpolate(
        large[..., :rows, :columns], (HEIGHT, WIDTH), mode="bilinear", align_corners=False
    )
    return masks[:, 0] > 0, iou, low


@pytest.mark.parametrize(
    ("points", "labels", "boxes", "best"),
    [
        (POINTS, None, None, True),
        (None, None, BOXES, True),
        (POINTS, np.array([[1], [0], [1]]), BOXES, False),
        (np.concatenate([POINTS, POINTS[::-1]], axis=1), np.array([[1, 0], [1, 1], [0, 1]]), None, False),
    ],
)
def test_masks_are_those_of_the_published_model(
    theirs: Any, model: Sam, image: np.ndarray, points: Any, labels: Any, boxes: Any, best: bool
) -> None:
    found = sa1b.predict(model, image, points=points, labels=labels, boxes=boxes)
    at = None if points is None else points.reshape(3, -1, 2)
    kinds = None if at is None else np.ones(at.shape[:2], int) if labels is None else labels.reshape(3, -1)
    masks, iou, low = by_theirs(theirs, image, at, kinds, boxes, best)
    assert found.masks.shape == (3, HEIGHT, WIDTH)
    assert found.masks.dtype == bool
    assert np.allclose(found.logits, low.numpy(), atol=1e-4)
    assert np.allclose(found.predicted_iou, iou.numpy(), atol=1e-5)
    assert (found.masks != masks.numpy()).mean() < 1e-4
    assert 0 < found.masks.mean() < 1


def test_prompts_do_not_change_each_other_whatever_their_number(model: Sam, image: np.ndarray) -> None:
    many = np.random.default_rng(1).uniform(0, 80, (70, 1, 2))
    together = sa1b.predict(model, image, points=many)
    assert len(together) == 70
    for i in (0, 33, 69):
        alone = sa1b.predict(model, image, points=many[i : i + 1])
        assert np.allclose(alone.logits[0], together.logits[i], atol=1e-4)
    filled = sa1b.predict(
        model, image, points=[[[3, 5], [0, 0]], [[60, 44], [9, 9]]], labels=[[1, -1], [1, -1]]
    )
    single = sa1b.predict(model, image, points=[[[3, 5]], [[60, 44]]])
    assert np.allclose(filled.logits, single.logits, atol=1e-4)
    mixed = sa1b.predict(
        model, image, points=[[[0, 0], [3, 5]], [[60, 44], [9, 9]]], labels=[[-1, 1], [1, 0]], boxes=BOXES[:2]
    )
    for i, (at, kinds) in enumerate([([[3, 5]], [1]), ([[60, 44], [9, 9]], [1, 0])]):
        alone = sa1b.predict(model, image, points=[at], labels=[kinds], boxes=BOXES[i : i + 1])
        assert np.allclose(mixed.logits[i], alone.logits[0], atol=1e-4)


def test_a_flat_list_is_one_prompt_as_in_the_published_predictor(model: Sam, image: np.ndarray) -> None:
    flat = sa1b.predict(model, image, points=[[60, 44], [9, 9]], labels=[1, 0], boxes=[10, 20, 70, 80])
    nested = sa1b.predict(
        model, image, points=[[[60, 44], [9, 9]]], labels=[[1, 0]], boxes=[[10, 20, 70, 80]]
    )
    assert len(flat) == 1
    assert np.array_equal(flat.logits, nested.logits)


def test_an_embedding_serves_several_calls(
    model: Sam, image: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [sa1b.predict(model, image, points=POINTS), sa1b.predict(model, image, boxes=BOXES)]
    embedded = sa1b.embed_image(model, image)
    monkeypatch.setattr(model, "embed", None)
    found = [sa1b.predict(model, embedded, points=POINTS), sa1b.predict(model, embedded, boxes=BOXES)]
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.masks, other.masks)
        assert np.array_equal(one.logits, other.logits)


def test_all_candidates_contain_the_best(model: Sam, image: np.ndarray) -> None:
    best = sa1b.predict(model, image, points=POINTS)
    every = sa1b.predict(model, image, points=POINTS, all_candidates=True)
    assert every.masks.shape == (3, 3, HEIGHT, WIDTH)
    chosen = every.predicted_iou.argmax(axis=1)
    assert np.array_equal(every.masks[np.arange(3), chosen], best.masks)
    assert np.array_equal(every.logits[np.arange(3), chosen], best.logits)
    assert np.array_equal(every.predicted_iou.max(axis=1), best.predicted_iou)
    with pytest.raises(ValueError, match="multimask=False: has a single mask"):
        sa1b.predict(model, image, points=POINTS, multimask=False, all_candidates=True)


def test_candidates_can_be_asked_for_and_left(model: Sam, image: np.ndarray) -> None:
    best = sa1b.predict(model, image, points=POINTS, multimask=True)
    single = sa1b.predict(model, image, points=POINTS, multimask=False)
    assert np.array_equal(best.logits, sa1b.predict(model, image, points=POINTS).logits)
    assert not np.allclose(best.logits, single.logits)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_images_of_pil_are_taken_in_any_mode(model: Sam, image: np.ndarray, mode: str) -> None:
    opened = Image.fromarray(image).convert(mode)
    found = sa1b.predict(model, opened, points=POINTS)
    assert np.array_equal(
        found.logits, sa1b.predict(model, np.asarray(opened.convert("RGB")), points=POINTS).logits
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (700, 3), (64, 64)])
def test_images_of_any_size_are_taken(model: Sam, shape: tuple[int, int]) -> None:
    found = sa1b.predict(model, np.full((*shape, 3), 77, np.uint8), points=[[0, 0]], boxes=[[0, 0, 0, 0]])
    assert found.masks.shape == (1, *shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "has no prompts; pass points or boxes"),
        ({"labels": [1]}, "has no prompts, only labels; pass points"),
        ({"points": [[1, 2, 3]]}, r"points: must be \[P, 2\].* got \[1, 3\]"),
        ({"points": []}, "points: must be .* got \\[0\\]"),
        ({"points": [["a", 2]]}, "could not convert string to float: 'a'"),
        ({"points": [[1, 2], [3]]}, "inhomogeneous shape"),
        ({"points": [[1, float("nan")]]}, r"point \(1, nan\) of prompt 0: outside of the image"),
        ({"points": [[[1, 2]], [[1, 100]]]}, r"point \(1, 100\) of prompt 1: outside .* 123 x 90 pixels"),
        ({"points": [[[1, 2], [-1, 2]]]}, r"point \(-1, 2\) of prompt 0: outside of the image"),
        ({"points": [[1, 2]], "labels": [1, 0]}, r"labels: must be \[1\] for points \[1, 2\], got \[2\]"),
        ({"points": [[1, 2]], "labels": [2]}, "labels: must be 1"),
        ({"points": [[1, 2]], "labels": [[1], [1, 0]]}, "inhomogeneous shape"),
        ({"points": [[[1, 2]], [[3, 4]]], "labels": [[1], [-1]]}, "prompt 1: has no box, and all of its p"),
        ({"boxes": [[1, 2, 3]]}, r"boxes: must be \[4\] or .* got \[1, 3\]"),
        ({"boxes": [[0, 0, 1, 1]]}, "boxes: are in pixels of the image, .* multiply x by the width"),
        ({"boxes": [[5, 2, 3, 4]]}, r"box \(5, 2, 3, 4\) of prompt 0: ends before it begins"),
        (
            {"boxes": [[1, 2, 3, 4], [0, 0, 123, 91]]},
            r"box \(0, 0, 123, 91\) of prompt 1: .* 123 x 90 pixels",
        ),
        ({"boxes": [[-1, 2, 3, 4]]}, r"box \(-1, 2, 3, 4\) of prompt 0: outside of the image"),
        ({"boxes": [[1, 2, 3, 4]], "labels": [1]}, "labels: belong to points, but"),
        ({"boxes": [[1, 2, 3, 4]], "points": [[[1, 2]], [[3, 4]]]}, "boxes: 1 boxes for the 2 prompts of"),
    ],
)
def test_prompts_that_make_no_sense_are_refused_by_name(
    model: Sam, image: np.ndarray, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sa1b.predict(model, image, **arguments)


def test_a_box_may_end_at_the_edges_of_the_image(model: Sam, image: np.ndarray) -> None:
    assert len(sa1b.predict(model, image, boxes=[[0, 0, WIDTH, HEIGHT]])) == 1


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((3, 4)), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8), np.array("file.jpg"), None, [1]],
)
def test_images_that_are_none_are_refused_by_name(model: Sam, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"image: must be uint8 RGB \[height, width, 3\] or a PIL image"):
        sa1b.predict(model, wrong, points=[[0, 0]])


@pytest.mark.parametrize("wrong", ["file.jpg", Path("file.jpg")])
def test_the_path_of_an_image_is_not_opened(model: Sam, wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"image: a (str|PosixPath) is not an array of pixels; open it with PIL\.Image\.open"
    ):
        sa1b.predict(model, wrong, points=[[0, 0]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("r1", r"model: a str is not a SAM; pass sa1b\.load_model\('r1'\)"),
        (Path("r1"), r"model: a PosixPath is not a SAM; pass sa1b\.load_model\('r1'\)"),
        (None, r"model: None is not a SAM; pass sa1b\.load_model\(path\)"),
        ({"a": 1}, r"model: a dict is not a SAM; pass sa1b\.load_model\(path\)"),
    ],
)
def test_what_is_no_model_is_refused_with_the_way_to_one(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sa1b.predict(wrong, np.zeros((4, 4, 3), np.uint8), points=[[0, 0]])


@pytest.mark.parametrize("wrong", [3, None, {"a": 1}])
def test_load_model_takes_a_path_only(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"source .*: not a path; pass the folder of"):
        sa1b.load_model(wrong)
    if not torch.cuda.is_available():
        for load in (sa1b.load_model, sa1b.load_grounding):
            with pytest.raises(UsageError, match=r"device 'cuda': torch finds no GPU; pass device='cpu'"):
                load("run", device="cuda")
    with pytest.raises(UsageError, match=r"device 'gpu': must be 'cpu', 'cuda' or 'cuda:N'"):
        sa1b.load_model("run", device="gpu")


def test_a_file_of_weights_gives_the_same_masks(model: Sam, image: np.ndarray, tmp_path: Path) -> None:
    before: Prediction = sa1b.predict(model, image, points=POINTS)
    for name in ("sam.pth", "sam.safetensors"):
        write_weights(tmp_path / name, model.state_dict())
        loaded = sa1b.load_model(str(tmp_path / name))
        assert not loaded.training
        assert np.array_equal(sa1b.predict(loaded, image, points=POINTS).logits, before.logits)
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=r"other.pth: not a SAM"):
        sa1b.load_model(tmp_path / "other.pth")
