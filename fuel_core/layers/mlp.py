"""Feed-forward blocks shared by families."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fuel_core.layers.linear import Linear, linear, project

__all__ = ["swiglu"]


def swiglu(x: Tensor, gate_proj: Linear, up_proj: Linear, down_proj: Linear) -> Tensor:
    """``down(silu(gate(x)) * up(x))``, ``[B, T, D] -> [B, T, D]`` (Shazeer 2020)."""
    gate, up = project(x, gate_proj, up_proj)
    return linear(F.silu(gate) * up, down_proj)
