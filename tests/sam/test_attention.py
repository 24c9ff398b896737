"""Attention with decomposed relative positions: exact, fused, in windows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sa1b.sam.image_encoder import RelativeAttention, distances, join_windows, split_windows


def random_attention(side: int, heads: int, length: int, seed: int) -> RelativeAttention:
    torch.manual_seed(seed)
    attention = RelativeAttention(heads * length, heads, side).double()
    torch.nn.init.normal_(attention.rel_pos_h)
    torch.nn.init.normal_(attention.rel_pos_w)
    return attention


def written_out(attention: RelativeAttention, x: Tensor) -> Tensor:
    """The definition, one query and one key at a time: x [side, side, width]."""
    side, heads = attention.side, attention.heads
    q, k, v = attention.qkv(x).view(side, side, 3, heads, -1).unbind(2)
    positions = [(row, column) for row in range(side) for column in range(side)]
    out = torch.empty_like(q)
    for r, c in positions:
        for head in range(heads):
            query = q[r, c, head]
            logits = [
                query @ k[s, t, head] / math.sqrt(len(query))
                + query @ attention.rel_pos_h[r - s + side - 1]
                + query @ attention.rel_pos_w[c - t + side - 1]
                for s, t in positions
            ]
            weights = torch.stack(logits).softmax(0)
            out[r, c, head] = sum(w * v[s, t, head] for w, (s, t) in zip(weights, positions, strict=True))
    return torch.as_tensor(attention.proj(out.flatten(2)))


@torch.no_grad()
@pytest.mark.parametrize(("side", "length"), [(1, 8), (2, 8), (3, 5), (4, 8)])
def test_every_logit_has_its_relative_positions(side: int, length: int) -> None:
    attention = random_attention(side, 2, length, side)
    x = torch.randn(2, side, side, 2 * length, dtype=torch.float64)
    expected = torch.stack([written_out(attention, one) for one in x])
    torch.testing.assert_close(attention(x), expected, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_definition() -> None:
    attention = random_attention(3, 2, 5, 0)
    x = torch.randn(3, 3, 10, dtype=torch.float64, requires_grad=True)
    towards = torch.randn(3, 3, 10, dtype=torch.float64)
    sources = [x, *attention.parameters()]
    expected = torch.autograd.grad((written_out(attention, x) * towards).sum(), sources)
    found = torch.autograd.grad((attention(x[None])[0] * towards).sum(), sources)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_distances_are_looked_up_from_query_to_key() -> None:
    table = torch.arange(5.0)[:, None]  # for the distances -2, -1, 0, 1, 2
    assert distances(table)[:, 0].tolist() == [[2, 1, 0], [3, 2, 1], [4, 3, 2]]


class Shapes(TorchDispatchMode):
    """The executed operators, and the shapes of all tensors that they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.names.add(str(function))
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, Tensor):
                self.shapes.add(tuple(result.shape))
        return results


def test_no_matrix_of_tokens_by_tokens_is_made_in_either_direction() -> None:
    side, heads = 12, 2
    attention = random_attention(side, heads, 16, 0).float()
    tokens = side * side
    with Shapes() as seen:
        attention(torch.randn(1, side, side, 32)).sum().backward()
    assert any("flash_attention" in name and "backward" not in name for name in seen.names)
    assert any("flash_attention" in name and "backward" in name for name in seen.names)
    assert not [shape for shape in seen.shapes if math.prod(shape) >= heads * tokens * tokens]


@pytest.mark.parametrize(("side", "length"), [(14, 64), (64, 8), (14, 80), (7, 5)])
def test_heads_reach_the_kernel_with_one_length_that_is_a_multiple_of_8(
    side: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def note(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen.extend([q.shape[-1], k.shape[-1], v.shape[-1]])
        return fused(q, k, v, scale=scale)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    random_attention(side, 1, length, 0)(torch.randn(1, side, side, length, dtype=torch.float64))
    assert set(seen) == {8 * math.ceil((length + 2 * side) / 8)}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_windows_cut_the_grid_row_by_row_and_join_again(
    batch: int, height: int, width: int, window: int
) -> None:
    x = 1 + torch.arange(batch * height * width, dtype=torch.float32).view(batch, height, width, 1)
    windows = split_windows(x, window)
    down, across = math.ceil(height / window), math.ceil(width / window)
    assert windows.shape == (batch * down * across, window, window, 1)
    assert torch.equal(join_windows(windows, height, width), x)
    last = windows[-1]  # bottom right: zeros outside the grid
    rows, columns = height - (down - 1) * window, width - (across - 1) * window
    assert torch.equal(last[:rows, :columns], x[-1, (down - 1) * window :, (across - 1) * window :])
    assert not last[rows:].any()
    assert not last[:, columns:].any()
