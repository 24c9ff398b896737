"""Cases of the attention of image tokens to tokens: `TRITON_INTERPRET=1 python -m tests.sam.attention_cases`."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from sa1b.sam import image_to_tokens_triton, tokens_to_image_triton
from sa1b.sam.image_to_tokens_triton import ImageToTokens, Places
from sa1b.sam.tokens_to_image_triton import ReadImage

EPS = 1e-5
# Relative to the largest number, of the results and of each gradient.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.005, torch.bfloat16: 0.04}


def of_masks(image, features, basis, masks):
    """The image tokens of each mask."""
    x = image.repeat_interleave(masks, 0)
    return x if features is None else x + features.transpose(1, 2) @ basis


def plain(x, position, keys, biases, values, gains, shifts):
    """The formula of the attention of image tokens, in the format of its arguments."""
    logits = keys @ (x + position).transpose(1, 2)[:, None] + biases[..., None]
    weights = logits.softmax(2).flatten(1, 2)
    added = weights.transpose(1, 2) @ values.flatten(1, 2)
    return F.layer_norm(x + added, gains.shape, gains, shifts, EPS)


class Made:
    """Random tensors in a number format."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, self.dtype)


def compare(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], *case: Any) -> None:
    """The tensors are equal but for rounding errors."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape, (case, number)
        error = float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1))
        assert error <= TOLERANCE[found[0].dtype], (case, number, error)


def check(
    device: str,
    images: int,
    masks: int,
    tokens: int,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    *,
    low: bool,
) -> None:
    """Results and gradients of the attention of image tokens equal those of torch in float64."""
    count, (heads, channels, places) = images * masks, sizes
    made = Made(device, dtype, tokens + count)
    # Image tokens in the order of a convolution's result, as cached embeddings have them.
    image, position = (made(n, channels, places).mT for n in (images, 1))
    gradient = made(count, 1, channels).expand(-1, places, -1)  # as of a sum
    features = made(count, places, 16).mT if low else None
    basis = made(channels, 16, scale=0.2).T if low else None
    given = [
        made(count, heads, tokens, channels, scale=channels**-0.5), made(count, heads, tokens),
        made(count, heads, tokens, channels), made(channels).float(), made(channels).float(),
    ]  # fmt: skip
    x = image[:, None].expand(-1, masks, -1, -1).requires_grad_()
    for one in given:
        one.requires_grad_()
    placed = None if masks == 1 and not low else image + position
    out = ImageToTokens.apply(x, placed, features, basis, position[0], *given, EPS)
    assert out.dtype == dtype
    own = torch.autograd.grad(out, [x, *given], gradient)
    low_rank = (None, None) if features is None or basis is None else (features.double(), basis.double())
    exact = [of_masks(image.double(), *low_rank, masks), *(one.detach().double() for one in given)]
    for one in exact:
        one.requires_grad_()
    expected = plain(exact[0], position[0].double(), *exact[1:])
    of_x, *others = torch.autograd.grad(expected, exact, gradient.double())
    compare([out, *own], [expected, of_x.view(x.shape), *others], images, masks, tokens, low)


def check_read(
    device: str,
    images: int,
    masks: int,
    rows: int,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    *,
    shared: bool,
    low: bool,
) -> None:
    """What rows read from the image, and the gradients, equal those of torch in float64; the image has another
    use.
    """
    count, (places, channels) = images * masks, sizes
    made = Made(device, dtype, rows + masks)
    given = [made(count, rows, channels, scale=channels**-0.5), made(images, channels, places).mT]
    given += [made(count, places, 16).mT, made(channels, 16, scale=0.2).T] if low else []
    position = made(channels, places).T
    gradient, other = made(count, 1, channels).expand(-1, rows, -1), made(count, channels, places).mT
    for one in given:
        one.requires_grad_()
    placed = (given[1] + position).detach() if shared else position
    read, x = ReadImage.apply(*given[:2], placed, *(given[2:] if low else (None, None)))
    assert read.dtype == dtype
    assert torch.equal(x, given[1][:, None].expand(-1, masks, -1, -1) if shared else given[1])
    gradients = gradient, other.reshape(x.shape)
    own = torch.autograd.grad((read, x), given, gradients, retain_graph=True)
    unread = torch.autograd.grad(x, given, gradients[1], retain_graph=True)
    without = torch.autograd.grad(read, given, gradient)
    exact = [one.detach().double().requires_grad_() for one in given]
    every = of_masks(exact[1], *(exact[2:] if low else (None, None)), masks)
    expected = (exact[0] @ (every + position.double()).transpose(1, 2)).softmax(2) @ every
    wanted = torch.autograd.grad(
        (expected, every), exact, (gradient.double(), other.double()), retain_graph=True
    )
    compare([read, *own], [expected, *wanted], images, masks, rows, places, shared, low)
    wanted = torch.autograd.grad(expected, exact, gradient.double(), retain_graph=True)
    compare(without, wanted, images, masks, rows, shared, low)
    wanted = torch.autograd.grad(every, exact, other.double(), materialize_grads=True)
    compare(unread, wanted, images, masks, rows, shared, low)


def check_reads(device: str, *shapes: tuple[int, int], formats: tuple[torch.dtype, ...]) -> int:
    """`check_read` for shapes of (image tokens, channels)."""
    own = [(masks, 1, rows, False, False) for masks, rows in ((1, 16), (2, 10), (3, 32), (2, 56), (1, 128))]
    shared = [
        (*masks, rows, True, low)
        for masks, rows in (((1, 1), 16), ((2, 3), 8), ((3, 2), 56), ((1, 5), 96))
        for low in (False, True)
    ]
    cases = list(itertools.product(shapes, own + shared, formats))
    for sizes, (images, masks, rows, of_image, low), dtype in cases:
        check_read(device, images, masks, rows, dtype, sizes, shared=of_image, low=low)
    return len(cases)


def check_all(device: str, *shapes: tuple[int, int, int], formats: tuple[torch.dtype, ...]) -> int:
    """All cases, for shapes of (heads, channels, image tokens)."""
    cases = list(itertools.product(shapes, ((1, 3, 7), (2, 2, 8), (3, 1, 12), (2, 1, 16)), (False, True)))
    for sizes, (images, masks, tokens), low in cases:
        for dtype in formats:
            check(device, images, masks, tokens, dtype, sizes, low=low)
    return len(cases)


if __name__ == "__main__":
    # The interpreter multiplies the bits of bfloat16 as integers.
    formats = torch.float32, torch.float16
    print(f"{check_all('cpu', (2, 16, 64), (8, 32, 128), formats=formats)} kinds of attention")
    several = {"FORWARD_PLACES": Places(16, 1, 4, 1), "ROWS_PLACES": Places(16, 2, 4, 2)}
    with mock.patch.multiple(image_to_tokens_triton, **several):  # several programs share a mask
        check_all("cpu", (2, 16, 64), formats=(torch.float32,))
    with mock.patch.object(image_to_tokens_triton, "shared_memory", return_value=99_000):
        check_all("cpu", (2, 16, 64), formats=(torch.float32,))
    reads = check_reads("cpu", (64, 16), formats=formats) + check_reads("cpu", (256, 32), formats=formats[:1])
    print(f"{reads} kinds of reading")
    with mock.patch.object(tokens_to_image_triton, "PROGRAMS", 1):  # a mask has one program
        check_reads("cpu", (128, 16), formats=(torch.float32,))
