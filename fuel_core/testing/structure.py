"""What a step of a model does, op by op, at chosen lengths: the facts that checks of structure compare.

Looks into the recording machinery on purpose: the kit checks the core's promises about it, family by family.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from fuel_core.backbone import DecodeBackbone
from fuel_core.kv_cache import KvCache
from fuel_core.layers import Embedding
from fuel_core.persistent_decode.build import bind_segments, decode_segments
from fuel_core.plan_backends import recording as machinery
from fuel_core.plan_backends.probe import ProbeLog, probe
from fuel_core.plan_backends.recording import Recording
from fuel_core.plan_backends.segments import Segment

__all__ = ["RECORD_AT", "projection_biases", "segments_of", "step_log", "trace_segments"]

RECORD_AT: Mapping[str, int] = {"cached_len": 91, "attended_len": 92, "window_start": 37}
_CAPACITY = 257


def segments_of(
    model: DecodeBackbone, *, device_offset: bool = False, dtype: torch.dtype = torch.float32
) -> list[tuple[Segment, Mapping[str, Tensor]]]:
    """Each segment of a single-token step with examples of its inputs."""
    cache = KvCache.with_capacity(model.layer_state_specs(), max_seq_len=8, dtype=dtype)
    data = model.build_decode_token_data([0], cache, device_offset=device_offset, mask_columns=8)
    segments = decode_segments(model, dtype, device_offset=device_offset, all_positions=False)
    bindings = bind_segments(model, segments, data, cache)
    return [(segment, binding.tensors) for segment, binding in zip(segments, bindings, strict=True)]


def _walk(
    model: DecodeBackbone, at: Mapping[str, int], capacity: int, *, device_offset: bool = False
) -> Iterator[tuple[Segment, dict[str, Tensor], ProbeLog]]:
    """(segment, scratch inputs, probe log) of each segment at these lengths."""
    owned = {id(t): t for t in (*model.parameters(), *model.buffers())}
    hidden: Tensor | None = None
    for segment, example in segments_of(model, device_offset=device_offset):
        scratch = machinery._scratch(segment, example, hidden, capacity)
        symbols = {name: at[name] for name in segment.symbols}
        log = probe(segment.call, scratch, symbols, owned, f"{model.decode_family()}::{segment.name}")
        hidden = log.output
        yield segment, scratch, log


def step_log(model: DecodeBackbone) -> tuple[tuple[Hashable, ...], ...]:
    """The ops of a step on both offset paths, with every literal and the geometry of every weight."""
    with torch.no_grad():
        return tuple(
            log.ops
            for device_offset in (False, True)
            for _, _, log in _walk(model, RECORD_AT, _CAPACITY, device_offset=device_offset)
        )


def projection_biases(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of every bias that a projection adds, whatever it is called: it stands beside a matrix.

    An embedding has a matrix as well, and adds nothing; a norm's bias stands beside a gain.
    """
    found = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        if isinstance(module, Embedding | nn.Embedding) or not any(p.dim() > 1 for p in own.values()):
            continue
        found += [(name, p) for name, p in own.items() if name.endswith("bias")]
    return found


@contextmanager
def _recording_at(at: Mapping[str, int], capacity: int) -> Iterator[None]:
    """Record at other lengths than the core's own."""
    with mock.patch.dict(machinery._RECORD_AT, at), mock.patch.object(machinery, "_RECORD_CAPACITY", capacity):
        yield


def trace_segments(
    model: DecodeBackbone,
    at: Mapping[str, int] = RECORD_AT,
    capacity: int = _CAPACITY,
    *,
    device_offset: bool = False,
    distinct: bool = False,
) -> list[Recording]:
    """Trace every segment of its own, sharing none: a guard on a length shows in the segment that has it.

    distinct: only the first of those that did the same when probed at the core's lengths.
    Raises RecordingError naming the family and the segment.
    """
    made, seen = [], set()
    with torch.no_grad(), _recording_at(at, capacity):
        for segment, scratch, log in _walk(model, at, capacity, device_offset=device_offset):
            if distinct and log.ops in seen:
                continue
            seen.add(log.ops)
            where = f"{model.decode_family()}::{segment.name}"
            recording = machinery._record(segment, scratch, log, where)
            machinery._verify(segment, recording, scratch, log, where)
            made.append(recording)
    return made
