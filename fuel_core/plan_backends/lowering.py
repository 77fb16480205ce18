"""From a recorded graph to native code, and the comparison that the code must pass before anyone runs it.

Lowering loads the compiler stack (seconds, and gigabytes while it works), so only build processes call ``lower``.
``worst_error`` is what they and the processes that use the code judge it by.

What ``run`` of the code takes, in this order: the tensors it reads, one *carrier* for each integer it reads (a tensor
of that many elements, of which only the size is looked at), the weights it reads. So nothing that changes from token
to token is written into the code, the KV capacity included.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from fuel_core.plan_backends.code_key import INDUCTOR_OPTIONS
from fuel_core.plan_backends.recording import Recording, TensorLayout
from fuel_core.plan_backends.rewrites import REWRITES, Rewrite

__all__ = [
    "BOUNDS",
    "CASES",
    "SPOT_CHECKS",
    "LoweringError",
    "Signature",
    "bound_of",
    "carrier",
    "load",
    "lower",
    "worst_error",
]

# Length of the difference over the length of what the recording gives, worst of output and state over all cases.
# Genuine, for toys and a model of 135M parameters: 2.4e-6 in float32, 1.1e-2 in bfloat16. A window start, a read length
# or a write position off by one: 0.34 at least in any of them (tests/test_compiled.py measures both).
BOUNDS = {"float32": 5e-5, "bfloat16": 5e-2, "float16": 1e-2}
# Products with packed weights round their input: a difference in the last bit of a norm moves an element to the next
# step. Genuine over float32 activations: 8e-5 by our kernels (16 bits for each group), 4e-3 by torch's (bfloat16).
_ROUNDING = {"fuel.product": 5e-4, "aten._weight_int": 5e-2}

# Where code and recording are compared: (capacity, cached_len, window_start). The corners are here because code is
# generated for lengths of two and more, and 0 and 1 are where that could show.
Case = tuple[int, int, int]
CASES: tuple[Case, ...] = (
    (7, 0, 0),
    (7, 1, 0),
    (7, 1, 1),
    (7, 6, 0),
    (7, 6, 4),
    (7, 6, 6),
    (256, 0, 0),
    (256, 1, 1),
    (256, 100, 0),
    (256, 255, 0),
    (256, 255, 1),
    (256, 255, 253),
)
# Of these, what is enough for code that passed all of them when it was made.
SPOT_CHECKS: tuple[Case, ...] = ((7, 0, 0), (7, 6, 4), (256, 255, 253))
_EXAMPLE_CAPACITY = 257
_EXAMPLE = {"cached_len": 91, "attended_len": 92, "window_start": 37}

_ONE = torch.empty(1)


def bound_of(recording: Recording) -> float:
    """How far code may be from its recording (0 for a dtype nobody calibrated)."""
    assert recording.layout is not None
    dtype = next((t.dtype for t in recording.layout.tensors if t.name == "h"), "float32")
    packed = any(layout.dtype in ("uint8", "int8") for layout in recording.layout.weights)
    found = (limit for start, limit in _ROUNDING.items() if any(op.startswith(start) for op in recording.ops))
    rounded = list(found) if packed else []
    return max(BOUNDS.get(dtype, 0.0), *rounded, 0.0)


Run = Callable[[list[Any]], list[Tensor]]


class LoweringError(Exception):
    """No code can be made of this graph, or what was made does not compute the same."""


def carrier(n: int) -> Tensor:
    """A tensor of ``n`` elements and no memory of its own: how an integer gets into code that takes tensors alone."""
    return _ONE.expand(n)


@dataclass(frozen=True)
class Signature:
    """Which of a recording's inputs its code takes."""

    tensors: tuple[str, ...]
    symbols: tuple[str, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, recording: Recording) -> Signature:
        return cls(
            tuple(name for name in recording.tensors if name in recording.reads),
            tuple(name for name in recording.symbols if name in recording.reads),
            recording.used_weights,
        )

    def arguments(self, tensors: dict[str, Tensor], symbols: dict[str, int], weights: Sequence[Tensor]) -> list[Any]:
        """What ``run`` takes."""
        return [
            *(tensors[name] for name in self.tensors),
            *(carrier(symbols[name]) for name in self.symbols),
            *(weights[i] for i in self.weights),
        ]


