"""The one body of a decode step.

``decode_segments`` says what a step is; a fresh step (D1) runs it on new bound data, a plan build (D2) records it and
runs the recording on bound data that is kept. Nothing else differs, from the first check to the logits.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

import torch
from torch import Tensor

from fuel_core.backbone import DecodeBackbone, PersistentDecodeModel
from fuel_core.decode_shape import Difference, ShapeKey
from fuel_core.errors import GeometryError, PlanError
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode.context import InferenceContext
from fuel_core.persistent_decode.session import DecodeSession, Disposition, Reason, SessionKey
from fuel_core.plan_backends import (
    HIDDEN,
    LIBRARY,
    BuiltCode,
    CodeCache,
    CodeOnDisk,
    CompiledPlan,
    HeldPlan,
    Segment,
    SegmentBinding,
    Shelf,
    StepProgram,
    code_on_disk,
    record_program,
    shelf_identity,
)
from fuel_core.profiling import span
from fuel_core.token_data import DecodeLayerInputs, DecodeTokenData

__all__ = [
    "DataConsts",
    "build_decode_graph",
    "check_step",
    "choose_backend",
    "code_for",
    "compile_step",
    "decode_segments",
    "session_key",
]

# What a step computes in is the cache's dtype; products, masks and casts exist for these.
_ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DataConsts(enum.Enum):
    """How a step's bound data is minted: the whole difference between D1 and D2 inside the body."""

    BAKED = "forward_with_kv_context"
    """Fresh tensors, used once."""
    REBINDABLE = "forward_with_kv_context_persistent"
    """Tensors that a held plan owns and that every later step rewrites."""


def check_step(model: PersistentDecodeModel, n_tokens: int, cache: KvCache, ctx: InferenceContext, entry: str) -> None:
    """Refuse a step that model, cache and context do not agree on, before anything is touched.

    Runs on every entry, rebinds included. Raises CapacityError, CacheStateError or GeometryError.
    """
    where = f"{model.decode_family()}::{entry}"
    cache.check_room(n_tokens, where)
    specs = model.state_specs
    if cache.specs is not specs and cache.specs == specs:
        cache.specs = specs  # equal: the next comparison is one of identity
    if cache.specs is not specs:
        if cache.n_layers != len(specs):
            raise GeometryError(
                f"{where}: the model has {len(specs)} layers, the KV cache {cache.n_layers}; allocate the cache from "
                "model.layer_state_specs()"
            )
        layer = next(i for i, (a, b) in enumerate(zip(specs, cache.specs, strict=True)) if a != b)
        raise GeometryError(
            f"{where}: layer {layer} keeps {specs[layer]}, the KV cache holds {cache.specs[layer]}; allocate the cache "
            "from model.layer_state_specs()"
        )
    if cache.dtype not in _ACTIVATION_DTYPES:
        raise GeometryError(
            f"{where}: a KV cache in float32, bfloat16 or float16 is expected, found {cache.dtype}; allocate it anew"
        )
    if cache.device != ctx.device:
        raise GeometryError(f"{where}: the context is on {ctx.device}, the KV cache on {cache.device}; use one device")
    for name, plan in (("mask_plan", model.mask_plan), ("rope_plan", model.rope_plan)):
        if plan.n_layers != len(specs):
            raise GeometryError(
                f"{where}: {name} covers {plan.n_layers} layers, the model has {len(specs)}; make one for all"
            )


def _check_weights(model: DecodeBackbone, cache: KvCache, entry: str) -> None:
    """Refuse weights that are not where the cache is. Not needed on a rebind: weights that moved rebuild the plan."""
    if all(parameter.device == cache.device for parameter in model.parameters()):
        return
    name, found = next((n, p.device) for n, p in model.named_parameters() if p.device != cache.device)
    raise GeometryError(
        f"{model.decode_family()}::{entry}: parameter {name} is on {found}, the KV cache on {cache.device}; load the "
        "weights, or move the model or the cache"
    )


