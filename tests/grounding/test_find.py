"""`sa1b.ground` gives what the model computes in training and evaluation, at the resolution of the image."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sa1b
from sa1b.grounding.alignment import Phrased
from sa1b.masks import Runs
from sa1b.stream.text import open_tokenizer, texts_of
from tests.grounding.small import DENSE, SIDE, SIZE, build

PHRASES = ["a", "bc", "a much longer phrase"]


def digits(text: str) -> list[int]:
    return [ord(letter) % 11 for letter in text]


digits.vocabulary = 11  # type: ignore[attr-defined]
DIGITS = "tests.grounding.test_find:digits"


@pytest.fixture
def image() -> Any:
    return np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


@pytest.fixture
def masks() -> Any:
    """Three masks; the last one has no pixel at the resolution of the embedding."""
    made = np.zeros((3, SIZE, SIZE), np.bool_)
    made[0, :16, :8] = made[1, 5:30, 12:] = made[2, 8, 16] = True
    return made


def test_it_equals_an_evaluation_of_the_model(image: Any, masks: Any) -> None:
    model = build().eval()
    model.tokenizer = DIGITS
    found = sa1b.ground(model, image, PHRASES, regions=Runs.from_pixels(masks))
    tokens, belongs = texts_of(PHRASES, open_tokenizer(DIGITS), model.length, "mask_id").padded()
    given = Phrased(
        dense=torch.zeros(3, DENSE, DENSE, dtype=torch.uint8),
        coarse=torch.from_numpy(masks[:, 4::8, 4::8].astype(np.uint8)),
        points=torch.tensor([[1.0, 1.0], [20.0, 20.0], [16.5, 8.5]]),
        image=torch.zeros(3, dtype=torch.int64),
        counts=(3,),
        sizes=torch.tensor([[SIZE, SIZE]]),
        tokens=tokens,
        belongs=belongs,
        vectors=torch.zeros(3, 0),
        keys=torch.arange(3),
        counted=torch.ones(3, dtype=torch.bool),
    )
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    with torch.no_grad():
        expected = model(pixels, given, torch.zeros(1, dtype=torch.int64), evaluate=True)
    similarity = expected["texts"] @ expected["regions"].T
    assert np.allclose(found.similarity, similarity.numpy(), atol=1e-5)
    assert np.allclose(found.logits, expected["logits"].numpy(), atol=1e-4)
    assert found.regions().tolist() == similarity.argmax(dim=1).tolist()
    assert found.masks.shape == (3, SIZE, SIZE)
    assert found.logits.shape[1:] == (4 * SIDE, 4 * SIDE)
    assert len(found) == 3


def test_embeddings_replace_phrases_and_regions_may_be_missing(image: Any) -> None:
    model = build(vectors=5).eval()
    found = sa1b.ground(model, image[:20], np.eye(5)[:2])
    assert found.masks.shape == (2, 20, SIZE)
    assert found.similarity.shape == (2, 0)
    with pytest.raises(ValueError, match="there are no regions; pass regions="):
        found.regions()
    assert len(sa1b.ground(model, image, np.zeros((0, 5)))) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given | {"model": 3}, "model: must be a grounding model; pass sa1b.load_grounding"),
        (lambda given: given | {"phrases": "red"}, "phrases='red': must be a list of strings"),
        (lambda given: given | {"phrases": [1]}, "must be a list of strings"),
        (lambda given: given | {"image": "a.jpg"}, "not an array of pixels"),
        (
            lambda given: given | {"regions": Runs.from_pixels(np.ones((1, 4, 5), np.bool_))},
            "32 x 32 pixels, not 5 x 4",
        ),
        (lambda given: given | {"model": build(vectors=5)}, r"must be embeddings, numbers \[N, 5\]"),
    ],
)
def test_what_is_refused(
    image: Any, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    given = change({"model": build(), "image": image, "phrases": ["red"], "regions": None})
    with pytest.raises(ValueError, match=message):
        sa1b.ground(**given)
