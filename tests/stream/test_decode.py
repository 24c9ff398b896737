"""The interface of decoders, for one image per thread and for a micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from torch import Tensor

import sa1b
from sa1b.errors import BadSample
from sa1b.stream.decode import CpuDecoder, EncodedImage
from sa1b.stream.decoders import DECODERS, Decoder, decoder
from sa1b.stream.transform import Frame
from tests.shards import tiny
from tests.stream.test_stream import SMALL, assert_equal, take


def jpeg(height: int = 30, width: int = 40) -> bytes:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 90, "RGB", "420", False))


class WholeBatch:
    """A decoder that takes a micro-batch at a time, as one for a GPU does; records the sizes."""

    device = torch.device("cpu")
    batched = True

    def __init__(self) -> None:
        self.counts: list[int] = []

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        assert out.shape[0] == len(images)
        assert out.is_contiguous()
        self.counts.append(len(images))
        return CpuDecoder().decode(images, out)


class Failing(CpuDecoder):
    """A decoder that fails for some images, selected by the length of their files, with a given error."""

    def __init__(self, failing: set[int], error: Callable[[], BadSample | Exception]) -> None:
        self.failing, self.error = failing, error

    def decode(self, images: Sequence[EncodedImage], out: Tensor) -> list[BadSample | None]:
        found: list[BadSample | None] = []
        for number, (image, error) in enumerate(zip(images, super().decode(images, out), strict=True)):
            failed = self.error() if len(image.jpeg) in self.failing else error
            if failed is not None and not isinstance(failed, BadSample):
                raise failed
            if failed is not None:
                out[number] = 77  # the pixels of a damaged image are undefined
            found.append(failed)
        return found


class FailingBatch(Failing):
    batched = True


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decode")
    tiny.synthesize(folder / "sa_000001.tar", images=9, first_id=100, long_side=160)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=4)
    return folder / "root"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Decoder], Decoder]:
    def add(name: str, made: Decoder) -> Decoder:
        monkeypatch.setitem(DECODERS, name, lambda: made)
        return made

    return add


def stream(root: Path, **options: Any) -> sa1b.Stream:
    named = {"global_batch": 6, "micro_batch": 3, **SMALL, **options}
    return sa1b.Stream(root, damage_log=root / "log.jsonl", **named)


def test_a_decoder_that_is_not_there_is_refused_by_name(root: Path) -> None:
    with pytest.raises(ValueError, match="decoder='nvjpeg' must be one of 'cpu'"):
        decoder("nvjpeg")
    with pytest.raises(ValueError, match="decoder='nvjpeg' must be one of"):
        stream(root, decoder="nvjpeg")


def test_a_decoder_for_a_gpu_needs_a_loader_for_it(
    root: Path, register: Callable[[str, Decoder], Decoder]
) -> None:
    made = WholeBatch()
    made.device = torch.device("cuda")
    register("gpu", made)
    with pytest.raises(ValueError, match="decodes into memory of a GPU, not of cpu; pass device='cuda'"):
        sa1b.Loader(stream(root, decoder="gpu"), quiet=True)


def test_damage_is_returned_for_its_own_image_only() -> None:
    good = jpeg()
    files = [good, good[: len(good) // 2], b"no JPEG", good]
    out = torch.full((4, 24, 24, 3), 9, dtype=torch.uint8)
    errors = CpuDecoder().decode([EncodedImage(data, Frame.whole_image(30, 40, 24)) for data in files], out)
    assert [type(error) for error in errors] == [type(None), BadSample, BadSample, type(None)]
    assert torch.equal(out[0], out[3])
    assert out[0, :18, :24].any()
    assert not out[0, 18:].any()  # an image of 30 x 40 pixels covers 18 x 24 pixels of the square


def test_flip_mirrors_within_the_image() -> None:
    out = torch.zeros((2, 24, 24, 3), dtype=torch.uint8)
    frame = Frame.whole_image(40, 30, 24)
    frames = [frame, replace(frame, flip=True)]
    CpuDecoder().decode([EncodedImage(jpeg(40, 30), frame) for frame in frames], out)
    assert torch.equal(out[1, :, :18], out[0, :, :18].flip(1))
    assert not out[1, :, 18:].any()


def test_opencv_keeps_to_one_thread_where_a_stream_decodes(root: Path) -> None:
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(3)
        next(iter(sa1b.Stream(root, global_batch=2, image_size=64, masks=4)))
        assert cv2.getNumThreads() == 1
    finally:
        cv2.setNumThreads(before)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_decoder_of_micro_batches_gives_the_same_batches(
    root: Path, loaded: bool, register: Callable[[str, Decoder], Decoder]
) -> None:
    made = WholeBatch()
    register("whole", made)
    own = stream(root, decoder="whole", flip=0.5)
    batches = iter(sa1b.Loader(own, threads=3, quiet=True)) if loaded else iter(own)
    for one, other in zip(take(stream(root, flip=0.5), 6), batches, strict=False):
        assert_equal(one, other)
    batches.close()
    assert set(made.counts) == {3}


@pytest.mark.parametrize("kind", [Failing, FailingBatch])
@pytest.mark.parametrize("loaded", [False, True])
def test_an_image_that_a_decoder_refuses_is_replaced_in_training(
    root: Path, kind: type[Failing], loaded: bool, register: Callable[[str, Decoder], Decoder], tmp_path: Path
) -> None:
    damaged = len(sa1b.open(root)[2].jpeg)
    register("failing", kind({damaged}, lambda: BadSample("jpeg_broken", "no luck")))
    own = sa1b.Stream(
        root,
        global_batch=6,
        micro_batch=3,
        epochs=None,
        decoder="failing",
        damage_log=tmp_path / "log.jsonl",
        **SMALL,
    )
    batches = iter(sa1b.Loader(own, threads=3, quiet=True)) if loaded else iter(own)
    found = [next(batches) for _ in range(6)]
    batches.close()
    assert 102 not in torch.cat([batch.ids for batch in found])
    assert all(bool(batch.valid.all()) for batch in found)
    assert {line["image_id"] for line in own.damage_log.entries()} == {102}


@pytest.mark.parametrize("kind", [Failing, FailingBatch])
@pytest.mark.parametrize("loaded", [False, True])
def test_an_image_that_a_decoder_refuses_is_black_and_not_valid_in_an_evaluation(
    root: Path, kind: type[Failing], loaded: bool, register: Callable[[str, Decoder], Decoder], tmp_path: Path
) -> None:
    damaged = len(sa1b.open(root)[2].jpeg)
    register("failing", kind({damaged}, lambda: BadSample("jpeg_broken", "no luck")))
    log = tmp_path / "log.jsonl"
    own = sa1b.Stream(root, global_batch=3, order="sequential", decoder="failing", damage_log=log, **SMALL)
    batches = list(sa1b.Loader(own, threads=3, quiet=True) if loaded else own)
    ids, valid = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("ids", "valid"))
    assert ids[~valid].tolist() == [102]
    assert not batches[0].images[2].any()


@pytest.mark.parametrize("kind", [Failing, FailingBatch])
def test_what_is_no_fault_of_a_file_ends_the_stream_and_names_the_sample(
    root: Path, kind: type[Failing], register: Callable[[str, Decoder], Decoder]
) -> None:
    lengths = {len(sample.jpeg) for sample in sa1b.open(root)}
    register("failing", kind(lengths, lambda: MemoryError("no memory")))
    with pytest.raises(MemoryError) as error:
        next(iter(stream(root, decoder="failing")))
    assert error.value.__notes__[0].startswith("in the batch of positions 0 to 2: image 1")


@pytest.mark.parametrize("where", ["decoder", "resampling"])
def test_lack_of_memory_ends_the_stream_and_is_not_damage(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("Insufficient memory (case 4)")

    def fail_opencv(*_: Any, **__: Any) -> None:
        raise cv2.error("(-4:Insufficient memory) Failed to allocate 3072 bytes")

    if where == "decoder":
        monkeypatch.setattr(simplejpeg, "decode_jpeg", fail)
    else:
        monkeypatch.setattr(cv2, "resize", fail_opencv)
    own = sa1b.Stream(root, global_batch=3, damage_log=tmp_path / "log.jsonl", **{**SMALL, "image_size": 24})
    with pytest.raises(MemoryError, match="Insufficient memory"):
        next(iter(own))
    assert not list(own.damage_log.entries())
