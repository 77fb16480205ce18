"""The `recorded` backend: run a recording as it is, at once, everywhere, without a compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuel_core.errors import PlanError, TopologyChanged
from fuel_core.plan_backends.recording import StepProgram
from fuel_core.plan_backends.segments import HIDDEN, Segment, SegmentBinding
from fuel_core.token_data import StepSymbols

__all__ = ["HeldPlan", "signature"]

_STATE = "state."

Signature = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def signature(tensor: Tensor) -> Signature:
    """Pointer, shape, stride, dtype and device: what code that checks nothing itself relies on."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class HeldPlan:
    """A step program attached to one session's bound data and KV buffers.

    Holds strong references to every weight, bound tensor and state buffer it reads. ``run`` takes the integers of one
    step; everything else was written into the bound tensors before.
    """

    backend = "recorded"
    repointable = True

    def __init__(self, program: StepProgram, segments: Sequence[Segment], bindings: Sequence[SegmentBinding]) -> None:
        self.program = program
        self._segments = tuple(segments)
        self._bindings = list(bindings)
        self._fingerprints = tuple(segment.recording.fingerprint for segment in program.segments)
        self._weight_signatures = [[signature(w) for w in segment.weights] for segment in program.segments]
        self._state_signatures = [
            {name: signature(tensor)[1:] for name, tensor in binding.tensors.items() if name.startswith(_STATE)}
            for binding in bindings
        ]
        self._bind()

    def _bind(self) -> None:
        """Lay out each call's arguments once, so that a step only fills in the hidden state and the integers."""
        self._calls: list[Any] = []
        rows = zip(self.program.segments, self._segments, self._bindings, self._fingerprints, strict=True)
        for part, segment, binding, fingerprint in rows:
            takes_hidden = segment.tensors[:1] == (HIDDEN,)
            before = [binding.tensors[name] for name in segment.tensors if name != HIDDEN]
            self._calls.append(
                (
                    part.recording,
                    fingerprint,
                    takes_hidden,
                    before,
                    bool(segment.symbols),
                    binding.mask_variant,
                    part.weights,
                )
            )

    @property
    def ops(self) -> tuple[str, ...]:
        """Every op of a step, in order."""
        return self.program.ops

    @property
    def reads(self) -> frozenset[str]:
        """Names of the bound inputs that the step reads."""
        return self.program.reads

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """One per segment, as they were when the plan was built."""
        return self._fingerprints

    def run(self, symbols: StepSymbols) -> Tensor:
        """Run one step on what is bound now; returns the head's output ``[B, 1, V]``, float32, the caller's own.

        Raises TopologyChanged when a recording was rewritten since this plan was built.
        """
        if not self._calls:
            raise PlanError("held plan: attached KV buffers expected, found none; repoint it to a cache first")
        hidden: Tensor | None = None
        cached, attended, starts = symbols.cached_len, symbols.attended_len, symbols.window_starts
        for recording, fingerprint, takes_hidden, tensors, takes_integers, variant, weights in self._calls:
            if recording.fingerprint is not fingerprint:
                raise TopologyChanged(
                    "held plan: the op list it was built with expected, found another; drop the session and build again"
                )
            integers = (cached, attended, starts[variant]) if takes_integers else ()
            if takes_hidden:
                hidden = recording.run(hidden, *tensors, *integers, *weights)
            else:
                hidden = recording.run(*tensors, *integers, *weights)
        assert hidden is not None
        return hidden

    def repoint(self, states: Sequence[Mapping[str, Tensor]]) -> str | None:
        """Attach other KV buffers; returns why not, and then nothing has changed.

        Every buffer must have the shape, stride, dtype and device of the one the plan was built on.
        """
        staged: list[SegmentBinding] = []
        layers = iter(enumerate(states))
        for binding, signatures in zip(self._bindings, self._state_signatures, strict=True):
            if not signatures:
                staged.append(binding)
                continue
            layer_idx, buffers = next(layers)
            tensors = dict(binding.tensors)
            for name, was in signatures.items():
                slot = name.removeprefix(_STATE)
                incoming = buffers.get(slot)
                if incoming is None:
                    return f"layer {layer_idx} has no slot {slot!r}"
                if signature(incoming)[1:] != was:
                    return f"layer {layer_idx} slot {slot!r} was {was}, found {signature(incoming)[1:]}"
                tensors[name] = incoming
            staged.append(SegmentBinding(tensors, binding.mask_variant))
        self._bindings = staged
        self._bind()
        return None

    def detach(self) -> None:
        """Let go of the KV buffers (their cache is gone). ``repoint`` attaches others; until then nothing may run."""
        self._bindings = [
            SegmentBinding({n: t for n, t in b.tensors.items() if not n.startswith(_STATE)}, b.mask_variant)
            for b in self._bindings
        ]
        self._calls = []

    def check_weights(self) -> None:
        """Compare every attached weight with its signature at build. Raises PlanError on a mismatch."""
        for segment, signatures in zip(self.program.segments, self._weight_signatures, strict=True):
            for index, (weight, was) in enumerate(zip(segment.weights, signatures, strict=True)):
                if signature(weight) != was:
                    raise PlanError(
                        f"{segment.name}: weight {index} was moved after the plan was built; build the plan again"
                    )
