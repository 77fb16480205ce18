"""Mixture of experts: a router sends each row to its best few experts, whose outputs are summed by weight.

The experts of a layer are stacked, one tensor ``[E, out, in]`` for each of their projections, in any weight format. A
step of one row multiplies by the chosen experts alone: on the symbol path each is a view into the stack, on the
device-offset path a gathered copy, because nothing may be read back from the device there. A longer step groups its
rows by expert.

Shape letters: B batch, T tokens of this step, R rows (B * T), D hidden, F width of an expert, E experts, C experts
chosen for a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fuel_core import native
from fuel_core.errors import ConfigError
from fuel_core.layers.linear import FormattedWeight, Linear
from fuel_core.layers.mlp import swiglu
from fuel_core.layers.packed_formats import PACKED_PARAMETERS
from fuel_core.layers.weight_formats import WeightFormat
from fuel_core.token_data import DecodeLayerInputs

__all__ = ["ExpertLinear", "Experts", "Router", "moe"]


class Router(nn.Module):
    """Chooses C of E experts for a row and says how much each counts; ``weight [E, D]``.

    The weights are a float32 softmax over all experts, of which the C largest stay; ``renormalize`` divides those by
    their sum (Shazeer et al. 2017, Fedus et al. 2021). The matrix is no Linear: a packed format would send rows to
    other experts, so it keeps the dtype it has beside them.
    """

    def __init__(self, hidden_size: int, n_experts: int, n_chosen: int, *, renormalize: bool) -> None:
        super().__init__()
        if not 1 <= n_chosen <= n_experts:
            raise ConfigError(
                f"experts chosen for a token: 1 to {n_experts} expected, found {n_chosen}; correct the config"
            )
        self.weight = nn.Parameter(torch.empty(n_experts, hidden_size), requires_grad=False)
        self.n_chosen, self.renormalize = n_chosen, renormalize

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, D]`` -> weights float32 and experts int64, ``[B, T, C]`` each, the weightiest first."""
        weights, chosen = torch.topk(torch.softmax(self._logits(x), dim=-1, dtype=torch.float32), self.n_chosen, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def _logits(self, x: Tensor) -> Tensor:
        """``[B, T, E]``, rounded to x's dtype as the reference models do."""
        products = native.product(x, native.Matrix(self.weight, self.weight))
        if products is not None:
            return products[0].to(x.dtype)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return nn.functional.linear(x.to(wide), self.weight.to(wide)).to(x.dtype)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.n_chosen} of {self.weight.shape[0]}, renormalize={self.renormalize}"


class ExpertLinear(FormattedWeight):
    """E matrices ``[out_features, in_features]`` in any weight format, all in the same; ``weight [E, out, in]``.

    A packed stack is the packed matrices one after another, so that one of them is a view.
    """

    def __init__(self, n_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.n_experts, self.in_features, self.out_features = n_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features), requires_grad=False)

    def one(self, pick: Callable[[Tensor], Tensor]) -> Linear:
        """What `layers.linear` needs of one expert: ``pick`` takes its matrix out of a stack."""
        # No module: building one costs more than its product, and its tensors are no parameters.
        return cast(Linear, _One(self, pick))

    def extra_repr(self) -> str:
        return f"{self.n_experts} x ({self.in_features} -> {self.out_features})"


class _One:
    """One matrix of an ExpertLinear, with what the products read of a Linear."""

    bias = None

    def __init__(self, stack: ExpertLinear, pick: Callable[[Tensor], Tensor]) -> None:
        self.in_features, self.out_features = stack.in_features, stack.out_features
        self.packed_format = stack.packed_format
        self.weight_format: WeightFormat = stack.weight_format
        self.weight = pick(stack.weight)
        if stack.packed_format is not None:
            for name in PACKED_PARAMETERS:
                stored = stack._parameters.get(name)
                if stored is not None:
                    setattr(self, name, pick(stored))


