"""The cache of embeddings: keys, damaged files, its limit, and a decoder that learns from it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sa1b.sam.embedding_cache import EmbeddingCache
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe, encoder_flops
from sa1b.sam.targets import Targets

ROOM = 1 << 20  # bytes
SIZES = torch.tensor([[8, 5], [8, 8], [3, 8]])


class Teacher:
    """Counts the images that it has seen; its products depend on the number format."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, images: Tensor, sizes: Tensor) -> Tensor:
        self.seen += len(images)
        pixels = images.flatten(1).float() / 255 + sizes.sum(dim=1, keepdim=True)
        torch.manual_seed(0)
        return (pixels @ torch.randn(192, 32)).view(len(images), 8, 2, 2)


def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_an_embedding_is_computed_once_by_any_process(tmp_path: Path) -> None:
    first, second = Teacher(), Teacher()
    computed = EmbeddingCache(tmp_path, ROOM).embeddings(images(), SIZES, first)
    assert torch.equal(computed, Teacher()(images(), SIZES).half().float())
    order = torch.tensor([2, 0, 0])
    cache = EmbeddingCache(tmp_path, ROOM)
    assert torch.equal(cache.embeddings(images()[order], SIZES[order], second), computed[order])
    assert (first.seen, second.seen) == (3, 0)
    assert len(files(tmp_path)) == 3
    assert load_file(files(tmp_path)[0])["embedding"].dtype == torch.float16  # other programs can read it


@pytest.mark.parametrize(
    "change",
    [
        lambda images, sizes: (images.flip(3), sizes),
        lambda images, sizes: (images, sizes.flip(1)),
        lambda images, sizes: (
            images ^ (torch.arange(192).view(3, 8, 8) == 191),
            sizes,
        ),  # one bit of a pixel
    ],
)
def test_other_pixels_have_other_embeddings(
    tmp_path: Path, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    image, size = images()[:1], SIZES[:1]
    changed = change(image, size)
    cache, teacher = EmbeddingCache(tmp_path, ROOM), Teacher()
    cache.embeddings(image, size, teacher)
    found = cache.embeddings(changed[0], changed[1], teacher)
    assert teacher.seen == 2
    assert torch.equal(found, Teacher()(*changed).half().float())


def test_number_formats_are_not_mixed(tmp_path: Path) -> None:
    cache, teacher = EmbeddingCache(tmp_path, ROOM), Teacher()
    for _ in range(2):
        cache.embeddings(images(), SIZES, teacher)
        with torch.autocast("cpu", torch.bfloat16):
            cache.embeddings(images(), SIZES, teacher)
    assert teacher.seen == 6
    assert {path.name for path in tmp_path.iterdir()} == {"float32", "bfloat16"}


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other"])
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: str) -> None:
    cache, teacher = EmbeddingCache(tmp_path, ROOM), Teacher()
    expected = cache.embeddings(images(), SIZES, teacher)
    path = files(tmp_path)[1]
    whole = path.read_bytes()
    position = 8 + int.from_bytes(whole[:8], "little")  # of the first value, after the header
    header = json.loads(whole[8:position])
    start = position + header["embedding"]["data_offsets"][0]
    path.write_bytes(
        {
            "cut": whole[:-3],
            "empty": b"",
            "flipped": whole[:start] + bytes([whole[start] ^ 64]) + whole[start + 1 :],
            "other": whole.replace(b'"embedding"', b'"em_edding"'),
        }[damage]
    )
    for seen in (4, 4):
        assert torch.equal(cache.embeddings(images(), SIZES, teacher), expected)
        assert teacher.seen == seen
    assert path.read_bytes() == whole


def test_the_limit_is_kept_and_does_not_change_embeddings(tmp_path: Path) -> None:
    all_of_them = EmbeddingCache(tmp_path / "all", ROOM).embeddings(images(), SIZES, Teacher())
    size = files(tmp_path)[0].stat().st_size
    for limit, stored in ((0, 0), (size - 1, 0), (2 * size + 1, 2)):
        folder, teacher = tmp_path / str(limit), Teacher()
        cache = EmbeddingCache(folder, limit)
        for _ in range(2):
            assert torch.equal(cache.embeddings(images(), SIZES, teacher), all_of_them)
        assert len(files(folder)) == stored
        assert sum(path.stat().st_size for path in files(folder)) <= limit
        assert teacher.seen == 3 + 3 - stored


