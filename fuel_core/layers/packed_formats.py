"""Weights of 8 and 4 bits: how they are packed, multiplied, looked up and unpacked again.

``int8``: one scale for each output channel. ``int4``: groups of 32 along the input, each with a scale and a zero.
Both products are kernels of torch that are fast with bfloat16 inputs alone, so an activation of any dtype goes through
bfloat16 for the product and comes back. With many rows (a prompt) unpacking a piece of the matrix and multiplying
densely is faster; ``docs/weights.md`` has the measurements behind the thresholds.

Shape letters: N output channels, K input width, R rows of a product, B rows of a packed block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuel_core import native
from fuel_core.errors import BackendUnavailableError, WeightsError

__all__ = ["GROUP", "PACKED_PARAMETERS", "Affine4", "Int4Format", "Int8Format", "RowRange", "Rows", "TensorRows"]

GROUP = 32
"""Inputs that share one scale and one zero in int4; also what both kernels want K to be a multiple of."""
PACKED_PARAMETERS = ("weight_scale", "weight_scale_and_zero")
"""What a packed module holds beside ``weight``."""

# Elements packed, or unpacked for a dense product, at a time: bounds the temporaries whatever the matrix.
_PACK_ELEMENTS = 1 << 17
_UNPACK_ELEMENTS = 1 << 18
# From this many rows on the dense product is the faster one (docs/weights.md).
DENSE_FROM_ROWS = {"int8": 24, "int4": 48}


@dataclass(frozen=True)
class Affine4:
    """Rows as 4-bit codes: value = code * scale + minimum, for each group of 32."""

    codes: Tensor
    """uint8 ``[n, K]``, 0..15."""
    scale: Tensor
    """float32 ``[n, K / 32]``."""
    minimum: Tensor
    """float32 ``[n, K / 32]``."""


class Rows(Protocol):
    """A matrix that is read some rows at a time, so that nobody needs the whole of it in float32."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` in float32, ``[last - first, K]``."""
        ...

    def affine4(self, first: int, last: int) -> Affine4 | None:
        """The same rows as 4-bit codes, where they are stored so; None elsewhere."""
        ...