class Experts(nn.Module):
    """E SwiGLU blocks: ``gate_proj`` and ``up_proj`` ``[E, F, D]``, ``down_proj`` ``[E, D, F]``.

    A checkpoint may hold them stacked like that; one by one, as ``{e}.gate_proj.weight`` and so on under this module's
    name; or with gate and up in one ``gate_up_proj [E, 2 F, D]``, gate first, and ``down_proj [E, D, F]``. Loading
    reads all three.
    """

    def __init__(self, n_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(n_experts, hidden_size, intermediate_size)
        self.up_proj = ExpertLinear(n_experts, hidden_size, intermediate_size)
        self.down_proj = ExpertLinear(n_experts, intermediate_size, hidden_size)

    @property
    def n_experts(self) -> int:
        return self.gate_proj.n_experts

    def swiglu(self, x: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """One expert's output, in x's dtype and shape. pick: takes it out of a stack."""
        return swiglu(x, self.gate_proj.one(pick), self.up_proj.one(pick), self.down_proj.one(pick))


def moe(inputs: DecodeLayerInputs, x: Tensor, router: Router, experts: Experts) -> Tensor:
    """Sum of the chosen experts' outputs by their weights: ``x [B, T, D] -> [B, T, D]`` in x's dtype.

    The sum is float32. inputs: the layer's own; from it comes whether a value may be read back from the device.
    """
    weights, chosen = router(x)
    if inputs.seq_len > 1:
        return _grouped(x, weights, chosen, experts)
    if inputs.offset is None and x.shape[0] == 1:
        return _by_value(x, weights, chosen, experts)
    return _gathered(x, weights, chosen, experts)


def _by_value(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """One row. Each expert's number is read back and its matrices are views: only what is multiplied is read."""
    outputs = []
    for place in range(chosen.shape[-1]):
        number = cast(int, chosen[0, 0, place].item())
        # A recording has to know that the number is one of an expert's, whichever it will be.
        torch._check(number >= 0)  # type: ignore[no-untyped-call]
        torch._check(number < experts.n_experts)  # type: ignore[no-untyped-call]
        outputs.append(experts.swiglu(x, lambda stack, number=number: stack.select(0, number)))  # type: ignore[misc]
    return _summed(outputs, weights, x.dtype)


def _gathered(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """One token for each of B rows. The chosen matrices are copied out of the stack; no number leaves the device."""
    rows = []
    for row in range(x.shape[0]):
        outputs = []
        for place in range(chosen.shape[-1]):
            number = chosen[row, 0, place : place + 1]
            outputs.append(
                experts.swiglu(
                    x[row : row + 1],
                    lambda stack, number=number: stack.index_select(0, number).squeeze(0),  # type: ignore[misc]
                )
            )
        rows.append(_summed(outputs, weights[row : row + 1], x.dtype))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _summed(outputs: list[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """``[1, 1, D]`` each, times ``weights [1, 1, C]``."""
    stacked = torch.cat(outputs, dim=1).to(torch.float32)  # [1, C, D]
    return torch.matmul(weights, stacked).to(dtype)


def _grouped(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Many rows: each expert multiplies the rows that chose it, once, and none of the others."""
    flat = x.reshape(-1, x.shape[-1])
    by_place = chosen.flatten()
    order = torch.argsort(by_place, stable=True)
    counts = torch.bincount(by_place, minlength=experts.n_experts).tolist()
    rows, gains = order // chosen.shape[-1], weights.flatten()[order].unsqueeze(1)
    out = torch.zeros(flat.shape, dtype=torch.float32, device=x.device)
    first = 0
    for number, count in enumerate(counts):
        if count:
            mine = slice(first, first + count)
            y = experts.swiglu(flat[rows[mine]], lambda stack, number=number: stack[number])  # type: ignore[misc]
            out.index_add_(0, rows[mine], y.to(torch.float32) * gains[mine])
        first += count
    return out.to(x.dtype).view(x.shape)
