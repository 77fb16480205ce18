"""Applying rotary position tables. The tables themselves come bound, from ``mask_and_rope``.

Shape letters: B batch, H heads, T tokens of this step, K head_dim, R rope_width (R <= K, even).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotate_interleaved"]


def _rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of ``x [B, H, T, K]``; feature i pairs with i + R/2 (half-split).

    cos, sin: float32 ``[B, 1, T, R]``. The arithmetic is float32, the result has x's dtype; features beyond R
    pass through unchanged (partial rotary).
    """
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return _rotate_half_split(x.to(torch.float32), cos, sin).to(x.dtype)
    rotated = _rotate_half_split(x[..., :width].to(torch.float32), cos, sin).to(x.dtype)
    return torch.cat((rotated, x[..., width:]), dim=-1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of ``x [B, H, T, K]``; feature 2i pairs with 2i + 1 and stays in place.

    cos, sin as for ``rotate`` (half-split tables: only their first R/2 columns are read).
    """
    width = cos.shape[-1]
    half = width // 2
    pairs = x[..., :width].to(torch.float32).unflatten(-1, (half, 2))  # type: ignore[no-untyped-call]
    even, odd = pairs.unbind(-1)
    c, s = cos[..., :half], sin[..., :half]
    rotated = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2).to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)
