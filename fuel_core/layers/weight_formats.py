"""How a weight is stored, and the product and lookup that each way of storing it needs.

One format is one object in ``FORMATS``: it owns the parameters of a Linear or Embedding and every place
that multiplies by them goes through it. A packed format is added here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuel_core import native
from fuel_core.errors import WeightsError
from fuel_core.layers.packed_formats import (
    PACKED_PARAMETERS,
    Int4Format,
    Int8Format,
    Rows,
    TensorRows,
    dense_product_dtype,
    int4_layout,
    pieces,
)

__all__ = ["FORMATS", "WeightFormat", "canonical_format", "install", "relative_error", "squares", "store"]

# From this many rows on a CPU without 16-bit arithmetic multiplies 16-bit weights in float32 (docs/weights.md).
WIDENED_FROM_ROWS = 8


class WeightFormat(Protocol):
    """What ``layers.Linear`` and ``layers.Embedding`` ask of a storage format."""

    @property
    def name(self) -> str: ...

    @property
    def compressed(self) -> bool:
        """Whether the residual stream should stay in float32 beside it."""
        ...

    @property
    def packed_as(self) -> str | None:
        """What a module's ``packed_format`` says: None for a dense format, which the parameter's dtype tells."""
        ...

    def cannot_hold(self, n: int, k: int) -> str | None:
        """Why an ``[n, k]`` matrix cannot be stored so; None: it can."""
        ...

    def empty(self, n: int, k: int, device: str = "cpu") -> dict[str, Tensor]:
        """What ``pack`` makes of an ``[n, k]`` matrix, uninitialised: on the meta device, its sizes alone."""
        ...

    def pack(self, source: Rows) -> dict[str, Tensor]:
        """What the parameters of a module hold: ``weight``, and what belongs to it."""
        ...

    def unpacked(self, stored: dict[str, Tensor], shape: tuple[int, int], first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` of what ``pack`` made, in float32. ``first`` is a multiple of 128."""
        ...

    def matmul(self, x: Tensor, module: nn.Module, bias: Tensor | None, kernel_input: Tensor | None = None) -> Tensor:
        """``x [..., in]`` -> ``[..., out]`` in x's dtype.

        kernel_input: ``packed_formats.kernel_input(x)``, which several products of one x may share.
        """
        ...

    def matrix(self, module: nn.Module) -> native.Matrix:
        """The module's weight as the kernels for one row take it."""
        ...

    def lookup(self, token_ids: Tensor, module: nn.Module) -> Tensor:
        """``token_ids [B, T]`` int64 -> float32 ``[B, T, hidden]``."""
        ...


@dataclass(frozen=True)
class DenseFormat:
    """Plain floating-point rows, one parameter named ``weight``."""

    name: str
    dtype: torch.dtype
    compressed: bool = False
    packed_as: str | None = None

    def cannot_hold(self, n: int, k: int) -> str | None:
        return None

    def empty(self, n: int, k: int, device: str = "cpu") -> dict[str, Tensor]:
        return {"weight": torch.empty(n, k, dtype=self.dtype, device=device)}

    def pack(self, source: Rows) -> dict[str, Tensor]:
        if isinstance(source, TensorRows):
            return {"weight": source.tensor.to(self.dtype)}
        packed = self.empty(*source.shape)
        for first, last in pieces(*source.shape):
            packed["weight"][first:last] = source.rows(first, last)
        return packed

    def unpacked(self, stored: dict[str, Tensor], shape: tuple[int, int], first: int, last: int) -> Tensor:
        return stored["weight"][first:last].to(torch.float32)

    def matmul(self, x: Tensor, module: nn.Module, bias: Tensor | None, kernel_input: Tensor | None = None) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if weight.dtype != torch.float32 and _widens(x, weight):
            return _widened(x, weight, bias)
        if x.dtype == weight.dtype:
            return F.linear(x, weight, bias)
        # Converting x costs one row; converting the weight would read and write all of it every step.
        y = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        return y.to(x.dtype)

    def matrix(self, module: nn.Module) -> native.Matrix:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return native.Matrix(weight, weight)

    def lookup(self, token_ids: Tensor, module: nn.Module) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return F.embedding(token_ids, weight).to(torch.float32)


