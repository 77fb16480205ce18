"""The kernels as torch ops, and where each of them may be used.

Every function here answers None where its kernel does not fit (another device, dtype, shape or layout, or no kernel at
all); the caller then uses torch's own ops. Answers depend on shapes, dtypes and devices alone, so a recorded step may
ask.

Shape letters: N output width, K input width, H query heads, G kv heads, S keys, D head_dim.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, library

from fuel_core.native import build

__all__ = ["Matrix", "Scattered", "attend_one", "c_shims", "is_active", "product", "product_width"]

_library: Any = library.Library("fuel", "DEF")  # type: ignore[no-untyped-call]
_library.define("product(Tensor x, Tensor w, Tensor s, int half) -> Tensor")
_library.define("product2(Tensor x, Tensor w0, Tensor s0, Tensor w1, Tensor s1, int half) -> Tensor")
_library.define(
    "product3(Tensor x, Tensor w0, Tensor s0, Tensor w1, Tensor s1, Tensor w2, Tensor s2, int half) -> Tensor"
)
_library.define("attend_one(Tensor q, Tensor keys, Tensor values, float scale, float softcap) -> Tensor")
_DENSE = (torch.float32, torch.bfloat16, torch.float16)

_lock = threading.RLock()
_touch: Callable[[Any, int], None] | None = None
_state: tuple[bool, int] | None = None
"""(kernels in use, rows in half a block of the packed int4 layout), once decided."""


class Matrix(NamedTuple):
    """A stored ``[N, K]`` matrix; the dtype of ``weight`` says how.

    - float32, bf16, f16: rows as they are; ``scales`` is not read (give ``weight`` again). K is a multiple of 16.
    - int8: one scale for each row, ``scales [N]`` bf16 or float32. K is a multiple of 32.
    - uint8: int4 as ``aten._convert_weight_to_int4pack_for_cpu`` packs it; ``scales`` bf16 ``[K / 32, N, 2]``, scale
      and zero of ``(q - 8) * scale + zero``.
    """

    weight: Tensor
    scales: Tensor

    @property
    def rows(self) -> int:
        return self.scales.shape[1] if self.weight.dtype == torch.uint8 else self.weight.shape[0]


def _product_meta(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], product_width((x, *rest))), dtype=torch.float32)


def product_width(arguments: Sequence[Any]) -> int:
    """Width of what a product op returns for these arguments."""
    pairs = zip(arguments[1:-1:2], arguments[2:-1:2], strict=True)
    return sum(Matrix(w, s).rows for w, s in pairs)


# What tracing needs to know of them.
for _name in ("product", "product2", "product3"):
    library.register_fake(f"fuel::{_name}", _product_meta)
library.register_fake(
    "fuel::attend_one", lambda q, keys, values, scale, softcap: q.new_empty(q.shape, dtype=torch.float32)
)


def c_shims() -> dict[Any, list[str]]:
    """The functions behind the ops, as the compiler of a step wants them declared."""
    tensor, error, fuel = "AtenTensorHandle", "AOTITorchError aoti_torch_cpu_", torch.ops.fuel
    return {
        **{
            op.default: [f"{error}{name}({', '.join([tensor] * (1 + 2 * count))}, int64_t, {tensor}*)"]
            for count, (name, op) in enumerate(_products(), 1)
        },
        fuel.attend_one.default: [f"{error}attend_one({tensor}, {tensor}, {tensor}, double, double, {tensor}*)"],
    }


def _products() -> tuple[tuple[str, Any], ...]:
    """The ops that multiply by one, two and three matrices."""
    return tuple((name, getattr(torch.ops.fuel, name)) for name in ("product", "product2", "product3"))


class Scattered:
    """Objects that are looked at once a step, when reading the weights has driven them out of every cache.

    ``touch`` asks memory for all of them at once; looked at one by one, each costs a wait of its own.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        lines: list[int] = []
        for thing in objects:
            lines += (id(thing), id(thing) + 64)
            if isinstance(thing, Tensor) and not thing.is_meta:
                implementation: int = thing._cdata
                lines += range(implementation, implementation + 192, 64)
                lines.append(thing.untyped_storage()._cdata)
        self._lines = (ctypes.c_uint64 * len(lines))(*lines)

    def touch(self) -> None:
        """Ask for what the objects consist of; where there are no kernels, nothing happens."""
        if _touch is not None:
            _touch(self._lines, len(self._lines))


def is_active() -> bool:
    """Whether this process uses the kernels; decided by the first call, which may wait a little for a compiler."""
    return _decided()[0]


def _decided() -> tuple[bool, int]:
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _load()
    return _state


def _load() -> tuple[bool, int]:
    # Decided inside a step that may be recording or watched: none of it belongs to the step.
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        path = build.shared_object()
        if path is None:
            return False, 0
        try:
            kernels = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            registered = kernels.fuel_register() == 0
        except (OSError, AttributeError) as error:
            warnings.warn(f"{path}: kernels expected, found {error}; torch's own ops are used", stacklevel=2)
            return False, 0
        half = _block_half()
        global _touch
        if not registered or not _agrees(half):
            warnings.warn(f"{path}: its products differ from torch's; torch's own ops are used", stacklevel=2)
            return False, 0
        kernels.fuel_touch.argtypes, kernels.fuel_touch.restype = (ctypes.c_void_p, ctypes.c_int64), None
        _touch = kernels.fuel_touch
        return True, half


