"""Cases of the attention of image tokens to tokens: `TRITON_INTERPRET=1 python -m tests.sam.attention_cases`."""

import itertools
from unittest import mock

import torch
from torch.nn import functional as F

from sa1b.sam import tokens_to_image_triton, image_to_tokens_triton
from sa1b.sam.tokens_to_image_triton import ReadImage
from sa1b.sam.image_to_tokens_triton import ImageToTokens, Places

EPS = 1e-5
# Relative to the largest number, of the results and of each gradient.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.005, torch.bfloat16: 0.04}


def plain(image, features, basis, position, keys, biases, values, gains, shifts):
    """The formula of the module, in the format of its arguments."""
    x = image.repeat_interleave(len(keys) // len(image), 0)
    if features is not None:
        x = x + features.transpose(1, 2) @ basis
    logits = keys @ (x + position).transpose(1, 2)[:, None] + biases[..., None]
    weights = logits.softmax(2).flatten(1, 2)
    out = F.layer_norm(x + weights.transpose(1, 2) @ values.flatten(1, 2), gains.shape, gains, shifts, EPS)
    return out, out + position


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
    """Results and gradients equal those of torch in float64."""
    count, (heads, channels, places) = images * masks, sizes
    generator = torch.Generator().manual_seed(tokens + count)

    def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    given = [
        made(images, places, channels), made(count, 16, places) if low else None,
        made(16, channels, scale=0.2) if low else None, made(places, channels),
        made(count, heads, tokens, channels, scale=channels**-0.5), made(count, heads, tokens),
        made(count, heads, tokens, channels), made(channels).float(), made(channels).float(),
    ]  # fmt: skip
    gradients = [made(count, places, channels) for _ in range(2)]
    leaves = [x for number, x in enumerate(given) if x is not None and number != 3]
    for x in leaves:
        x.requires_grad_()
    found = ImageToTokens.apply(given[0], given[0].detach() + given[3], *given[1:], EPS, True)
    assert [x.dtype for x in found] == [dtype] * 2
    own = torch.autograd.grad(found, leaves, gradients)
    alone = ImageToTokens.apply(given[0], given[0].detach() + given[3], *given[1:], EPS, False)
    assert alone[1] is None
    assert torch.equal(alone[0], found[0])
    # Of the last layer, whose other output nobody reads: as with a gradient of zeros for it.
    found_again = ImageToTokens.apply(given[0], given[0].detach() + given[3], *given[1:], EPS, True)
    zeros = [gradients[0], torch.zeros_like(gradients[1])]
    pairs = zip(
        torch.autograd.grad(alone[0], leaves, gradients[0]),
        torch.autograd.grad(found_again, leaves, zeros),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)
    exact = [None if x is None else x.detach().double() for x in given]
    wanted_of = [x for number, x in enumerate(exact) if x is not None and number != 3]
    for x in wanted_of:
        x.requires_grad_()
    expected = plain(*exact)
    wanted = torch.autograd.grad(expected, wanted_of, [x.double() for x in gradients])
    for number, (one, other) in enumerate(zip((*found, *own), (*expected, *wanted), strict=True)):
        assert one.shape == other.shape
        error = float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1))
        assert error <= TOLERANCE[dtype], (images, masks, tokens, dtype, low, number, error)


def check_read(device: str, masks: int, rows: int, tokens: int, channels: int, dtype: torch.dtype) -> None:
    """What rows read from the image, and the gradients, equal those of torch in float64; the image has another
    use.
    """
    generator = torch.Generator().manual_seed(rows + masks)

    def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    queries, image = made(masks, rows, channels, scale=channels**-0.5), made(masks, tokens, channels)
    position, gradient, other = (
        made(tokens, channels),
        made(masks, rows, channels),
        made(masks, tokens, channels),
    )
    leaves = [queries.requires_grad_(), image.requires_grad_()]
    read, same = ReadImage.apply(queries, image, position)
    assert read.dtype == dtype
    assert torch.equal(same, image)
    own = [read, *torch.autograd.grad((read, same), leaves, (gradient, other), retain_graph=True)]
    without = [read, *torch.autograd.grad(read, leaves, gradient)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    weights = (exact[0] @ (exact[1] + position.double()).transpose(1, 2)).softmax(2)
    expected = weights @ exact[1]
    of_read = torch.autograd.grad(expected, exact, gradient.double())
    for found, added in ((own, other.double()), (without, 0.0)):
        for number, (one, wanted) in enumerate(
            zip(found, (expected, of_read[0], of_read[1] + added), strict=True)
        ):
            assert one.shape == wanted.shape
            error = float((one - wanted).detach().abs().max() / wanted.detach().abs().max().clamp(min=1))
            assert error <= TOLERANCE[dtype], (masks, rows, tokens, dtype, number, error)


def check_reads(device: str, *shapes: tuple[int, int], formats: tuple[torch.dtype, ...]) -> int:
    """`check_read` for shapes of (image tokens, channels)."""
    cases = list(itertools.product(shapes, ((1, 16), (2, 10), (3, 32)), formats))
    for (tokens, channels), (masks, rows), dtype in cases:
        check_read(device, masks, rows, tokens, channels, dtype)
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
    several = {"FORWARD_PLACES": Places(16, 2, 4, 1), "BACKWARD_PLACES": Places(32, 4, 4, 2)}
    with mock.patch.multiple(image_to_tokens_triton, **several):  # several tiles in a program
        check_all("cpu", (2, 16, 64), formats=(torch.float32,))
    print(f"{check_reads('cpu', (64, 16), (256, 32), formats=formats)} kinds of reading")
    with mock.patch.object(tokens_to_image_triton, "PROGRAMS", 1):  # a mask has one program
        check_reads("cpu", (256, 32), formats=(torch.float32,))