def _widens(x: Tensor, weight: Tensor) -> bool:
    """Whether a 16-bit weight is better multiplied in float32: many rows, on a CPU that cannot multiply 16 bits."""
    rows = x.shape[-2] if x.dim() > 1 else 1
    # A number of rows that is a symbol belongs to a recording, which must not branch on it.
    many = isinstance(rows, int) and rows >= WIDENED_FROM_ROWS
    return many and weight.device.type == "cpu" and dense_product_dtype() == torch.float32


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + b`` in float32, a piece of W at a time; in x's dtype."""
    n, k = weight.shape
    flat = x.reshape(-1, k).to(torch.float32)
    out = flat.new_empty(flat.shape[0], n)
    for first, last in pieces(n, k):
        torch.mm(flat, weight[first:last].to(torch.float32).t(), out=out[:, first:last])
    if bias is not None:
        out += bias.to(torch.float32)
    return out.to(x.dtype).view(*x.shape[:-1], n)


FORMATS: dict[str, WeightFormat] = {
    "f32": DenseFormat("f32", torch.float32),
    "bf16": DenseFormat("bf16", torch.bfloat16),
    "f16": DenseFormat("f16", torch.float16),
    "int8": Int8Format(),
    "int4": Int4Format(),
}

_ALIASES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_BY_DTYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def store(module: nn.Module, weight: Tensor | Rows, name: str) -> None:
    """Give a Linear or Embedding the weight ``[out, in]`` in the format called ``name``.

    Raises WeightsError when the format cannot hold a matrix of that shape, or does not exist.
    """
    source = TensorRows(weight) if isinstance(weight, Tensor) else weight
    chosen = FORMATS[canonical_format(name)]
    reason = chosen.cannot_hold(*source.shape)
    if reason is not None:
        raise WeightsError(
            f"expected a matrix that {chosen.name} can hold, found one of {source.shape}: {reason}; "
            "choose another format"
        )
    install(module, chosen.packed_as, chosen.pack(source))


def install(module: nn.Module, packed_as: str | None, stored: Mapping[str, Tensor]) -> None:
    """Make what a format's ``pack`` returned the parameters of a module, in place of those of another format."""
    for name in PACKED_PARAMETERS:
        if name in module._parameters and name not in stored:
            del module._parameters[name]
    for name, tensor in stored.items():
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(name, parameter)
    module.packed_format = packed_as  # type: ignore[assignment]
    module.packed_layout = repr(int4_layout()) if packed_as == "int4" else None  # type: ignore[assignment]


def relative_error(chosen: WeightFormat, stored: dict[str, Tensor], source: Rows) -> float:
    """Root mean square of (stored - source) over that of source; 0 for a source of zeros."""
    difference, total = squares(chosen, stored, source)
    return (difference / total) ** 0.5 if total else 0.0


def squares(chosen: WeightFormat, stored: Mapping[str, Tensor], source: Rows) -> tuple[float, float]:
    """Sums of the squares of (stored - source) and of source."""
    n, k = source.shape
    difference = total = 0.0
    for first, last in pieces(n, k):
        expected = source.rows(first, last)
        found = chosen.unpacked(dict(stored), (n, k), first, last)
        difference += float((found - expected).square_().sum(dtype=torch.float64))
        total += float(expected.square().sum(dtype=torch.float64))
    return difference, total


def canonical_format(name: str) -> str:
    """``float32`` and ``f32`` are one word. Raises WeightsError for a format that does not exist."""
    word = _ALIASES.get(name, name)
    if word not in FORMATS:
        raise WeightsError(f"weight format: one of {', '.join(FORMATS)} expected, found {name!r}; name one of them")
    return word


def dense_format_of(dtype: torch.dtype) -> str:
    """The dense format that stores ``dtype``."""
    if dtype not in _BY_DTYPE:
        raise WeightsError(
            f"weight dtype: one of {', '.join(map(str, _BY_DTYPE))} expected, found {dtype}; convert the tensor"
        )
    return _BY_DTYPE[dtype]
