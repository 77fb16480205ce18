"""Record a segment once, as ATen ops with every input open: bound data, state, weights, lengths.

Recording happens on fake tensors at synthetic lengths, never at the live ones (a first token at position 0 would
bake the 0), and is refused when a bound integer did not stay free. What was recorded is then run beside the segment
itself at other lengths before anyone may hold it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fuel_core.code_cache import CacheUnusable, CodeCache
from fuel_core.errors import RecordingError
from fuel_core.plan_backends.code_key import shelf_key
from fuel_core.plan_backends.emit import emit_python
from fuel_core.plan_backends.graph_text import UnwritableGraph, read_graph
from fuel_core.plan_backends.probe import ProbeLog, probe
from fuel_core.plan_backends.segments import HIDDEN, Segment

__all__ = ["Layout", "Recording", "Shelf", "StepProgram", "TensorLayout", "record_program", "recordings_made"]

# Hints of the bound integers and of the capacity while recording: distinct, above every small special case.
_RECORD_AT = {"cached_len": 91, "attended_len": 92, "window_start": 37}
_RECORD_CAPACITY = 257
# Where two segments must do the same as well to be taken for one: about as short as a step can be.
_COMPARE_AT = {"cached_len": 1, "attended_len": 2, "window_start": 0}
# Where the recording is checked: other lengths, another capacity, a window start of 0.
_VERIFY_AT = {"cached_len": 5, "attended_len": 6, "window_start": 0}
_VERIFY_CAPACITY = 11

_TORCH_DIR = Path(torch.__file__).parent


@dataclass(frozen=True)
class TensorLayout:
    """What one input of a recording looks like. Bound tensors and state are dense; a weight is as it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Without ``torch.``"""
    device: str
    stride: tuple[int, ...] | None = None
    """Of a weight; None where the tensor is dense."""
    capacity_axis: int | None = None
    """The axis whose size is the KV capacity and may be any; ``shape`` has 0 there."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, capacity_axis: int | None = None, *, strided: bool = False) -> TensorLayout:
        shape = tuple(0 if axis == capacity_axis else size for axis, size in enumerate(tensor.shape))
        dtype, stride = str(tensor.dtype).removeprefix("torch."), tensor.stride() if strided else None
        return cls(name, shape, dtype, str(tensor.device), stride, capacity_axis)

    def refusal(self, tensor: Tensor) -> str | None:
        """Why code made for this input must not be given ``tensor``; None where it may."""
        found = TensorLayout.of(self.name, tensor, self.capacity_axis, strided=self.stride is not None)
        if found != self:
            return f"{self.name}: expected {self}, found {found}"
        if self.stride is None and not tensor.is_contiguous():
            return f"{self.name}: expected a dense tensor, found strides {tensor.stride()}"
        # Code reads whole elements; more than that (mapped files align to 8 bytes at best) it does not rely on.
        if tensor.data_ptr() % tensor.element_size():
            return f"{self.name}: expected data aligned to its elements, found address {tensor.data_ptr():#x}"
        return None


@dataclass(frozen=True)
class Layout:
    """What a recording's inputs look like: bound tensors and state in its order, then weights in theirs."""

    tensors: tuple[TensorLayout, ...]
    weights: tuple[TensorLayout, ...]


