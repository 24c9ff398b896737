"""Memory is reused only if it is unreferenced."""

import torch

from sa1b.stream.ragged import BufferPool, MaskBufferPool


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_unreferenced_memory_is_reused() -> None:
    memory = BufferPool(64, keep=2)
    first = address(memory.take((4, 4)))
    assert address(memory.take((2, 8))) == first


def test_memory_that_any_view_refers_to_is_not_reused() -> None:
    memory = BufferPool(64, keep=3)
    whole = memory.take((4, 4))
    for hold in (lambda t: t, lambda t: t[1:, ::2], lambda t: t.numpy()[0], lambda t: t.permute(1, 0)):
        held = hold(memory.take((4, 4)).fill_(7))
        other = memory.take((4, 4)).fill_(9)
        assert address(other) != address(whole)
        assert (torch.as_tensor(held) == 7).all()
        del held, other


def test_beyond_what_is_kept_memory_is_fresh() -> None:
    memory = BufferPool(64, keep=1)
    held = [memory.take((64,)).fill_(i) for i in range(5)]
    assert len({address(tensor) for tensor in held}) == 5
    assert [int(tensor[0]) for tensor in held] == list(range(5))


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


def test_a_tensor_of_no_bytes_is_no_problem() -> None:
    assert memory_shape((0, 8, 8)) == (0, 8, 8)


def memory_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(BufferPool(64, keep=1).take(shape).shape)
