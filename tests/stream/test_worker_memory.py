"""Images that a worker process shares: memory is reused only when nothing refers to it in either process."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import sa1b
from sa1b import Batch
from tests.stream.recorded import RECIPE, make_root

SHARED = 64  # pixels; images of fewer are sent as bytes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("worker-memory"), 40)


def stream_of(root: Path, image_size: int = RECIPE["image_size"]) -> sa1b.Stream:
    sizes = {"global_batch": 2, "image_size": image_size}
    return sa1b.Stream(root, damage_log=root / "damage.jsonl", **{**RECIPE, **sizes})


def plain(root: Path, *size: int) -> list[Batch]:
    return list(stream_of(root, *size))


def loaded(root: Path, *size: int, **options: Any) -> Iterator[Any]:
    return iter(DataLoader(stream_of(root, *size), batch_size=None, num_workers=1, **options))


def with_its_place(batch: Batch) -> tuple[Batch, int]:
    return batch, batch.images.data_ptr()  # of the worker


def test_memory_of_images_that_nothing_refers_to_is_reused(root: Path) -> None:
    places = [place for _, place in loaded(root, SHARED, collate_fn=with_its_place)]
    assert len(set(places)) <= len(places) // 2


def in_two_parts(batch: Batch) -> tuple[Batch, int]:
    images = batch.images
    return replace(batch, images=images[:1], extra={"second": images[1:]}), images.data_ptr()


@pytest.mark.parametrize("kept", [0, 1])
def test_memory_of_which_a_part_is_kept_is_not_reused(root: Path, kept: int) -> None:
    expected, parts, places = plain(root, SHARED), list[Tensor](), list[int]()
    for number, (batch, place) in enumerate(loaded(root, SHARED, collate_fn=in_two_parts)):
        if number < 3:
            parts.append((batch.images, batch.extra["second"])[kept][0, 0])  # a view
        places.append(place)
        del batch
    for part, whole in zip(parts, expected, strict=False):
        assert torch.equal(part, whole.images[kept, 0])
    assert not set(places[:3]) & set(places[3:])


def test_a_process_that_the_receiver_forks_releases_nothing(root: Path) -> None:
    expected, batches = plain(root, SHARED), loaded(root, SHARED)
    first = next(batches).images
    child = os.fork()
    if not child:
        del first
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == len(expected) - 1
    assert torch.equal(first, expected[0].images)


def as_numbers(batch: Batch) -> Batch:
    return replace(batch, images=batch.images.float())


@pytest.mark.parametrize(("context", "function"), [("fork", as_numbers), ("spawn", replace)])
def test_batches_that_are_kept_keep_their_pixels(root: Path, context: str, function: Any) -> None:
    expected = [function(batch) for batch in plain(root, SHARED)]
    assert len(expected) == 20  # more than a worker has buffers
    found = loaded(root, SHARED, multiprocessing_context=context, collate_fn=function)
    kept = [batch.images for batch in found]  # without the batch
    assert Path("/proc/self/maps").read_text().count("sa1b-images") > 8  # of 16 buffers
    assert all(torch.equal(one, other.images) for one, other in zip(kept, expected, strict=True))
    assert all(one.stride() == other.images.stride() for one, other in zip(kept, expected, strict=True))


def with_the_one_before(batch: Batch, before: list[Tensor] = []) -> tuple[Batch, Tensor, Tensor]:  # noqa: B006
    """Mixes batches in a worker, which keeps the last one."""
    before.append(batch.images)
    return batch, batch.images, before[-2] if len(before) > 1 else batch.images


def test_a_worker_may_keep_batches_and_send_their_images_twice(root: Path) -> None:
    expected = [batch.images for batch in plain(root)]
    found = loaded(root, collate_fn=with_the_one_before)
    for number, (batch, images, before) in enumerate(found):
        assert torch.equal(batch.images, expected[number])
        del batch
        assert torch.equal(images, expected[number])
        assert torch.equal(before, expected[max(number - 1, 0)])