def session_key(
    model: PersistentDecodeModel,
    cache: KvCache,
    ctx: InferenceContext,
    backend: str | None = None,
    shape_key: ShapeKey | None = None,
) -> SessionKey:
    """The key that a held plan must match to serve the next single-token step.

    backend: the one to serve it on; without it, the one that the context has chosen for the model. shape_key: the
    model's, where the caller has asked for it in this step (asking looks at every weight).
    """
    shape_key = shape_key or model.decode_shape_key()
    return SessionKey(
        seq=1,
        max_seq_len=cache.max_seq_len,
        n_layers=cache.n_layers,
        cache_dtype=cache.dtype,
        device=cache.device,
        offset_path=ctx.offset_path,
        backend=backend or ctx.backend_of(shape_key, cache.dtype),
        shape_key=shape_key,
        alloc_id=cache.alloc_id,
    )


def decode_segments(
    model: DecodeBackbone, dtype: torch.dtype, *, device_offset: bool, all_positions: bool
) -> list[Segment]:
    """The step of ``model``: embedding, every layer, head.

    The embedding is scaled in float32 and only then cast to the activation dtype, whoever the family is. The head runs
    on the last row only unless all positions are asked for. Logits are float32.
    """
    dims = model.decode_dims()
    specs = tuple(model.layer_state_specs())

    def embed(tensors: Mapping[str, Tensor], _: Mapping[str, int]) -> Tensor:
        h: Tensor = model.decode_token_embedding()(tensors["token_ids"])  # [B, T, D] float32
        if dims.embed_scale is not None:
            h = h * dims.embed_scale
        return h.to(dtype)

    def layer(layer_idx: int) -> Segment:
        spec = specs[layer_idx]
        state = tuple(f"state.{slot.name}" for slot in spec.slots)
        axes = {f"state.{slot.name}": slot.seq_axis for slot in spec.slots if slot.seq_axis is not None}

        def call(tensors: Mapping[str, Tensor], symbols: Mapping[str, int]) -> Tensor:
            return model.decode_apply_layer(
                layer_idx,
                DecodeLayerInputs(
                    h=tensors[HIDDEN],
                    cos=tensors["cos"],
                    sin=tensors["sin"],
                    mask=tensors["mask"],
                    offset=tensors.get("offset"),
                    cached_len=symbols.get("cached_len", _UNREADABLE),
                    attended_len=symbols.get("attended_len", _UNREADABLE),
                    window_start=symbols.get("window_start", _UNREADABLE),
                    state={slot.name: tensors[f"state.{slot.name}"] for slot in spec.slots},
                    state_spec=spec,
                    layer_idx=layer_idx,
                ),
            )

        return Segment(
            name=f"layer {layer_idx}",
            tensors=(HIDDEN, "cos", "sin", "mask", *(("offset",) if device_offset else ()), *state),
            symbols=() if device_offset else ("cached_len", "attended_len", "window_start"),
            call=call,
            capacity_axis={"mask": 3, **axes},
        )

    def head(tensors: Mapping[str, Tensor], _: Mapping[str, int]) -> Tensor:
        h = tensors[HIDDEN]
        if not all_positions and h.shape[1] > 1:
            h = h[:, -1:]
        return model.decode_final_norm_and_head(h).to(torch.float32)

    return [
        Segment("embed", ("token_ids",), (), embed, {}),
        *(layer(i) for i in range(dims.n_layers)),
        Segment("head", (HIDDEN,), (), head, {}),
    ]


