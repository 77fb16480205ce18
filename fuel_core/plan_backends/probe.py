"""Find out what a segment does by running it once at synthetic lengths and writing down its ops.

The log names every tensor by where it came from: an input, a weight (numbered by first use) or an earlier
op. Two segments with equal logs do the same thing to their own weights, so they share a recording, and the
weights' order of first use is each one's weight table. No family declares any of it, so none can forget.

Python integers leave no trace in a log, so the bound ones are handed over as ``BoundInt``: arithmetic is
allowed, comparing or branching raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuel_core import native
from fuel_core.errors import RecordingError

__all__ = ["BoundInt", "ProbeLog", "probe"]

# A tensor written out in the layer's code may have at most this many elements; a larger one is data.
_MAX_LITERAL = 64


class BoundInt(int):
    """An integer that stands for a bound symbol: it computes, and refuses to be looked at."""

    def _refuse(self, *_: object) -> NoReturn:
        raise _BoundIntRead

    # Also what would come out as a plain number, which nobody could refuse any more.
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = _refuse
    __bool__ = __int__ = __float__ = __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = _refuse
    __pow__ = __rpow__ = __abs__ = __invert__ = __and__ = __or__ = __xor__ = _refuse
    __rand__ = __ror__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    bit_length = bit_count = _refuse

    def __add__(self, other: int) -> BoundInt:
        return _bound(int.__add__(self, other))

    def __sub__(self, other: int) -> BoundInt:
        return _bound(int.__sub__(self, other))

    def __rsub__(self, other: int) -> BoundInt:
        return _bound(int.__rsub__(self, other))

    def __mul__(self, other: int) -> BoundInt:
        return _bound(int.__mul__(self, other))

    def __floordiv__(self, other: int) -> BoundInt:
        return _bound(int.__floordiv__(self, other))

    def __mod__(self, other: int) -> BoundInt:
        return _bound(int.__mod__(self, other))

    def __neg__(self) -> BoundInt:
        return BoundInt(int.__neg__(self))

    def __pos__(self) -> BoundInt:
        return self

    __radd__ = __add__
    __rmul__ = __mul__


def _bound(result: int) -> BoundInt:
    # NotImplemented lets the other operand try: a tensor computes with an integer by itself.
    return cast(BoundInt, result) if result is NotImplemented else BoundInt(result)


class _BoundIntRead(Exception):
    """A layer compared a bound integer or turned it into something Python can branch on."""


@dataclass(frozen=True)
class ProbeLog:
    """What a segment did."""

    ops: tuple[Hashable, ...]
    """Canonical op list: equal lists mean equal segments."""
    weights: tuple[Tensor, ...]
    """Parameters and buffers in order of first use; the very objects the modules hold."""
    output: Tensor


# Products of an activation with a weight. Only their shape is wanted, and reading the weights is what a step costs.
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_ROW_PRODUCTS = frozenset({"fuel::product", "fuel::product2", "fuel::product3"})


def _unread_product(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Zeros in the shape of the product; None where it is none, or where torch itself has to say what does not fit."""
    if func._schema.name in _ROW_PRODUCTS:
        return torch.zeros((*args[0].shape[:-1], native.product_width(args)), device=args[0].device)
    if func not in _PRODUCTS:
        return None
    left, right = args[-2:]
    if left.shape[1] != right.shape[0] or left.dtype != right.dtype or left.device != right.device:
        return None
    return torch.zeros((left.shape[0], right.shape[1]), dtype=left.dtype, device=left.device)


class _Logger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping means importing the compiler (a second and more), and nothing here is ever compiled.
        return False

    def __init__(self, inputs: Mapping[str, Tensor], owned: Mapping[int, Tensor], where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.owned = owned
        self.names: dict[int, Hashable] = {id(t): ("in", name) for name, t in inputs.items()}
        # ids are compared only while everything that has one is kept alive here
        self.alive: list[Tensor] = list(inputs.values())
        self.weights: list[Tensor] = []
        self.ops: list[Hashable] = []

    def _name(self, tensor: Tensor, literal: bool = False) -> Hashable:
        name = self.names.get(id(tensor))
        if name is not None:
            return name
        if self.owned.get(id(tensor)) is tensor:
            name = ("weight", len(self.weights), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
            self.weights.append(tensor)
        elif literal and tensor.numel() <= _MAX_LITERAL:
            with torch.utils._python_dispatch._disable_current_modes():
                values = repr(tensor.detach().cpu().tolist())
            name = ("literal", tuple(tensor.shape), tensor.dtype, values)
        else:
            raise RecordingError(
                f"{self.where}: reads a tensor of shape {list(tensor.shape)} that is neither an input nor a parameter "
                "or buffer of the model; register it with register_buffer"
            )
        self.names[id(tensor)] = name
        self.alive.append(tensor)
        return name

    def _canonical(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._name(value)
        if isinstance(value, list | tuple):
            return ("seq", *(self._canonical(item) for item in value))
        if isinstance(value, dict):
            return ("map", *((key, self._canonical(item)) for key, item in sorted(value.items())))
        if isinstance(value, float):
            return ("float", value.hex())  # by its bits: -0.0 is not 0.0, and nan is nan
        if isinstance(value, bool):
            return ("bool", value)
        if isinstance(value, int):
            return int.__index__(value)
        return value if value is None or isinstance(value, str) else str(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            # torch.tensor(...) in the layer's own code. Any other tensor that nobody registered could be written to
            # later, and the recording, which other models share, would not follow.
            self._name(args[0], literal=True)
        entry = (str(func), self._canonical(args), self._canonical(kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            # A value read back to Python differs from layer to layer (routing); any one of them shows the structure.
            self.ops.append(entry)
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        out = _unread_product(func, args)
        if out is None:
            out = func(*args, **kwargs)
        produced: list[Hashable] = []
        for item in out if isinstance(out, list | tuple) else (out,):
            if isinstance(item, Tensor):
                if id(item) not in self.names:
                    self.names[id(item)] = ("op", len(self.ops), len(produced))
                    self.alive.append(item)
                produced.append((self.names[id(item)], tuple(item.shape), item.dtype))
        self.ops.append((*entry, tuple(produced)))
        return out


def probe(
    call: Callable[[Mapping[str, Tensor], Mapping[str, int]], Tensor],
    inputs: Mapping[str, Tensor],
    symbols: Mapping[str, int],
    owned: Mapping[int, Tensor],
    where: str,
) -> ProbeLog:
    """Run ``call`` on scratch tensors and log its ops.

    owned: the model's parameters and buffers by ``id``; the caller keeps them alive.
    Raises RecordingError naming ``where`` when the segment looks at a bound integer or reads unregistered tensors.
    """
    logger = _Logger(inputs, owned, where)
    try:
        with logger:
            output = call(inputs, {name: BoundInt(value) for name, value in symbols.items()})
    except _BoundIntRead:
        raise RecordingError(
            f"{where}: compares or branches on a bound integer (cached_len, attended_len or window_start), which a "
            "held plan cannot follow; use layers.read_state, layers.live_mask and layers.write_state, or plan='off'"
        ) from None
    logger.ops.append(("returns", logger._canonical(output)))
    return ProbeLog(tuple(logger.ops), tuple(logger.weights), output)