@dataclass(frozen=True)
class TensorRows:
    """A matrix that is in memory (or mapped) already."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def rows(self, first: int, last: int) -> Tensor:
        return self.tensor[first:last].to(device="cpu", dtype=torch.float32)

    def affine4(self, first: int, last: int) -> Affine4 | None:
        return None


@dataclass(frozen=True)
class RowRange:
    """Rows ``first`` to ``last`` of another matrix."""

    source: Rows
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.source.shape[1]

    def rows(self, first: int, last: int) -> Tensor:
        return self.source.rows(self.first + first, self.first + last)

    def affine4(self, first: int, last: int) -> Affine4 | None:
        return self.source.affine4(self.first + first, self.first + last)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """``(N, K)`` of a Linear or Embedding, whatever its ``weight`` looks like."""
    width = getattr(module, "in_features", None)
    if width is not None:
        return module.out_features, width  # type: ignore[return-value]
    return module.num_embeddings, module.embedding_dim  # type: ignore[return-value]


def pieces(n: int, k: int, multiple: int = 128, elements: int = _PACK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Row ranges of an ``[n, k]`` matrix of at most about ``elements`` each, at multiples of ``multiple``."""
    step = max(elements // max(k, 1) // multiple, 1) * multiple
    for first in range(0, n, step):
        yield first, min(first + step, n)


def _tensor(module: nn.Module, name: str) -> Tensor:
    found = getattr(module, name)
    assert isinstance(found, Tensor)
    return found


def _finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise WeightsError("expected finite numbers to quantise, found infinity or nan; use weights='f32'")
    return values


def kernel_input(x: Tensor) -> Tensor:
    """What both kernels read of ``x [..., K]``: bfloat16 ``[R, K]``."""
    return x.reshape(-1, x.shape[-1]).to(torch.bfloat16)


@cache
def dense_product_dtype() -> torch.dtype:
    """What a long prompt is multiplied in: bfloat16 where the CPU multiplies it in hardware, else float32."""
    cpu = torch.cpu
    checks = (getattr(cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return torch.bfloat16 if any(check is not None and check() for check in checks) else torch.float32


class _PackedFormat:
    """What the two packed formats share: the choice between kernel and dense product, casts, bias and padding."""

    name: ClassVar[str]
    compressed: ClassVar[bool] = True

    @property
    def packed_as(self) -> str | None:
        return self.name

    def matmul(self, x: Tensor, module: nn.Module, bias: Tensor | None, kernel_input: Tensor | None = None) -> Tensor:
        """``x [..., K]`` -> ``[..., N]`` in x's dtype. kernel_input: ``kernel_input(x)``, where somebody has it."""
        n, k = shape_of(module)
        flat = x.reshape(-1, k)
        rows = flat.shape[0]
        # A number of rows that is a symbol belongs to a recording, which must not branch on it.
        if isinstance(rows, int) and rows >= DENSE_FROM_ROWS[self.name] and self._can_unpack():
            y = self._dense(flat.to(dense_product_dtype()), module)
        else:
            y = self._kernel(flat.to(torch.bfloat16) if kernel_input is None else kernel_input, module)
        y = y.to(x.dtype)
        if y.shape[1] != n:
            y = y[:, :n]
        if bias is not None:
            y = y + bias.to(x.dtype)
        return y.view(*x.shape[:-1], n)

    def _can_unpack(self) -> bool:
        return True

    def _kernel(self, x: Tensor, module: nn.Module) -> Tensor:
        """bfloat16 ``[R, K]`` -> bfloat16 ``[R, >= N]``, by torch's kernel."""
        raise NotImplementedError

    def _dense(self, x: Tensor, module: nn.Module) -> Tensor:
        """``[R, K]`` -> ``[R, >= N]`` through an unpacked piece of the matrix at a time, in x's dtype."""
        raise NotImplementedError


def _scale(module: nn.Module, name: str) -> Tensor:
    """The scales in the dtype of the kernels, also after someone cast the whole model."""
    if _tensor(module, "weight").is_cuda:
        raise BackendUnavailableError(
            "packed weights: a CPU expected, found a CUDA device, for which they would be packed otherwise; "
            "load with weights='bf16' there"
        )
    scale = _tensor(module, name)
    return scale if scale.dtype == torch.bfloat16 else scale.to(torch.bfloat16)


class Int8Format(_PackedFormat):
    """``weight`` int8 ``[N, K']``, ``weight_scale`` bfloat16 ``[N]``; K' is K rounded up to a multiple of 32.

    value = code * scale, codes within -127..127, rounded to nearest against the scale as it is stored.
    """

    name = "int8"

    def cannot_hold(self, n: int, k: int) -> str | None:
        """Why an ``[n, k]`` matrix cannot be stored so; None: it can."""
        return None

    def empty(self, n: int, k: int, device: str = "cpu") -> dict[str, Tensor]:
        """What ``pack`` fills, uninitialised."""
        weight = torch.empty(n, -(-k // GROUP) * GROUP, dtype=torch.int8, device=device)
        return {"weight": weight, "weight_scale": torch.empty(n, dtype=torch.bfloat16, device=device)}

    def pack(self, source: Rows) -> dict[str, Tensor]:
        """The parameters of a module of this format. Raises WeightsError for numbers that are not finite."""
        n, k = source.shape
        packed = self.empty(n, k)
        weight, scale = packed["weight"], packed["weight_scale"]
        weight[:, k:] = 0
        for first, last in pieces(n, k):
            values = source.rows(first, last)
            largest = _finite(values.abs().amax(dim=1))
            stored = (largest / 127).to(torch.bfloat16)
            stored[stored == 0] = 1
            codes = (values / stored.to(torch.float32)[:, None]).round_().clamp_(-127, 127)
            weight[first:last, :k].copy_(codes)
            scale[first:last] = stored
        return packed

    def unpacked(self, stored: dict[str, Tensor], shape: tuple[int, int], first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` of what ``pack`` made, float32."""
        codes = stored["weight"][first:last, : shape[1]].to(torch.float32)
        return codes * stored["weight_scale"][first:last].to(torch.float32)[:, None]

    def lookup(self, token_ids: Tensor, module: nn.Module) -> Tensor:
        """int64 ``[B, T]`` -> float32 ``[B, T, K]``."""
        _, k = shape_of(module)
        rows = F.embedding(token_ids, _tensor(module, "weight")).to(torch.float32)
        scale = _tensor(module, "weight_scale")[token_ids].to(torch.float32).unsqueeze(-1)
        rows = rows * scale
        return rows if rows.shape[-1] == k else rows[..., :k]

    def _padded(self, x: Tensor, module: nn.Module) -> Tensor:
        missing = _tensor(module, "weight").shape[1] - x.shape[1]
        return F.pad(x, (0, missing)) if missing else x

    def matrix(self, module: nn.Module) -> native.Matrix:
        return native.Matrix(_tensor(module, "weight"), _scale(module, "weight_scale"))

    def _kernel(self, x: Tensor, module: nn.Module) -> Tensor:
        scale = _scale(module, "weight_scale")
        return torch._weight_int8pack_mm(self._padded(x, module), _tensor(module, "weight"), scale)

    def _dense(self, x: Tensor, module: nn.Module) -> Tensor:
        x, weight = self._padded(x, module), _tensor(module, "weight")
        n, k = weight.shape
        out = x.new_empty(x.shape[0], n)
        spans = list(pieces(n, k, elements=_UNPACK_ELEMENTS))
        scratch = x.new_empty(spans[0][1], k)
        for first, last in spans:
            piece = scratch[: last - first]
            piece.copy_(weight[first:last])
            torch.mm(x, piece.t(), out=out[:, first:last])
        return out.mul_(_scale(module, "weight_scale").to(x.dtype))


@dataclass(frozen=True)
class _Layout:
    """Where torch puts the codes of a packed int4 matrix: blocks of B rows, each ``[K, B / 2]`` bytes.

    Byte j of a block's column holds two rows: j and j + B / 2 (``halves``), or 2j and 2j + 1. Low nibble first.
    """

    block: int
    halves: bool

    def nibbles(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Views of ``[..., B]`` that the low and the high nibbles go to, ``[..., B / 2]`` each."""
        half = self.block // 2
        if self.halves:
            return columns[..., :half], columns[..., half:]
        return columns[..., 0::2], columns[..., 1::2]


@cache
def int4_layout() -> _Layout | None:
    """The layout that this torch uses on this CPU, found by packing a known matrix; None if it is an unknown one.

    It differs between instruction sets, which is why packed weights are never written to disk.
    """
    with torch.utils._python_dispatch._disable_current_modes():
        generator = torch.Generator("cpu").manual_seed(0)
        codes = torch.randint(0, 16, (128, GROUP), dtype=torch.int32, generator=generator, device="cpu")
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1).reshape(-1)
        for block in (32, 64, 16, 128):
            for halves in (True, False):
                layout = _Layout(block, halves)
                columns = codes.view(-1, block, GROUP).transpose(1, 2)  # [blocks, K, B]
                low, high = layout.nibbles(columns)
                if torch.equal(packed, (low | high << 4).to(torch.uint8).reshape(-1)):
                    return layout
    return None


class Int4Format(_PackedFormat):
    """``weight`` uint8 ``[N', K / 2]`` as torch's kernel wants it, ``weight_scale_and_zero`` bf16 ``[K/32, N', 2]``.

    value = (code - 8) * scale + zero. N' is N rounded up to whole blocks. Rows that come as 4-bit codes keep them: the
    scale and the zero are rounded to bfloat16, nothing else changes. Others are rounded to nearest between the least
    and the largest number of each group.
    """

    name = "int4"

    def cannot_hold(self, n: int, k: int) -> str | None:
        """Why an ``[n, k]`` matrix cannot be stored so; None: it can."""
        if k % GROUP:
            return f"its input width {k} is no multiple of {GROUP}"
        if int4_layout() is None:
            return "the layout of torch's int4 kernel on this CPU is unknown"
        return None

    def empty(self, n: int, k: int, device: str = "cpu") -> dict[str, Tensor]:
        """What ``pack`` fills, uninitialised."""
        block = self._block()
        padded = -(-n // block) * block
        return {
            "weight": torch.empty(padded, k // 2, dtype=torch.uint8, device=device),
            "weight_scale_and_zero": torch.empty(k // GROUP, padded, 2, dtype=torch.bfloat16, device=device),
        }

    def _block(self) -> int:
        layout = int4_layout()
        return 64 if layout is None else max(layout.block, 16)

    def pack(self, source: Rows) -> dict[str, Tensor]:
        """The parameters of a module of this format. Raises WeightsError for numbers that are not finite."""
        n, k = source.shape
        block, packed = self._block(), self.empty(n, k)
        weight, scale_and_zero = packed["weight"], packed["weight_scale_and_zero"]
        padded = weight.shape[0]
        scale_and_zero[:, n:] = 0
        # The kernel's packing wants 4 bytes a code: a piece at a time. Pieces of whole blocks equal the whole.
        for first, last in pieces(n, k, block):
            codes, scale, zero = _coded(source, first, last)
            end = min(-(-last // block) * block, padded)
            wide = torch.zeros(end - first, k, dtype=torch.int32, device="cpu")
            wide[: last - first].copy_(codes)
            weight[first:end] = torch._convert_weight_to_int4pack_for_cpu(wide, 1).view(end - first, k // 2)
            scale_and_zero[:, first:last, 0] = scale.t()
            scale_and_zero[:, first:last, 1] = zero.t()
        return packed

    def unpacked(self, stored: dict[str, Tensor], shape: tuple[int, int], first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` of what ``pack`` made, float32. ``first`` must begin a block."""
        layout = int4_layout()
        assert layout is not None
        assert first % layout.block == 0
        end = -(-last // layout.block) * layout.block
        k, half = shape[1], (end - first) // 2
        out = torch.empty(k, half // (layout.block // 2), layout.block, device="cpu")
        halves = _unpack(
            torch.empty(k, half, device="cpu"), stored["weight"], stored["weight_scale_and_zero"], first, layout
        )
        for place, piece in zip(layout.nibbles(out), halves, strict=True):
            place.copy_(piece.view(place.shape))
        return out.view(k, end - first).t()[: last - first]

    def lookup(self, token_ids: Tensor, module: nn.Module) -> Tensor:
        """int64 ``[B, T]`` -> float32 ``[B, T, K]``; unpacks the rows that are asked for and no other."""
        layout = int4_layout()
        assert layout is not None
        _, k = shape_of(module)
        half = layout.block // 2
        ids = token_ids.reshape(-1)
        place = ids % layout.block
        if layout.halves:
            byte, high = place % half, place // half
        else:
            byte, high = place // 2, place % 2
        blocks = _tensor(module, "weight").view(-1, k, half)
        pairs = blocks[ids // layout.block, :, byte].to(torch.int32)  # [ids, K]
        codes = (pairs >> (high * 4).to(torch.int32).unsqueeze(1)) & 15
        scale_and_zero = _tensor(module, "weight_scale_and_zero")[:, ids].to(torch.float32)  # [K/32, ids, 2]
        scale, zero = scale_and_zero.transpose(0, 1).unsqueeze(2).unbind(-1)  # [ids, K/32, 1] each
        rows = (codes.view(-1, k // GROUP, GROUP) - 8).to(torch.float32) * scale + zero
        return rows.reshape(*token_ids.shape, k)

    def _can_unpack(self) -> bool:
        return int4_layout() is not None

    def matrix(self, module: nn.Module) -> native.Matrix:
        return native.Matrix(_tensor(module, "weight"), _scale(module, "weight_scale_and_zero"))

    def _kernel(self, x: Tensor, module: nn.Module) -> Tensor:
        scale_and_zero = _scale(module, "weight_scale_and_zero")
        return torch._weight_int4pack_mm_for_cpu(x, _tensor(module, "weight"), GROUP, scale_and_zero)

    def _dense(self, x: Tensor, module: nn.Module) -> Tensor:
        layout = int4_layout()
        assert layout is not None
        weight, scale_and_zero = _tensor(module, "weight"), _scale(module, "weight_scale_and_zero")
        n, k, rows = weight.shape[0], x.shape[1], x.shape[0]
        out = x.new_empty(rows, n)
        spans = list(pieces(n, k, layout.block, 2 * _UNPACK_ELEMENTS))
        scratch = x.new_empty(k * spans[0][1] // 2)
        for first, last in spans:
            half = (last - first) // 2
            piece = scratch[: k * half].view(k, half)
            places = layout.nibbles(out[:, first:last].unflatten(1, (-1, layout.block)))  # type: ignore[no-untyped-call]
            for place, _ in zip(places, _unpack(piece, weight, scale_and_zero, first, layout), strict=True):
                place.copy_(torch.mm(x, piece).view(rows, -1, layout.block // 2))
        return out


def _unpack(piece: Tensor, weight: Tensor, scale_and_zero: Tensor, first: int, layout: _Layout) -> Iterator[Tensor]:
    """Fill ``piece [K, n / 2]`` with the rows from ``first`` on, transposed: those in low nibbles, then the others.

    Each half is one contiguous sweep; putting the two in order is left to the caller, whose result is smaller.
    """
    k, half = piece.shape
    width = layout.block // 2
    n = 2 * half
    # Columns of a block are moved whole, 16 bytes at a time where there are so many.
    whole = torch.complex128 if width % 16 == 0 else torch.int64
    blocks = weight[first : first + n].view(whole).view(half // width, k, -1)
    packed = blocks.transpose(0, 1).contiguous().view(torch.uint8).view(k, half)
    by_block = scale_and_zero[:, first : first + n].unflatten(1, (-1, layout.block))  # type: ignore[no-untyped-call]
    scales, zeros = (layout.nibbles(part) for part in by_block.to(piece.dtype).unbind(-1))
    for codes, scale, zero in zip((packed & 15, packed >> 4), scales, zeros, strict=True):
        piece.copy_(codes.view(torch.int8) - 8)
        groups = piece.view(k // GROUP, GROUP, half)
        groups.mul_(scale.reshape(-1, 1, half)).add_(zero.reshape(-1, 1, half))
        yield piece


def _coded(source: Rows, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 ``[n, K]``, and bfloat16 scale and zero ``[n, K/32]``, of some rows."""
    stored = source.affine4(first, last)
    if stored is not None:
        scale = _finite(stored.scale)
        return stored.codes, scale.to(torch.bfloat16), _finite(stored.minimum + 8 * scale).to(torch.bfloat16)
    groups = source.rows(first, last).unflatten(1, (-1, GROUP))  # type: ignore[no-untyped-call]
    least, largest = _finite(groups.amin(dim=2)), _finite(groups.amax(dim=2))
    scale = ((largest - least) / 15).to(torch.bfloat16)
    # A group of one number: any scale will do, and its zero is that number.
    zero = torch.where(scale == 0, least, least + 8 * scale.to(torch.float32)).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    # Against the numbers as they are stored, so that their rounding costs as little as it can.
    wide = groups - zero.to(torch.float32).unsqueeze(2)
    codes = (wide / scale.to(torch.float32).unsqueeze(2)).round_().add_(8).clamp_(0, 15)
    return codes.flatten(1), scale, zero
