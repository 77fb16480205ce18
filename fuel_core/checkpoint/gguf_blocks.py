"""Rows of a quantised GGUF tensor: dequantised some at a time, or as the 4-bit codes they are stored as.

Block layouts are those of the format itself: ``Q4_0`` 32 numbers as a half-precision scale and 16 bytes, value
``(q - 8) d``; ``Q4_1`` a scale and a minimum, ``q d + m``; ``Q4_K`` 256 numbers as eight groups of 32, whose scales and
minima are 6-bit multiples of one pair of half-precision numbers. In the first two, byte j holds numbers j and j + 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fuel_core.layers.packed_formats import Affine4

if TYPE_CHECKING:
    import mmap

    import torch

    from fuel_core.checkpoint.gguf_header import GgufTensor

__all__ = ["AFFINE4_TYPES", "BlockRows"]

AFFINE4_TYPES: Final = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Stored types whose groups of 32 are 4-bit codes with a scale and a minimum: int4 keeps the codes."""


@dataclass(frozen=True)
class BlockRows:
    """One quantised matrix of a file, in the row order of the model.

    order: for each row of the model, which row of the file it is; None where the two agree.
    """

    data: mmap.mmap
    entry: GgufTensor
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        k = self.entry.shape[-1]
        return math.prod(self.entry.shape) // k, k  # a stack of matrices reads as one

    def rows(self, first: int, last: int) -> torch.Tensor:
        """float32 ``[last - first, K]``."""
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(self._blocks(first, last).numpy(), GGMLQuantizationType(self.entry.type_id))
        return torch.from_numpy(values).view(last - first, self.shape[1])

    def affine4(self, first: int, last: int) -> Affine4 | None:
        """The codes of rows ``first`` to ``last``; None for a type that is no 4-bit one."""
        read = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}.get(self.entry.type_name)
        if read is None:
            return None
        n = last - first
        found = read(self._blocks(first, last), n)
        return Affine4(found.codes.reshape(n, -1), found.scale.reshape(n, -1), found.minimum.reshape(n, -1))

    def _blocks(self, first: int, last: int) -> torch.Tensor:
        """Bytes of some rows, uint8 ``[last - first, bytes of a row]``."""
        import torch

        n = self.shape[0]
        stored = torch.frombuffer(self.data, dtype=torch.uint8, count=self.entry.nbytes, offset=self.entry.offset)
        by_row = stored.view(n, self.entry.nbytes // n)
        return by_row[first:last] if self.order is None else by_row[self.order[first:last]]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half-precision number at byte ``at`` of each block, float32 ``[blocks, 1]``."""
    import torch

    return blocks[..., at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Any) -> Any:
    """Low nibbles, then high ones: ``[..., m]`` -> ``[..., 2 m]``."""
    import torch

    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(rows: torch.Tensor, n: int) -> Affine4:
    blocks = rows.reshape(n, -1, 18)
    scale = _half(blocks, 0)
    return Affine4(_nibbles(blocks[..., 2:]), scale, -8 * scale)


def _q4_1(rows: torch.Tensor, n: int) -> Affine4:
    blocks = rows.reshape(n, -1, 20)
    return Affine4(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(rows: torch.Tensor, n: int) -> Affine4:
    import torch

    blocks = rows.reshape(n, -1, 144)
    # Twelve bytes hold eight 6-bit scales and eight 6-bit minima: the first four of each in the low bits of bytes 0-3
    # and 4-7; the others in the nibbles of bytes 8-11, their two high bits in the high bits of bytes 0-7.
    low, mid, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (last & 15) | (low >> 6 << 4)), dim=-1).to(torch.float32)
    minima = torch.cat((mid & 63, (last >> 4) | (mid >> 6 << 4)), dim=-1).to(torch.float32)
    # Each run of 32 bytes holds two groups: its low nibbles, then its high ones.
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))  # type: ignore[no-untyped-call]
    return Affine4(codes, _half(blocks, 0) * scales, -_half(blocks, 2) * minima)