def load(folder: Path) -> Run:
    """Load code that ``lower`` made. The caller has checked its hash: what is loaded is executed."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(folder), "model", False, 1, -1)
    run: Run = loader.run
    return run


def lower(recording: Recording, folder: Path, rewrites: Sequence[Rewrite] = REWRITES) -> dict[str, bytes]:
    """Compile the recording in ``folder``; returns the files of the code. Raises LoweringError.

    The recording's own graph is not changed by ``rewrites``.
    """
    import torch._inductor

    from fuel_core import native

    module = fx.GraphModule(recording.graph_module, fx.Graph())
    module.graph = _copied(recording.graph_module.graph)
    module.recompile()
    for rewrite in rewrites:
        rewrite.apply(module)
    module.graph.lint()
    module.recompile()
    package = folder / "code.pt2"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = _export(recording, module)
            torch._inductor.aoti_compile_and_package(
                exported,
                package_path=str(package),
                inductor_configs={
                    "aot_inductor.package": True,
                    # Our kernels are called as functions, past the dispatcher; who loads the code has loaded them.
                    "aot_inductor.custom_ops_to_c_shims": native.c_shims(),
                    **INDUCTOR_OPTIONS,
                },
            )
    except OSError:
        raise
    except Exception as error:
        raise LoweringError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    # Of the package only this is needed, and unpacked it is loaded without a copy in a temporary folder.
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            part = Path(name)
            if part.suffix == ".so" or part.name.endswith("wrapper_metadata.json"):
                files["/".join(part.parts[1:])] = archive.read(name)
    if sum(name.endswith(".so") for name in files) != 1:
        raise LoweringError(f"one library expected, found {sorted(files)}")
    return files


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _export(recording: Recording, module: fx.GraphModule) -> Any:
    from torch.export import Dim, export

    signature = Signature.of(recording)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = module

        def forward(self, tensors: list[Tensor], carriers: list[Tensor], weights: list[Tensor]) -> Tensor:
            named = dict(zip(signature.tensors, tensors, strict=True))
            lengths = {n: c.shape[0] for n, c in zip(signature.symbols, carriers, strict=True)}
            used = dict(zip(signature.weights, weights, strict=True))
            output: Tensor = self.step(
                *(named.get(name) for name in recording.tensors),
                *(lengths.get(name) for name in recording.symbols),
                *(used.get(i) for i in range(recording.n_weights)),
            )
            return output

    tensors, weights = _synthetic(recording, _EXAMPLE_CAPACITY)
    assert recording.layout is not None
    axis = {layout.name: layout.capacity_axis for layout in recording.layout.tensors}
    dynamic = (
        [None if axis[name] is None else {axis[name]: Dim.AUTO} for name in signature.tensors],
        [{0: Dim.DYNAMIC} for _ in signature.symbols],
        [None for _ in signature.weights],
    )
    arguments = (
        [tensors[name] for name in signature.tensors],
        [carrier(_EXAMPLE[name]) for name in signature.symbols],
        [weights[i] for i in signature.weights],
    )
    exported = export(Step(), arguments, dynamic_shapes=dynamic, strict=False)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for name, node in zip(signature.tensors, placeholders, strict=False):
        if axis[name] is not None and not isinstance(node.meta["val"].shape[axis[name]], torch.SymInt):
            raise LoweringError(f"the capacity of {name} was written into the code")
    return exported


# -- comparison --------------------------------------------------------------------------------------------------------


def worst_error(
    run: Run, recording: Recording, weights: Sequence[Tensor] | None = None, cases: Sequence[Case] = CASES
) -> float:
    """Run code beside its recording at every length of ``cases``; the worst relative error of output and state.

    weights: the ones to run on; without them synthetic ones, at addresses aligned to no more than an element. NaN when
    one side gives what is no number and the other does not.
    """
    signature, worst = Signature.of(recording), 0.0
    synthetic = _synthetic(recording, 1)[1] if weights is None else weights
    for capacity, cached_len, window_start in cases:
        theirs = _synthetic(recording, capacity, seed=cached_len + window_start)[0]
        ours = {name: tensor.clone() for name, tensor in theirs.items()}
        lengths = {"cached_len": cached_len, "attended_len": cached_len + 1, "window_start": window_start}
        with torch.no_grad():
            integers = [lengths[name] for name in recording.symbols]
            expected = recording.run(*(theirs[name] for name in recording.tensors), *integers, *synthetic)
            found = run(signature.arguments(ours, lengths, synthetic))[0]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return float("nan")
        for a, b in [(expected, found), *((theirs[name], ours[name]) for name in signature.tensors)]:
            if a.is_floating_point():
                worst = _worse(worst, _relative(a.double(), b.double()))
            elif not torch.equal(a, b):
                return float("nan")
    return worst


def _worse(worst: float, error: float) -> float:
    return error if not error <= worst else worst


def _relative(expected: Tensor, found: Tensor) -> float:
    same = (expected == found) | (expected.isnan() & found.isnan())
    difference = torch.where(same, 0.0, found - expected)
    norm = torch.where(expected.isfinite(), expected, 0.0).norm()
    return float(difference.norm() / norm.clamp_min(1e-30))


def _synthetic(recording: Recording, capacity: int, seed: int = 0) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Inputs and weights as the layout says, of sizes such that a layer's parts all weigh in its output."""
    assert recording.layout is not None
    generator = torch.Generator().manual_seed(seed)

    def made(layout: TensorLayout, scale: float, shift: float) -> Tensor:
        shape = [capacity if axis == layout.capacity_axis else size for axis, size in enumerate(layout.shape)]
        dtype: torch.dtype = getattr(torch, layout.dtype)
        if dtype.is_floating_point:
            values = (torch.randn(shape, generator=generator) * scale + shift).to(dtype)
        elif layout.stride is None:
            values = torch.ones(shape, dtype=dtype)
        else:
            values = torch.randint(0, 2 if dtype is torch.int64 else 127, shape, generator=generator).to(dtype)
        return values if layout.stride is None else _strided(values, layout.stride)

    tensors = {layout.name: made(layout, 1.0, 0.0) for layout in recording.layout.tensors}
    weights = []
    for layout in recording.layout.weights:
        deep = len(layout.shape) > 1
        weights.append(made(layout, 1.6 / max(layout.shape[-1], 1) ** 0.5 if deep else 0.3, 0.0 if deep else 1.0))
    return tensors, weights


def _strided(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy with these strides whose data begins one element after a boundary of 64 bytes."""
    span = 1 + sum((size - 1) * step for size, step in zip(values.shape, stride, strict=True)) if values.numel() else 0
    slack = 64 // values.element_size() + 1
    room = torch.zeros(span + 2 * slack, dtype=values.dtype)
    start = (-room.data_ptr() % 64) // values.element_size() + 1
    return room[start:].as_strided(values.shape, stride, room.storage_offset() + start).copy_(values)
