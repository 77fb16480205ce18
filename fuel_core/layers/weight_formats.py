"""How a weight is stored, and the product and lookup that each way of storing it needs.

One format is one object in ``FORMATS``: it owns the parameters of a Linear or Embedding and every place
that multiplies by them goes through it. A packed format is added here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuel_core import native
from fuel_core.errors import WeightsError

__all__ = ["FORMATS", "WeightFormat", "canonical_format"]


class WeightFormat(Protocol):
    """What ``layers.Linear`` and ``layers.Embedding`` ask of a storage format."""

    @property
    def name(self) -> str: ...

    @property
    def compressed(self) -> bool:
        """Whether the residual stream should stay in float32 beside it."""
        ...

    def store(self, module: nn.Module, weight: Tensor) -> None:
        """Put ``weight`` [out, in] into the module's parameters, converted to this format."""
        ...

    def matmul(self, x: Tensor, module: nn.Module, bias: Tensor | None) -> Tensor:
        """``x [..., in]`` -> ``[..., out]`` in x's dtype."""
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

    def store(self, module: nn.Module, weight: Tensor) -> None:
        module.register_parameter("weight", nn.Parameter(weight.to(self.dtype), requires_grad=False))

    def matmul(self, x: Tensor, module: nn.Module, bias: Tensor | None) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        y = native.dense_mv(x, weight)
        if y is not None:
            return (y if bias is None else y + bias).to(x.dtype)
        if x.dtype == weight.dtype:
            return F.linear(x, weight, bias)
        # Converting x costs one row; converting the weight would read and write all of it every step.
        y = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        return y.to(x.dtype)

    def lookup(self, token_ids: Tensor, module: nn.Module) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        return F.embedding(token_ids, weight).to(torch.float32)


FORMATS: dict[str, WeightFormat] = {
    "f32": DenseFormat("f32", torch.float32),
    "bf16": DenseFormat("bf16", torch.bfloat16),
    "f16": DenseFormat("f16", torch.float16),
}

_ALIASES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_BY_DTYPE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def canonical_format(name: str) -> str:
    """``float32`` and ``f32`` are one word. Raises WeightsError for a format that does not exist."""
    word = _ALIASES.get(name, name)
    if word not in FORMATS:
        raise WeightsError(f"weight format: one of {', '.join(FORMATS)} expected, found {name!r}")
    return word


def dense_format_of(dtype: torch.dtype) -> str:
    """The dense format that stores ``dtype``."""
    if dtype not in _BY_DTYPE:
        raise WeightsError(f"weight dtype: one of {', '.join(map(str, _BY_DTYPE))} expected, found {dtype}")
    return _BY_DTYPE[dtype]
