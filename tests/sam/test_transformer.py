"""The two-way transformer: attention with the projections of the image applied to the tokens."""

import math

import pytest
import torch
from torch import Tensor

from sa1b.sam.image_tokens import OwnImage, SharedImage
from sa1b.sam.transformer import ImageToToken, ProjectedAttention, TokenAttention, TokenToImage

WIDTH, HEADS, PIXELS, TOKENS, RANK = 16, 2, 9, 4, 3


@torch.no_grad()
def test_attention_between_sequences_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = TokenAttention(16, 2, reduction=2).double()
    q, k, v = (torch.randn(3, length, 16, dtype=torch.float64) for length in (4, 6, 6))
    q_heads, k_heads, v_heads = (
        projection(x).view(3, -1, 2, 4)
        for projection, x in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v))
    )
    weights = (torch.einsum("mthd,mnhd->mhtn", q_heads, k_heads) / 2).softmax(-1)
    expected = attention.out_proj(torch.einsum("mhtn,mnhd->mthd", weights, v_heads).flatten(2))
    torch.testing.assert_close(attention(q, k, v), expected)


def shared(counts: tuple[int, ...], rank: int = RANK) -> SharedImage:
    tokens, position, basis = (torch.randn(n, WIDTH).double() for n in (len(counts) * PIXELS, PIXELS, rank))
    tokens = tokens.view(len(counts), PIXELS, WIDTH)
    features = torch.randn(sum(counts), rank, PIXELS).double() if rank else None
    return SharedImage(tokens, tokens + position, counts, features, basis)


def own(image: SharedImage) -> OwnImage:
    """The same tokens, copied for each mask."""
    index = torch.arange(len(image.counts)).repeat_interleave(torch.tensor(image.counts))
    term = 0 if image.features is None else image.features.transpose(1, 2) @ image.basis
    position = (image.placed - image.tokens)[0].detach()
    return OwnImage(image.tokens[index] + term, image.placed[index] + term, position)


COUNTS = [(3,), (2, 2), (1, 1, 1), (3, 0, 1), (2, 1)]


@torch.no_grad()
@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("counts", COUNTS)
def test_shared_tokens_give_what_written_out_tokens_give(counts: tuple[int, ...], rank: int) -> None:
    torch.manual_seed(0)
    image, masks = shared(counts, rank), sum(counts)
    rows, weights = torch.randn(masks, 5, WIDTH).double(), torch.randn(masks, 5, PIXELS).double()
    expected = own(image)
    torch.testing.assert_close(image.logits(rows), expected.logits(rows))
    torch.testing.assert_close(image.weighted(weights), expected.weighted(weights))
    torch.testing.assert_close(image.plus(weights, rows), expected.plus(weights, rows))


def random_attention(kind: type[ProjectedAttention]) -> ProjectedAttention:
    torch.manual_seed(1)
    attention = kind(WIDTH, HEADS, reduction=2).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention


def written_out(attention: ProjectedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-head attention by its definition."""
    q, k, v = attention.q_proj(q), attention.k_proj(k), attention.v_proj(v)
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    weights = (torch.einsum("mthd,mnhd->mhtn", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    return torch.as_tensor(attention.out_proj(torch.einsum("mhtn,mnhd->mthd", weights, v).flatten(2)))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("direction", ["tokens to image", "image to tokens"])
def test_both_directions_and_their_gradients_are_those_of_the_definition(
    counts: tuple[int, ...], direction: str
) -> None:
    attention: TokenToImage | ImageToToken
    attention = random_attention(TokenToImage if direction == "tokens to image" else ImageToToken)
    image = shared(counts)
    queries, values = (torch.randn(sum(counts), TOKENS, WIDTH).double() for _ in range(2))
    sources = [image.tokens, image.features, image.basis, queries, values]
    sources = [source.requires_grad_() for source in sources if source is not None]
    position = (image.placed - image.tokens).detach()
    image = SharedImage(image.tokens, image.tokens + position, counts, image.features, image.basis)
    expected = own(image)
    if isinstance(attention, TokenToImage):
        found = attention(queries, image)[0] + 0 * values
        wanted = written_out(attention, queries, expected.placed, expected.tokens) + 0 * values
    else:
        norm = torch.nn.LayerNorm(WIDTH).double()
        found = attention(image, queries, values, norm, position[0]).tokens
        wanted = norm(expected.tokens + written_out(attention, expected.placed, queries, values))
    torch.testing.assert_close(found, wanted)
    towards = torch.randn_like(wanted)
    sources += attention.parameters()
    ours = torch.autograd.grad((found * towards).sum(), sources)
    for one, other in zip(ours, torch.autograd.grad((wanted * towards).sum(), sources), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_under_autocast_everything_of_the_size_of_the_image_is_in_the_low_format() -> None:
    image = shared((2,))
    low = SharedImage(
        *(tensor.bfloat16() for tensor in (image.tokens, image.placed)),
        image.counts, torch.zeros(2, RANK, PIXELS).bfloat16(), image.basis.bfloat16(),
    )  # fmt: skip
    attention = ImageToToken(WIDTH, HEADS, reduction=2)
    tokens = torch.randn(2, TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        norm, position = torch.nn.LayerNorm(WIDTH), torch.zeros(PIXELS, WIDTH).bfloat16()
        assert attention(low, tokens, tokens, norm, position).tokens.dtype == torch.bfloat16