class Recording:
    """One recorded segment: a graph whose placeholders are the inputs, the symbols and the weights, in that order.

    Shared by every layer, session and model of equal structure. ``ops`` lists what it does; ``fingerprint`` changes
    when that list does, which is how a held plan notices that it is no longer what was built.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        tensors: Sequence[str],
        symbols: Sequence[str],
        n_weights: int,
        layout: Layout | None = None,
    ):
        self.graph_module = graph_module
        self.tensors = tuple(tensors)
        self.symbols = tuple(symbols)
        self.n_weights = n_weights
        self.layout = layout
        self.shelf_keys: dict[str, str] = {}
        self.rebinds = 0
        """Steps that plans built on this have served while code for it was missing."""
        self.asked = False
        """Whether that code was asked for."""
        self._refresh()
        self._traced = self.fingerprint

    @property
    def as_traced(self) -> bool:
        """Whether the graph still is what tracing made of the layer, so that another plan may be built on it."""
        return self.fingerprint == self._traced

    def _refresh(self) -> None:
        graph = self.graph_module.graph
        self.ops: tuple[str, ...] = tuple(_op_name(n.target) for n in graph.nodes if n.op == "call_function")
        lines = (f"{n.op} {n.name} {_op_name(n.target)} {n.args} {n.kwargs}" for n in graph.nodes)
        self.fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        names = (*self.tensors, *self.symbols)
        self.reads = frozenset(name for name, node in zip(names, placeholders, strict=False) if node.users)
        self.used_weights = tuple(i for i, node in enumerate(placeholders[len(names) :]) if node.users)
        self.run: Callable[..., Tensor] = emit_python(self.graph_module)

    def users_of(self, name: str) -> tuple[str, ...]:
        """The ops that read the input called ``name``."""
        placeholders = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        node = placeholders[(*self.tensors, *self.symbols).index(name)]
        return tuple(_op_name(user.target) for user in node.users)

    def rewrite(self, change: Callable[[fx.Graph], None]) -> None:
        """Change the graph in place. Every plan that holds this recording will refuse to run and be rebuilt."""
        change(self.graph_module.graph)
        self.graph_module.recompile()
        self._refresh()


def _op_name(target: Any) -> str:
    return (
        getattr(target, "__name__", None) or str(target)
        if not isinstance(target, torch._ops.OpOverload)
        else str(target)
    )


@dataclass(frozen=True)
class ProgramSegment:
    """One segment of one model: the recording it shares and its own weights."""

    name: str
    recording: Recording
    weights: tuple[Tensor, ...]
    shelf_key: str | None = None
    """Names the stored form of this recording for this model; None where none may be stored."""


@dataclass(frozen=True)
class Shelf:
    """Where recordings of one model are looked up on disk before they are traced."""

    cache: CodeCache
    identity: str
    """What the recordings depend on besides what a probe shows (``shelf_identity``)."""

    def find(self, key: str, segment: Segment, n_weights: int, layout: Layout) -> Recording | None:
        """The stored recording, if there is one that fits; never an error, because it can always be traced."""
        try:
            entry = self.cache.find(key)
            if entry is None:
                return None
            about = entry.about
            if [about["tensors"], about["symbols"]] != [list(segment.tensors), list(segment.symbols)]:
                return None
            module = read_graph(about["graph"])
            recording = Recording(module, segment.tensors, segment.symbols, n_weights, layout)
            return recording if recording.fingerprint == about["fingerprint"] else None
        except (CacheUnusable, UnwritableGraph, KeyError):
            return None


@dataclass(frozen=True)
class StepProgram:
    """A whole step of one model, recorded: what a session attaches bound data and KV buffers to."""

    segments: tuple[ProgramSegment, ...]
    recorded_now: int
    """How many traces building this program took (0 when all were shared)."""
    identity: str | None = None
    """What the model's recordings depend on (``shelf_identity``); None where none may be stored."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Every op of a step, in order."""
        return tuple(op for segment in self.segments for op in segment.recording.ops)

    @property
    def reads(self) -> frozenset[str]:
        """Names of the bound inputs that any segment reads."""
        return frozenset().union(*(segment.recording.reads for segment in self.segments))

    @cached_property
    def compilable(self) -> tuple[ProgramSegment, ...]:
        """One segment for each distinct recording that native code gains on: the layers of the symbol path.

        Embedding and head are one or two torch calls, bound by memory: code of their own would cost a build each and
        gain nothing.
        """
        distinct: dict[int, ProgramSegment] = {}
        for segment in self.segments:
            if segment.recording.symbols:
                distinct.setdefault(id(segment.recording), segment)
        return tuple(distinct.values())


@dataclass
class _Shared:
    lock: threading.RLock = field(default_factory=threading.RLock)
    by_log: dict[Hashable, Recording] = field(default_factory=dict)
    made: int = 0


_shared = _Shared()


def recordings_made() -> int:
    """Traces made by this process so far."""
    return _shared.made


