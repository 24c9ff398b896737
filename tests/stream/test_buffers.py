"""Memory of masks is reused only if it is unreferenced."""

import torch

from sa1b.stream.device import MaskBufferPool


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_buffer_of_masks_begins_empty_and_remembers_where_its_masks_are() -> None:
    pool = MaskBufferPool(masks=3, size=5, keep=2)
    pool.take_known(3)  # the buffers grow to the largest batch
    held = []
    for number in (1, 2):
        pixels, boxes = pool.take_known(2)
        assert (*pixels.shape, pixels.any(), boxes.any()) == (2, 5, 5, False, False)
        pixels[1, 2, 3] = boxes[1] = number
        held.append(pixels)
    beyond, boxes = pool.take_known(3)
    assert not beyond.any()
    assert not boxes.any()
    where = [address(pixels) for pixels in held]
    del held, pixels, boxes
    again, boxes = pool.take_known(3)
    assert address(again) == where[0]
    assert again[1, 2, 3] == 1
    assert boxes.tolist() == [[0] * 4, [1] * 4, [0] * 4]


def test_buffers_of_masks_are_as_large_as_the_batches_need() -> None:
    pool = MaskBufferPool(masks=1_600_000, size=512, keep=3)  # 390 GiB
    assert pool.take_known(86)[0].shape == (86, 512, 512)
    assert pool.capacity < 120 * 512 * 513
    assert pool.take_known(100)[0].shape == (100, 512, 512)
    few, boxes = pool.take_known(2)
    assert (few.shape, boxes.shape) == ((2, 512, 512), (2, 4))


def test_buffers_of_masks_are_spare_up_to_the_number_that_a_caller_held() -> None:
    pool = MaskBufferPool(masks=2, size=4, keep=5)
    held = [pool.take_known(2)[0]]
    assert pool.spare()  # for the next batch
    held.append(pool.take_known(2)[0])
    assert not pool.spare()
    held.append(pool.take_known(2)[0])  # the caller asks for a batch and holds two
    assert not pool.spare()
    where = {address(pixels) for pixels in held}
    held.pop()
    assert pool.spare()
    held.clear()
    held = [pool.take_known(2)[0] for _ in range(3)]
    assert {address(pixels) for pixels in held} == where