def _block_half() -> int:
    """Rows in half a block of ATen's packed int4 layout on this CPU (see kernels.cpp); 0 where it is another layout."""
    codes = torch.arange(64 * 32, dtype=torch.int32).view(64, 32) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    for half in (16, 32):
        blocks = codes.view(-1, 2, half, 32).transpose(2, 3)  # [blocks, lower or upper, k, rows]
        if torch.equal((blocks[:, 0] | blocks[:, 1] << 4).to(torch.uint8).flatten(), packed.flatten()):
            return half
    return 0


def _agrees(half: int) -> bool:
    """Every kernel beside the formula it stands for, on a small case: what was loaded is code."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    x, w = normal(1, 1, 64), normal(70, 64)
    cases = [(torch.ops.fuel.product(x, w.to(d), w, half), w.to(d).to(torch.float32)) for d in _DENSE]
    codes = (w * 30).round().clamp(-127, 127).to(torch.int8)
    scale = (normal(70).abs() + 0.1).to(torch.bfloat16)
    cases.append((torch.ops.fuel.product(x, codes, scale, half), codes * scale.to(torch.float32)[:, None]))
    if half:
        nibbles = (normal(64, 64) * 4 + 8).round().clamp(0, 15).to(torch.int32)
        scales = normal(2, 64, 2).to(torch.bfloat16)
        by_row = scales.to(torch.float32).repeat_interleave(32, 0).permute(2, 1, 0)  # [2, N, K]
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        cases.append((torch.ops.fuel.product(x, packed, scales, half), (nibbles - 8) * by_row[0] + by_row[1]))
    # Genuine: 5e-5 of the largest (packed formats), 2e-7 (dense). A nibble or a row out of place is above 1e-1.
    if not all(_near(found, x @ matrix.T) for found, matrix in cases):
        return False
    q, keys, values = normal(1, 4, 1, 16), normal(1, 2, 9, 16), normal(1, 2, 9, 16)
    scores = torch.tanh((q.view(1, 2, 2, 16) @ keys.transpose(2, 3)) * 0.25 / 3) * 3
    expected = torch.softmax(scores, -1) @ values
    return _near(torch.ops.fuel.attend_one(q, keys, values, 0.25, 3.0), expected.view(1, 4, 1, 16))


def _near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-3 * expected.abs().max())


def _one_row(x: Tensor) -> Tensor | None:
    """Give x as a float32 row whose elements lie side by side; None where it is not one row on a CPU."""
    if x.device.type != "cpu" or x.dim() > 8 or any(size != 1 for size in x.shape[:-1]) or not is_active():
        return None
    if x.dtype != torch.float32:
        x = x.to(torch.float32)
    return x if x.stride(-1) == 1 else x.contiguous()


def _tensor(result: Any) -> Tensor:
    return cast(Tensor, result)


def product(x: Tensor, *matrices: Matrix) -> tuple[Tensor, ...] | None:
    """``x [..., K]`` of one row times each matrix: float32 ``[..., N]`` each, in one go for up to three.

    Dense products are summed in float32; for packed ones x is rounded to 16 bits for each 32 elements.
    """
    row = _one_row(x)
    if row is None or len(matrices) > 3:
        return None
    half = _decided()[1]
    arguments: list[Tensor] = []
    for matrix in matrices:
        if not _fits(matrix, row.shape[-1], half):
            return None
        arguments += matrix
    fused = _tensor(_products()[len(matrices) - 1][1](row, *arguments, half))
    if len(matrices) == 1:
        return (fused,)
    return tuple(fused.split([matrix.rows for matrix in matrices], dim=-1))  # type: ignore[no-untyped-call]


def _fits(matrix: Matrix, width: int, half: int) -> bool:
    weight, scales = matrix
    if weight.device.type != "cpu" or not (weight.is_contiguous() and scales.is_contiguous()):
        return False
    if weight.dtype == torch.uint8:
        whole = half > 0 and matrix.rows % (2 * half) == 0
        return whole and scales.dtype == torch.bfloat16 and scales.shape[0] * 32 == width
    if weight.dtype == torch.int8:
        return weight.shape[1] == width and width % 32 == 0 and scales.dtype in (torch.bfloat16, torch.float32)
    return weight.dtype in _DENSE and weight.shape[1] == width and width % 16 == 0


def attend_one(q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor | None:
    """Attention of one query, ``q [1, H, 1, D]``, over ``keys, values [1, G, S, D]``: float32 ``[1, H, 1, D]``.

    Scores, softmax and sums are float32 whatever the cache stores. Keys and values may be views of a larger buffer.
    """
    if q.device.type != "cpu" or q.shape[0] != 1 or q.shape[2] != 1 or keys.dtype not in _DENSE:
        return None
    if values.dtype != keys.dtype or q.shape[3] % 8 or values.shape[3] != q.shape[3] or not is_active():
        return None
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return None
    row = q.to(torch.float32) if q.dtype != torch.float32 else q
    if not row.is_contiguous():
        row = row.contiguous()
    return _tensor(torch.ops.fuel.attend_one(row, keys, values, scale, softcap or 0.0))