def record_program(
    segments: Sequence[Segment],
    examples: Sequence[Mapping[str, Tensor]],
    owned: Sequence[Tensor],
    family: str,
    shelf: Shelf | None = None,
) -> StepProgram:
    """Record a step. Segments that do the same share one recording, across models too.

    examples: for each segment, tensors with the right shape, dtype and device but the capacity (their values are not
    read). owned: the model's parameters and buffers. shelf: where stored recordings may be taken from instead of
    tracing; they are run beside the segment like new ones. Raises RecordingError naming the family and the segment.
    """
    by_id = {id(tensor): tensor for tensor in owned}
    before = _shared.made
    program: list[ProgramSegment] = []
    hidden: Tensor | None = None
    scratch_of: dict[Hashable, dict[str, Tensor]] = {}

    def scratch_for(segment: Segment, example: Mapping[str, Tensor], capacity: int) -> dict[str, Tensor]:
        # Layers of one geometry share it: what it holds is never read as data.
        likes = {name: hidden if name == HIDDEN else example[name] for name in segment.tensors}
        geometry = tuple((n, tuple(t.shape), t.dtype, str(t.device)) for n, t in likes.items() if t is not None)
        key = (capacity, geometry, tuple(segment.capacity_axis.items()))
        if key not in scratch_of:
            scratch_of[key] = _scratch(segment, example, hidden, capacity)
        return scratch_of[key]

    with _shared.lock:
        for segment, example in zip(segments, examples, strict=True):
            where = f"{family}::{segment.name}"
            scratch = scratch_for(segment, example, _RECORD_CAPACITY)
            symbols = {name: _RECORD_AT[name] for name in segment.symbols}
            log = probe(segment.call, scratch, symbols, by_id, where)
            # At other lengths as well: a number that happens to equal one of the lengths, or a branch on a value
            # computed from one, looks like another layer's honest use of it at one set of lengths only.
            lengths = {name: _COMPARE_AT[name] for name in segment.symbols}
            other = probe(segment.call, scratch_for(segment, example, _VERIFY_CAPACITY), lengths, by_id, where)
            metas = _metas(segment, scratch)
            key = (torch.__version__, segment.tensors, segment.symbols, metas, log.ops, other.ops)
            hidden = log.output
            recording = _shared.by_log.get(key)
            stored_as = None
            if shelf is not None:
                # Thirty layers of one structure have one log; writing it out for its name is what costs.
                known = None if recording is None else recording.shelf_keys.get(shelf.identity)
                stored_as = known or shelf_key(shelf.identity, key)
            if recording is None or not recording.as_traced:
                layout = _layout(segment, scratch, log)
                recording = None
                if shelf is not None and stored_as is not None:
                    recording = shelf.find(stored_as, segment, len(log.weights), layout)
                if recording is None:
                    recording = _record(segment, scratch, log, where)
                    recording.layout = layout
                    _shared.made += 1
                _verify(segment, recording, scratch, log, where)
                _shared.by_log[key] = recording
            if shelf is not None and stored_as is not None:
                recording.shelf_keys[shelf.identity] = stored_as
            program.append(ProgramSegment(segment.name, recording, log.weights, stored_as))
    return StepProgram(tuple(program), _shared.made - before, None if shelf is None else shelf.identity)


def _layout(segment: Segment, scratch: Mapping[str, Tensor], log: ProbeLog) -> Layout:
    tensors = tuple(TensorLayout.of(n, scratch[n], segment.capacity_axis.get(n)) for n in segment.tensors)
    return Layout(tensors, tuple(TensorLayout.of(f"weight_{i}", w, strided=True) for i, w in enumerate(log.weights)))


