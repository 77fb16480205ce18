"""Linear and Embedding over any weight format, and the products that families write.

Shape letters: B batch, T tokens of this step, D input width, E output width, V vocab.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuel_core import native
from fuel_core.errors import WeightsError
from fuel_core.layers.packed_formats import int4_layout, kernel_input
from fuel_core.layers.weight_formats import FORMATS, WeightFormat, dense_format_of

__all__ = ["Embedding", "FormattedWeight", "Linear", "linear", "project"]


class FormattedWeight(nn.Module):
    """A module whose ``weight`` parameter is stored in a weight format.

    Subclasses declare ``__call__`` for type checkers alone: torch's own returns Any, which would leave every family's
    arithmetic unchecked.
    """

    weight: nn.Parameter
    # None: dense, and then the parameter's own dtype says which format it is. A packed format is named here.
    packed_format: str | None = None

    # How the bytes of a packed weight are arranged, where that depends on the CPU.
    packed_layout: str | None = None

    @property
    def weight_format(self) -> WeightFormat:
        return FORMATS[self.packed_format or dense_format_of(self.weight.dtype)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.packed_layout is not None and self.packed_layout != repr(int4_layout()):
            raise WeightsError(
                f"pickled int4 weights: expected the layout of this CPU, {int4_layout()}, found {self.packed_layout}; "
                "load the checkpoint on this machine"
            )


class Linear(FormattedWeight):
    """``y = x Wᵀ + b`` with W ``[out_features, in_features]`` in any weight format."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``, in x's dtype."""
        return linear(x, self)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


class Embedding(FormattedWeight):
    """A lookup table ``[num_embeddings, embedding_dim]`` in any weight format; rows come out in float32."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 ``[B, T]`` -> float32 ``[B, T, embedding_dim]``."""
        return self.weight_format.lookup(token_ids, self)

    if TYPE_CHECKING:

        def __call__(self, token_ids: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def linear(x: Tensor, module: Linear) -> Tensor:
    """Multiply x, ``[..., in]``, by the module's weight in whatever format it is stored; gives ``[..., out]``."""
    products = _one_row(x, module)
    return products[0] if products is not None else module.weight_format.matmul(x, module, module.bias)


def project(x: Tensor, *modules: Linear) -> tuple[Tensor, ...]:
    """Several products of one input: ``q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)``.

    One row is multiplied by up to three matrices in one go, so write it as one call.
    """
    products = _one_row(x, *modules)
    if products is not None:
        return products
    if any(module.packed_format is None for module in modules):
        return tuple(linear(x, module) for module in modules)
    shared = kernel_input(x)  # torch's packed products all read it in bfloat16
    return tuple(module.weight_format.matmul(x, module, module.bias, shared) for module in modules)


def _one_row(x: Tensor, *modules: Linear) -> tuple[Tensor, ...] | None:
    """The products by a kernel of our own; None where there is none for them."""
    products = native.product(x, *(module.weight_format.matrix(module) for module in modules))
    if products is None:
        return None
    finished = []
    for y, module in zip(products, modules, strict=True):
        if y.shape[-1] != module.out_features:  # padded to whole blocks
            y = y[..., : module.out_features]
        if module.bias is not None:
            y = y + module.bias
        finished.append(y.to(x.dtype) if y.dtype != x.dtype else y)
    return tuple(finished)