def test_a_folder_that_cannot_be_written_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = EmbeddingCache(tmp_path / "all", ROOM).embeddings(images(), SIZES, Teacher())
    (tmp_path / "float32").write_bytes(b"")  # a file where the cache needs a folder
    cache = EmbeddingCache(tmp_path, ROOM)
    for _ in range(2):
        assert torch.equal(cache.embeddings(images(), SIZES, Teacher()), expected)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"--distill.cache {tmp_path}: cannot be written (Not a directory)" in lines[0]


def test_an_embedding_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path, ROOM)
    found = cache.embeddings(images(), SIZES, lambda images, sizes: torch.full((1, 8, 2, 2), torch.nan))
    assert found.isnan().all()
    assert not files(tmp_path)


@pytest.fixture
def cached(tmp_path: Path) -> Interactive:
    """A model in training whose image encoder is frozen, and the digests with which it opens its cache."""
    torch.manual_seed(0)
    config = ModelConfig(
        image_size=64, width=16, depth=1, heads=1, global_blocks=(0,), channels=32, pixel_features=8
    )

    def opened(digest: str) -> EmbeddingCache:
        (tmp_path / digest).mkdir()
        return EmbeddingCache(tmp_path / digest, ROOM, "--embeddings.cache")

    model = Interactive(Sam(config), Recipe(clicks=1, unprompted=0), opened)
    model.model.image_encoder.requires_grad_(False).eval()
    return model


def batch() -> tuple[Tensor, Targets, Tensor]:
    torch.manual_seed(1)
    targets = Targets(
        masks=(torch.rand(3, 16, 16) > 0.5).to(torch.uint8),
        boxes=torch.tensor([[3.0, 4, 30, 20], [10, 10, 50, 39], [0, 0, 16, 30]]),
        points=torch.tensor([[12.0, 9], [20, 20], [8, 8]]),
        image=torch.tensor([0, 0, 1]),
        weights=torch.ones(3),
        keys=torch.arange(3),
        sizes=torch.tensor([[64, 40], [50, 64]]),
        counts=[2, 1],
    )
    return torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8), targets, torch.arange(2)


def test_a_decoder_learns_the_same_from_cached_embeddings(
    cached: Interactive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for _ in range(2):
        cached.zero_grad()
        sums = cached(*batch())
        sums["loss"].backward()
        gradients = {
            name: one.grad.clone() for name, one in cached.named_parameters() if one.grad is not None
        }
        found.append((sums["loss"].item(), gradients))
        monkeypatch.setattr(type(cached.model.image_encoder), "forward", None)  # not called again
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys() != set()
    assert all(torch.equal(one, found[1][1][name]) for name, one in found[0][1].items())
    assert not any(name.startswith("model.image_encoder.") for name in found[0][1])
    assert any(name.startswith("model.similarity.") for name in found[0][1])
    monkeypatch.undo()
    plain = Interactive(cached.model, cached.recipe)(*batch())["loss"].item()
    assert plain == pytest.approx(found[0][0], rel=1e-2)
    assert plain != found[0][0]  # the cache rounds to float16
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_other_weights_of_the_encoder_have_another_folder(cached: Interactive, tmp_path: Path) -> None:
    cached(*batch())
    other = Interactive(cached.model, cached.recipe, cached._open_cache)
    with torch.no_grad():
        next(iter(cached.model.image_encoder.parameters())).add_(1)
    other(*batch())
    assert len(list(tmp_path.iterdir())) == 2
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4


def test_operations_are_those_of_the_decoder_and_an_evaluation_computes_embeddings(
    cached: Interactive, tmp_path: Path
) -> None:
    encoder = encoder_flops(cached.model.config)
    assert cached.flops(3, 5) == Interactive(cached.model, cached.recipe).flops(3, 5) - 3 * encoder
    assert cached.eval()(*batch(), evaluate=True)["unions"].shape == (3, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_without_images(cached: Interactive) -> None:
    images, targets, keys = batch()
    fields = {name: getattr(targets, name)[:0] for name in ("masks", "boxes", "points", "image", "weights")}
    none = replace(targets, **fields, keys=targets.keys[:0], sizes=targets.sizes[:0], counts=[])
    assert cached(images[:0], none, keys[:0])["loss"].item() == 0
