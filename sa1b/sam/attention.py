"""Fused attention of the model: no tokens x tokens matrix is stored.

The image encoder adds a decomposed relative position to the logits of its attention (Li et al., "MViTv2",
2022; as in "Segment Anything", Kirillov et al., 2023): with q at row r, column c and k at row s, column t,

    logit = q.k / sqrt(d) + q.Rh[r - s] + q.Rw[c - t]

A bias of tokens x tokens would prevent the use of fused kernels and take 4096 * 4096 numbers per head at 1024
pixels. So the bias is folded into longer queries and keys, without loss of accuracy:

    q' = [q / sqrt(d), q.Rh[r - 0], q.Rh[r - 1], ..., q.Rw[c - 0], q.Rw[c - 1], ...]
    k' = [k,           1 where s = 0, 1, ...,         1 where t = 0, 1, ...        ]

and q'.k' is the logit above. The length of a head grows from d to d + rows + columns: 92 in a window of 14
with d = 64, padded to 96, and 192 in a global block at 1024 pixels. The kernels need queries, keys and values
of equal length, so the values are padded with zeros and the output is cut back to d.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_MULTIPLE = 8  # flash attention needs a head length that is a multiple of 8


class RelativeAttention(nn.Module):
    """Self-attention on a grid of side x side tokens with decomposed relative positions (`attn`)."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads = heads
        self.side = side
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * side - 1, width // heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * side - 1, width // heads))

    def gathered(self, function: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
        """Call a function that uses the weights; FSDP gathers them around this call, not around `forward`."""
        return function(*arguments)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens float [B, side, side, width] -> the same shape; B images or windows. Else ValueError."""
        batch, rows, columns, width = x.shape
        if (rows, columns) != (self.side, self.side):
            raise ValueError(
                f"tokens of {rows} x {columns}: must be {self.side} x {self.side}, the grid of the relative "
                "positions; build the model with the image_size of the images"
            )
        q, k, v = self.projected(x)
        length = q.shape[-1]
        q, k = self.folded(q, k)
        v = F.pad(v.flatten(2, 3), (0, q.shape[-1] - length))
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        out = out[..., :length].transpose(1, 2).reshape(batch, rows, columns, width)
        projected: Tensor = self.proj(out)
        return projected

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens: [B, heads, rows, columns, d] each."""
        grid = self.qkv(x).view(*x.shape[:3], 3, self.heads, -1).permute(3, 0, 4, 1, 2, 5)
        q, k, v = grid.unbind(0)
        return q, k, v

    def positions(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Products of queries [B, heads, rows, columns, d] and the positions of each axis: [..., side]."""
        rows = torch.einsum("bnrcd,rds->bnrcs", q, distances(self.rel_pos_h))
        return rows, torch.einsum("bnrcd,cdt->bnrct", q, distances(self.rel_pos_w))

    def folded(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The longer queries and keys: [B, heads, rows, columns, d] -> [B, heads, tokens, longer d]."""
        rows_of_q, columns_of_q = self.positions(q)
        one_hot = torch.eye(self.side, dtype=k.dtype, device=k.device)
        rows_of_k = one_hot[:, None, :].expand(*k.shape[:-1], -1)
        columns_of_k = one_hot[None, :, :].expand(*k.shape[:-1], -1)

        # Under autocast, the products of q may have another dtype than q.
        q = torch.cat([q * q.shape[-1] ** -0.5, rows_of_q.to(q.dtype), columns_of_q.to(q.dtype)], dim=-1)
        k = torch.cat([k, rows_of_k, columns_of_k], dim=-1)
        padding = -q.shape[-1] % HEAD_MULTIPLE
        if padding:
            q, k = F.pad(q, (0, padding)), F.pad(k, (0, padding))
        return q.flatten(2, 3), k.flatten(2, 3)


def distances(table: Tensor) -> Tensor:
    """The embeddings of all distances r - s along one axis: float [n, d, n], at [r, :, s].

    Row i of the table [2n - 1, d] is the embedding of the distance i - (n - 1). The result is made of windows
    of the table, not by indexing: the gradient of indexing is a scattered sum, which is slower and has no
    fixed order on some devices.
    """
    return table.unfold(0, (table.shape[0] + 1) // 2, 1).flip(-1)


def split_windows(x: Tensor, window: int) -> Tensor:
    """Tokens [B, H, W, C] -> [B * windows, window, window, C], in row-major order of windows.

    The grid is padded with zeros at the bottom and on the right. As in the published model, attention
    includes the padding.
    """
    batch, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    down, across = x.shape[1] // window, x.shape[2] // window
    x = x.view(batch, down, window, across, window, channels).transpose(2, 3)
    return x.reshape(batch * down * across, window, window, channels)


def join_windows(windows: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `split_windows`: [B * windows, window, window, C] -> [B, height, width, C]."""
    window, channels = windows.shape[1], windows.shape[3]
    down, across = -(-height // window), -(-width // window)
    x = windows.view(-1, down, across, window, window, channels).transpose(2, 3)
    return x.reshape(-1, down * window, across * window, channels)[:, :height, :width]