class _UnreadableOnDevicePath:
    """Stands for the integers on the device-offset path, where a step that read one would bake it."""

    def __repr__(self) -> str:
        return "<not readable on the device-offset path>"

    def _refuse(self, *_: object) -> NoReturn:
        raise GeometryError(
            "cached_len, attended_len and window_start are not readable on the device-offset path; use "
            "layers.read_state, layers.live_mask and layers.write_state, which serve both paths"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __abs__ = __index__ = __int__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __float__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse
    __eq__ = __ne__ = _refuse


# No int, so that torch cannot take its value either: it refuses the type, and names it.
_UNREADABLE: int = cast(int, _UnreadableOnDevicePath())


def bind_segments(
    model: DecodeBackbone, segments: Sequence[Segment], data: DecodeTokenData, cache: KvCache
) -> list[SegmentBinding]:
    """What each segment is bound to. Views of the bound data are made here, once, and stay good for every rebind."""
    mask_plan, rope_plan = model.mask_plan, model.rope_plan
    ropes, masks = data.rope_views(), data.mask_views()
    bindings = [SegmentBinding({"token_ids": data.token_ids})]
    for layer_idx in range(len(segments) - 2):
        cos, sin = ropes[rope_plan.variant_for_layer(layer_idx)]
        variant = mask_plan.variant_for_layer(layer_idx)
        tensors: dict[str, Tensor] = {"cos": cos, "sin": sin, "mask": masks[variant]}
        if data.offset is not None:
            tensors["offset"] = data.offset
        tensors.update({f"state.{name}": buffer for name, buffer in cache.layer(layer_idx).items()})
        bindings.append(SegmentBinding(tensors, variant))
    bindings.append(SegmentBinding({}))
    return bindings


def run_segments(segments: Sequence[Segment], bindings: Sequence[SegmentBinding], data: DecodeTokenData) -> Tensor:
    """Run a step as it is written, without recording anything."""
    hidden: Tensor | None = None
    symbols = data.symbols
    for segment, binding in zip(segments, bindings, strict=True):
        tensors = dict(binding.tensors)
        if hidden is not None:
            tensors[HIDDEN] = hidden
        integers = {}
        if segment.symbols:
            start = symbols.window_starts[binding.mask_variant]
            integers = {"cached_len": symbols.cached_len, "attended_len": symbols.attended_len, "window_start": start}
        hidden = segment.call(tensors, integers)
    assert hidden is not None
    return hidden


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step that ran: its logits ``[B, rows, V]`` float32, and the session where a plan was built."""

    logits: Tensor
    session: DecodeSession | None


def build_decode_graph(
    model: DecodeBackbone,
    mode: DataConsts,
    token_ids: Sequence[int],
    cache: KvCache,
    ctx: InferenceContext,
    *,
    all_positions: bool = False,
    backend: str | None = None,
    sequence_len: int | None = None,
) -> BuiltStep:
    """Run one step (BAKED), or build a plan for single-token steps and run it once (REBINDABLE).

    backend: the one to build on, as ``session_key`` takes it; where code cannot be attached, the plan is recorded.
    sequence_len: as ``forward_decode_step`` takes it. The cache is not advanced here. Raises what ``check_step``
    raises, RecordingError when the step cannot be recorded.
    """
    check_step(model, len(token_ids), cache, ctx, mode.value)
    _check_weights(model, cache, mode.value)
    device_offset = ctx.offset_path == "device"
    cache.begin_step(len(token_ids), scrub=device_offset)
    held = mode is DataConsts.REBINDABLE
    # A mask of the whole capacity where its shape must not change or everything is attended; else the live columns.
    columns = cache.max_seq_len if device_offset or held else cache.cached_len + len(token_ids)
    data = model.build_decode_token_data(
        token_ids, cache, device_offset=device_offset, mask_columns=columns, sequence_len=sequence_len
    )
    segments = decode_segments(model, cache.dtype, device_offset=device_offset, all_positions=all_positions)
    bindings = bind_segments(model, segments, data, cache)
    if not held:
        with span("fuel.run"):
            return BuiltStep(run_segments(segments, bindings, data), None)
    program = _program(model, segments, bindings, cache, ctx)
    key = session_key(model, cache, ctx, backend)
    plan: HeldPlan | None = _compiled_plan(program, segments, bindings) if key.backend == "compiled" else None
    if plan is None:
        if key.backend == "compiled":
            ctx.choose_backend(key.shape_key, cache.dtype, "recorded")
            ctx.record(Disposition.ABSENT, Reason.NO_CODE, Difference("backend", "compiled", "recorded"))
            key = replace(key, backend="recorded")
        plan = HeldPlan(program, segments, bindings)
    session = DecodeSession(key, plan, data, cache)
    return BuiltStep(plan.run(data.symbols), session)


def _compiled_plan(
    program: StepProgram, segments: Sequence[Segment], bindings: Sequence[SegmentBinding]
) -> CompiledPlan | None:
    codes = LIBRARY.codes(program)
    if not codes:
        return None
    try:
        return CompiledPlan(program, segments, bindings, codes)
    except PlanError as error:
        LIBRARY.warn(str(error))
        return None


def choose_backend(
    model: DecodeBackbone, cache: KvCache, ctx: InferenceContext, shape_key: ShapeKey, keep: str | None = None
) -> tuple[str, Difference | None]:
    """The backend for the next single-token step, and the move where it is one to a faster backend.

    keep: the backend that the sequence began on; one that began recorded stays so. Under ``compiled`` what is missing
    is built now, under ``auto`` code is used where there is some and never waited for.
    """
    if not ctx.may_compile:
        return ctx.backend, None
    if keep == "recorded":
        return keep, None  # nothing is chosen, and no session dropped, in the middle of a sequence
    moved = None
    if not ctx.is_chosen(shape_key, cache.dtype):
        program = _step_program(model, cache, ctx)
        if ctx.plan == "compiled":
            LIBRARY.build(program)
        usable = bool(LIBRARY.codes(program))
        moved = ctx.choose_backend(shape_key, cache.dtype, "compiled" if usable else "recorded")
        if not usable and (ctx.plan == "compiled" or LIBRARY.refuses(program)):
            ctx.record(Disposition.ABSENT, Reason.NO_CODE, Difference("backend", "compiled", "recorded"))
    return ctx.backend_of(shape_key, cache.dtype), moved


def compile_step(model: DecodeBackbone, dtype: torch.dtype, *, again: bool = False) -> list[BuiltCode]:
    """Make the native code of single-token steps on caches of ``dtype``, and wait for it; says what became of each.

    again: also what was refused before. Raises RecordingError when the step cannot be recorded.
    """
    ctx = InferenceContext("cpu", plan="auto", offset_path="symbol")
    cache = KvCache.with_capacity(model.layer_state_specs(), max_seq_len=2, dtype=dtype)
    check_step(model, 1, cache, ctx, "compile_step")
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return LIBRARY.build(_step_program(model, cache, ctx), again=again)


def code_for(model: DecodeBackbone, dtype: torch.dtype) -> CodeOnDisk:
    """The native code that single-token steps on caches of ``dtype`` would find, by looking at the folder alone.

    The model may stand on the meta device: its structure decides.
    """
    return code_on_disk(_identity(model, dtype))


def _identity(model: DecodeBackbone, dtype: torch.dtype) -> str:
    """What recordings of the model's steps depend on besides what a probe shows."""
    return shelf_identity(model, (model.structure_key().components, str(dtype)))


def _step_program(model: DecodeBackbone, cache: KvCache, ctx: InferenceContext) -> StepProgram:
    """The recorded single-token step, taken without running one."""
    _check_weights(model, cache, DataConsts.REBINDABLE.value)
    cache.ensure_storage()
    device_offset = ctx.offset_path == "device"
    data = model.build_decode_token_data([0], cache, device_offset=device_offset, mask_columns=cache.max_seq_len)
    segments = decode_segments(model, cache.dtype, device_offset=device_offset, all_positions=False)
    return _program(model, segments, bind_segments(model, segments, data, cache), cache, ctx)


def _program(
    model: DecodeBackbone,
    segments: Sequence[Segment],
    bindings: Sequence[SegmentBinding],
    cache: KvCache,
    ctx: InferenceContext,
) -> StepProgram:
    """The recorded step of this model as it is now; taken once per structure, kept on the model."""
    memo = (model.weights_epoch(), model.structure_key(), cache.dtype, cache.device, ctx.offset_path)
    program: StepProgram | None = model._programs.get(memo)
    if program is None:
        owned = [*model.parameters(), *model.buffers()]
        examples = [binding.tensors for binding in bindings]
        shelf = Shelf(CodeCache.of_this_user(), _identity(model, cache.dtype)) if ctx.may_compile else None
        program = record_program(segments, examples, owned, model.decode_family(), shelf)
        ctx.stats.recordings += program.recorded_now
        model._programs[memo] = program
    return program
