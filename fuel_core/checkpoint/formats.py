"""Which weight format each tensor of a checkpoint is stored in: one rule for loading and for `fuel inspect`.

Decided from headers alone, except that ``auto`` gives up int8 for bfloat16 where int8 would lose too much, which only
the numbers can say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fuel_core.checkpoint.gguf_blocks import AFFINE4_TYPES
from fuel_core.layers.linear import FormattedWeight
from fuel_core.layers.moe import ExpertLinear
from fuel_core.layers.packed_formats import PACKED_PARAMETERS, shape_of
from fuel_core.layers.weight_formats import FORMATS, WeightFormat, dense_format_of, relative_error, squares

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fuel_core.checkpoint.base import TensorInfo
    from fuel_core.layers.packed_formats import Rows

__all__ = [
    "DENSE_DTYPES",
    "MOST_INT8_ERROR",
    "Choice",
    "Packed",
    "choose",
    "error_of",
    "format_of",
    "outlined",
    "pack",
    "slots_of",
    "weight_modules",
]

DENSE_DTYPES: Final[Mapping[str, str]] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""Dense format -> dtype of its parameters."""
MOST_INT8_ERROR: Final = 0.025
"""Largest relative error (root mean square) at which ``auto`` keeps int8 for a tensor; beyond it is bfloat16.

Above the 101 tensors of two released models that are stored in 5, 6 or 8 bits: at most 0.019 (an embedding of 262,144
rows), 0.013 but for the embeddings. docs/weights.md has the cost in perplexity.
"""


@dataclass(frozen=True)
class Choice:
    """How one weight is to be stored."""

    format: str
    measured: bool = False
    """int8 that yields to bf16 where it loses more than MOST_INT8_ERROR."""
    asked: str | None = None
    """The format that was asked for and cannot hold the tensor."""
    reason: str = ""


class Packed(NamedTuple):
    """A weight in its format."""

    format: WeightFormat
    tensors: dict[str, torch.Tensor]
    error: float | None
    """Relative error of int8, where it was measured."""


def choose(word: str, info: TensorInfo) -> Choice:
    """The format of one matrix of a Linear or Embedding. `word` is "auto" or a format; "auto" is for GGUF tensors."""
    n, k = info.shape[-2:]
    if word == "auto":
        plain = next((name for name, dtype in DENSE_DTYPES.items() if dtype == info.dtype_name), None)
        if plain is not None:
            return Choice(plain)
        if info.dtype_name in AFFINE4_TYPES:
            reason = FORMATS["int4"].cannot_hold(n, k)
            return Choice("int4") if reason is None else Choice("int8", True, "int4", reason)
        return Choice("int8", measured=True)
    reason = FORMATS[word].cannot_hold(n, k)
    return Choice(word) if reason is None else Choice("int8", False, word, reason)


def pack(choice: Choice, source: Rows | Sequence[Rows]) -> Packed:
    """Store a matrix, or a stack of them, as chosen.

    Raises WeightsError for numbers that are not finite and cannot be quantised.
    """
    chosen = FORMATS[choice.format]
    tensors = _packed(chosen, source)
    if not choice.measured:
        return Packed(chosen, tensors, None)
    error = _error(chosen, tensors, source)
    if error <= MOST_INT8_ERROR:
        return Packed(chosen, tensors, error)
    return Packed(FORMATS["bf16"], _packed(FORMATS["bf16"], source), error)


def outlined(choice: Choice, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What `pack` would make of a matrix `[N, K]`, or of a stack `[E, N, K]`, on the meta device."""
    *stack, n, k = shape
    one = FORMATS[choice.format].empty(n, k, device="meta")
    return {name: tensor.new_empty((*stack, *tensor.shape)) for name, tensor in one.items()}


def _packed(chosen: WeightFormat, source: Rows | Sequence[Rows]) -> dict[str, torch.Tensor]:
    if not isinstance(source, Sequence):
        return chosen.pack(source)
    stack: dict[str, torch.Tensor] = {}
    for number, matrix in enumerate(source):
        for name, tensor in chosen.pack(matrix).items():
            if number == 0:
                stack[name] = tensor.new_empty((len(source), *tensor.shape))
            stack[name][number] = tensor
    return stack


def _error(chosen: WeightFormat, tensors: Mapping[str, torch.Tensor], source: Rows | Sequence[Rows]) -> float:
    if not isinstance(source, Sequence):
        return relative_error(chosen, dict(tensors), source)
    sums = [
        squares(chosen, {name: tensor[number] for name, tensor in tensors.items()}, matrix)
        for number, matrix in enumerate(source)
    ]
    total = sum(right for _, right in sums)
    return float((sum(left for left, _ in sums) / total) ** 0.5) if total else 0.0


def error_of(choice: Choice, source: Rows | Sequence[Rows]) -> tuple[str, float]:
    """The format that a matrix or stack ends in, and its relative error there against the source's own values."""
    packed = pack(choice, source)
    if packed.error is not None and packed.format.name == "int8":
        return "int8", packed.error
    return packed.format.name, _error(packed.format, packed.tensors, source)


def weight_modules(backbone: nn.Module) -> Iterator[tuple[str, FormattedWeight]]:
    """(parameter name, module) of every weight that a format can hold."""
    for name, module in backbone.named_modules(remove_duplicate=False):
        if isinstance(module, FormattedWeight):
            yield (f"{name}.weight" if name else "weight"), module


def slots_of(backbone: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that must come from a file, by full name, with the shape that the file has it in.

    Parameters and persistent buffers; a packed weight counts as the matrix it stands for.
    """
    import torch

    packed = {name: module for name, module in weight_modules(backbone) if module.packed_format is not None}
    hidden = {name.removesuffix("weight") + extra for name in packed for extra in PACKED_PARAMETERS}
    stand_in: dict[int, torch.Tensor] = {}
    slots: dict[str, torch.Tensor] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        if name in packed:
            module = packed[name]
            shape: tuple[int, ...] = shape_of(module)
            if isinstance(module, ExpertLinear):
                shape = (module.n_experts, *shape)
            slots[name] = stand_in.setdefault(id(parameter), torch.empty(shape, device="meta"))
        elif name not in hidden:
            slots[name] = parameter
    for prefix, module in backbone.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer is not None:
                slots[f"{prefix}.{name}" if prefix else name] = buffer
    return slots


def format_of(module: Any) -> str:
    """The word of the format that a Linear or Embedding is stored in."""
    return module.packed_format or dense_format_of(module.weight.dtype)