def _metas(segment: Segment, tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple((n, tuple(t.shape), t.dtype, str(t.device)) for n, t in ((n, tensors[n]) for n in segment.tensors))


def _scratch(
    segment: Segment, example: Mapping[str, Tensor], hidden: Tensor | None, capacity: int
) -> dict[str, Tensor]:
    """Small tensors to run a segment on: everything as in the example, the capacity as given."""
    generator = torch.Generator().manual_seed(0)
    scratch: dict[str, Tensor] = {}
    for name in segment.tensors:
        like = hidden if name == HIDDEN else example[name]
        assert like is not None
        shape = list(like.shape)
        if name in segment.capacity_axis:
            shape[segment.capacity_axis[name]] = capacity
        if like.dtype.is_floating_point:
            # The device is named, for the caller may have set another default.
            values = torch.randn(shape, generator=generator, device="cpu") * 0.5
            scratch[name] = values.to(device=like.device, dtype=like.dtype)
        else:
            # A valid token id and a valid write offset, and not the 0 that would hide a baked offset.
            scratch[name] = torch.ones(shape, dtype=like.dtype, device=like.device)
    return scratch


def _record(segment: Segment, scratch: Mapping[str, Tensor], log: ProbeLog, where: str) -> Recording:
    # Imported here: tracing pulls in sympy and more, and a process that only lists families must not pay for it.
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    # Without these two, 0 and 1 and sizes that happen to be equal would be taken for constants.
    shape_env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)

    def symbol(name: str, hint: int) -> Any:
        source = ConstantSource(f"fuel_{name}")
        created = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return shape_env.create_symintnode(created, hint=hint, source=source)

    capacity = symbol("capacity", _RECORD_CAPACITY)
    integers = [symbol(name, _RECORD_AT[name]) for name in segment.symbols]
    with fake_mode:
        fakes = []
        for name in segment.tensors:
            real = scratch[name]
            shape: list[Any] = list(real.shape)
            if name in segment.capacity_axis:
                shape[segment.capacity_axis[name]] = capacity
            fakes.append(torch.empty(shape, dtype=real.dtype, device=real.device))

    def flat(*values: Any) -> Tensor:
        tensors = dict(zip(segment.tensors, values[: len(fakes)], strict=True))
        return segment.call(tensors, dict(zip(segment.symbols, values[len(fakes) :], strict=True)))

    try:
        traced = make_fx(flat, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(
            *fakes, *integers
        )
    except RecordingError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise RecordingError(
            f"{where}: cannot be recorded ({found}); "
            "run it with plan='off', and see docs/decode-plans.md for what a layer may do"
        ) from error
    _refuse_looks_at_integers(shape_env, traced, segment, len(fakes), where)
    _lift_weights(traced, log.weights, where)
    _simplify(traced)
    return Recording(traced, segment.tensors, segment.symbols, len(log.weights))


def _refuse_looks_at_integers(
    shape_env: Any, traced: fx.GraphModule, segment: Segment, n_tensors: int, where: str
) -> None:
    """Every bound integer must still be free, and no Python code outside torch may have branched on one.

    Guards that torch itself takes while it lays out fake tensors (contiguity, sizes of 0 and 1) say nothing about the
    recorded ops: those dispatch again at every replay.
    """
    if shape_env.replacements:
        raise RecordingError(
            f"{where}: a bound integer was turned into a constant ({shape_env.replacements}); a layer must not convert "
            "cached_len, attended_len or window_start to a number or a tensor. Use the layers functions, or plan='off'"
        )
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for name, node in zip(segment.symbols, placeholders[n_tensors:], strict=True):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or not value.node.expr.free_symbols:
            raise RecordingError(
                f"{where}: the bound integer {name} was baked into the recording as {value!r}; use the "
                "layers functions, or plan='off'"
            )
    for guard in shape_env.guards:
        location = getattr(guard.sloc, "framework_loc", None)
        filename = getattr(location, "filename", None) or str(location)
        if filename and location is not None and not Path(filename).is_relative_to(_TORCH_DIR):
            raise RecordingError(
                f"{where}: branches on a length ({guard.expr}) at {Path(filename).name}:"
                f"{getattr(location, 'lineno', '?')}; a held plan would keep that branch. Use the layers "
                "functions, or plan='off'"
            )


def _lift_weights(traced: fx.GraphModule, weights: Sequence[Tensor], where: str) -> None:
    """Turn the weights that tracing found as constants into placeholders, in the probe's order."""
    graph = traced.graph
    index = {id(tensor): i for i, tensor in enumerate(weights)}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        for i in reversed(range(len(weights))):
            graph.placeholder(f"weight_{i}")
    lifted = [node for node in graph.nodes if node.op == "placeholder"][-len(weights) :] if weights else []
    attributes = set()
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        value = getattr(traced, str(node.target))
        if id(value) in index:
            node.replace_all_uses_with(lifted[index[id(value)]])
            graph.erase_node(node)
            attributes.add(str(node.target))
        elif isinstance(value, Tensor) and value.numel() > 64:
            raise RecordingError(
                f"{where}: reads a tensor of shape {list(value.shape)} that its probe did not; a layer must do "
                "the same at every position"
            )
    # A recording outlives the model it was taken from; left here, that model's weights would live as long.
    for name in attributes:
        delattr(traced, name)
    traced.recompile()


def _simplify(traced: fx.GraphModule) -> None:
    """Drop casts to the dtype a tensor already has: dtypes are baked, so they never do anything."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.to.dtype and len(node.args) == 2:
            source = node.args[0].meta.get("val")
            if isinstance(source, Tensor) and source.dtype == node.args[1] and not node.kwargs:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
    graph.lint()
    traced.recompile()


def _verify(segment: Segment, recording: Recording, scratch: Mapping[str, Tensor], log: ProbeLog, where: str) -> None:
    """Run the recording beside the segment at other lengths and another capacity; both must agree bit for bit."""
    symbols = {name: _VERIFY_AT[name] for name in segment.symbols}
    theirs = _scratch(segment, scratch, scratch.get(HIDDEN), _VERIFY_CAPACITY)
    ours = {name: tensor.clone() for name, tensor in theirs.items()}
    expected = segment.call(theirs, symbols)
    found = recording.run(*ours.values(), *symbols.values(), *log.weights)
    pairs = [(expected, found), *((theirs[name], ours[name]) for name in theirs)]
    for a, b in pairs:
        # Exact: the recording calls the same kernels on the same values. NaN may stand where NaN stands.
        if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
            raise RecordingError(
                f"{where}: the recording differs from the layer at other lengths than it was recorded at; the layer "
                "reads something that is neither bound nor baked. Run it with plan='off'"
            )
