"""Normalisation. Variances are computed in float32 whatever the activation dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LayerNorm", "RMSNorm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis; ``[..., D] -> [..., D]`` in x's dtype.

    The normalised value is rounded to x's dtype before the gain, as the reference models do.
    """
    if x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = F.rms_norm(x.to(torch.float32), x.shape[-1:], None, eps).to(x.dtype)
    return normed if weight is None else (normed * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation with a gain ``weight [hidden_size]`` (Zhang and Sennrich 2019)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...


class LayerNorm(nn.Module):
    """Layer normalisation with gain and, unless told otherwise, bias ``[hidden_size]`` (Ba, Kiros and Hinton 2016)."""

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden_size), requires_grad=False) if bias else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        weight, bias = self.weight.to(torch.float32), None if self.bias is None else self.bias.to(torch.float32)
        return F.layer_norm(x.to(torch.float32), x.shape[-1:], weight, bias, self.eps).to(x.dtype)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...
