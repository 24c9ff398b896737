"""A batch in one buffer: bit for bit the same tensors, and one copy to a device."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sa1b import Batch
from sa1b.masks import Runs, raster_torch
from sa1b.stream.batch import collate
from sa1b.stream.ragged import RaggedMasks
from sa1b.stream.sample import SampleMasks
from sa1b.stream.transform import Frame
from tests.masks.samples import examples, pixel_masks, to_runs

LARGE = ("images", "dense")


def sample(number: int, runs: Runs, image_size: int) -> SampleMasks:
    random, count = np.random.default_rng(number), len(runs)
    return SampleMasks(
        image_id=number,
        frame=Frame.whole_image(runs.height, runs.width, image_size, stretch=number % 2 == 1),
        runs=runs,
        boxes=random.random((count, 4), np.float32),
        points=random.random((count, 2), np.float32),
        areas=random.integers(0, 2**62, count),
        predicted_iou=random.random(count, np.float32),
        stability_score=random.random(count, np.float32),
        mask_ids=random.integers(-1, 2**62, count),
        mask_index=np.arange(count),
    )


def batch_of(drawn: list[np.ndarray], image_size: int = 16) -> Batch:
    images = torch.arange(len(drawn) * image_size**2 * 3, dtype=torch.int64).to(torch.uint8)
    samples = [sample(number, to_runs(masks), image_size) for number, masks in enumerate(drawn)]
    images = images.view(-1, image_size, image_size, 3)
    return collate(images, samples, range(len(drawn)), [True] * len(drawn), 7)


def tensors(batch: Batch) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for record in (batch, batch.masks):
        for field in fields(record):
            if isinstance(value := getattr(record, field.name), Tensor) and field.name != "buffer":
                found[field.name] = value
    return found


def assert_same(one: Batch, other: Batch) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert tensor.stride() == theirs[name].stride() or tensor.numel() == 0, name
        assert torch.equal(tensor, theirs[name]), name
    assert (one.position, one.masks.image_size) == (other.position, other.masks.image_size)


def aligned(size: int) -> Tensor:
    memory = torch.full((size + 64,), 255, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :][:size]


@examples
@given(st.lists(pixel_masks(), max_size=4))
def test_a_packed_batch_is_the_batch(drawn: list[np.ndarray]) -> None:
    batch = batch_of(drawn)
    packed = batch.pack(aligned)
    assert_same(packed, batch)
    assert packed.buffer is not None
    first, stop = packed.buffer.data_ptr(), packed.buffer.data_ptr() + packed.buffer.nbytes
    places = []
    for name, tensor in tensors(packed).items():
        if name in LARGE or tensor.numel() == 0:
            continue
        assert first <= tensor.data_ptr() <= stop - tensor.nbytes
        assert tensor.data_ptr() % 64 == 0
        places.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    places.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    # Again, into another buffer, as a pinned batch of a DataLoader is.
    assert_same(packed.pack(aligned), batch)


@examples
@given(st.lists(pixel_masks(), max_size=3))
def test_a_copy_of_the_buffer_is_a_copy_of_the_batch(drawn: list[np.ndarray]) -> None:
    batch = batch_of(drawn)
    packed = batch.pack(aligned)
    assert packed.buffer is not None
    copied = packed._repacked(packed.buffer.clone())
    packed.buffer.zero_()
    assert_same(copied, batch)


def test_every_type_of_a_tensor_is_packed() -> None:
    """Of all types whose size in bytes differs from that of the tensor before it."""
    batch = batch_of([np.ones((3, 5, 7), np.bool_)])
    odd = replace(
        batch,
        valid=torch.tensor([True, False, True]),
        areas=torch.tensor([1.5], dtype=torch.float64),
        boxes=torch.tensor([[1.5, 2.5, 3.5]], dtype=torch.bfloat16),
        points=torch.zeros((0, 2), dtype=torch.float16),
        ids=torch.tensor(9, dtype=torch.int16),
        positions=torch.arange(6).view(2, 3).T,
    )
    packed = odd.pack(aligned)
    for name in ("valid", "areas", "boxes", "points", "ids", "positions"):
        own, theirs = getattr(packed, name), getattr(odd, name)
        assert own.dtype == theirs.dtype
        assert torch.equal(own, theirs)


def test_a_tensor_that_was_replaced_after_packing_is_kept() -> None:
    packed = batch_of([np.ones((3, 5, 7), np.bool_)]).pack(aligned)
    assert packed.buffer is not None
    changed = replace(packed, areas=torch.tensor([5, 6, 7]))
    assert changed._repacked(packed.buffer.clone()).areas.tolist() == [5, 6, 7]


@pytest.mark.parametrize("dense", [False, True])
def test_a_batch_reaches_another_device_in_one_copy_beside_the_pixels(
    dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the meta device, which has no memory, can be counted on any machine."""
    batch = batch_of([np.ones((2, 5, 7), np.bool_), np.ones((1, 8, 4), np.bool_)])
    batch = replace(batch, dense=torch.ones((3, 4, 4), dtype=torch.uint8) if dense else None)
    copied: list[int] = []
    whole = Tensor.to

    def counted(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        found = whole(self, *arguments, **named)
        if found.device != self.device:
            copied.append(self.nbytes)
        return found

    monkeypatch.setattr(Tensor, "to", counted)
    there = batch.to("meta")
    assert len(copied) == 2 + dense
    for name, tensor in tensors(there).items():
        assert tensor.device.type == "meta", name
        assert tensor.shape == tensors(batch)[name].shape
    assert batch.to("cpu") is not there


def test_copies_to_the_cpu_are_complete_and_other_copies_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Torch copies from a GPU into pinned memory, and with non_blocking=True it does not wait for the copy.
    asked: set[tuple[str, bool]] = set()

    def noted(self: Tensor, device: torch.device | str, *, non_blocking: bool) -> Tensor:
        asked.add((torch.device(device).type, non_blocking))
        return torch.empty_like(self, device=device)

    batch = batch_of([np.ones((2, 3, 4), np.bool_)])
    monkeypatch.setattr(Tensor, "to", noted)
    there = batch.to("meta")
    assert asked == {("meta", True)}
    asked.clear()
    there.to("cpu")
    there.masks.to("cpu")
    raster_torch.of_masks(torch.zeros(2, dtype=torch.bool, device="meta"), torch.zeros(3))
    assert asked == {("cpu", False)}


def test_a_mask_between_the_source_pixels_that_are_read_is_empty() -> None:
    mask = np.zeros((2, 64, 64), np.bool_)
    mask[0, 31, 31] = True  # at 4 x 4 the pixels 8, 24, 40 and 56 are read
    mask[1, 24, 40] = True
    masks = batch_of([mask], 64).masks
    assert masks.empty(4).tolist() == [True, False]
    assert masks.empty(64).tolist() == [False, False]


def test_runs_of_no_length_are_no_pixels() -> None:
    runs = torch.tensor([6, 4, 0, 1, 2, 3], dtype=torch.int32)  # one mask of 4 x 4: a run of length 0 inside
    masks = RaggedMasks(
        runs=runs,
        offsets=torch.tensor([0, 6]),
        image=torch.tensor([0]),
        counts=(1,),
        sizes=torch.tensor([[4, 4]]),
        taken=torch.tensor([[4, 4]]),
        image_size=4,
    )
    for size in (1, 2, 3, 4, 9):
        assert torch.equal(masks.empty(size), ~(masks.dense(size) != 0).flatten(1).any(1))
