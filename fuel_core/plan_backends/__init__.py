"""How a recorded step becomes something runnable. Internal until a second author exists.

`recorded` runs everywhere, `compiled` on a CPU where there is code for the step. Others are named here so that asking
for one says what there is.
"""

from __future__ import annotations

import torch

from fuel_core.code_cache import CodeCache
from fuel_core.errors import BackendUnavailableError
from fuel_core.plan_backends.code_key import shelf_identity
from fuel_core.plan_backends.compiled import LIBRARY, BuiltCode, CodeOnDisk, CompiledPlan, code_on_disk
from fuel_core.plan_backends.recorded import HeldPlan
from fuel_core.plan_backends.recording import Recording, Shelf, StepProgram, record_program, recordings_made
from fuel_core.plan_backends.segments import HIDDEN, Segment, SegmentBinding

__all__ = [
    "HIDDEN",
    "LIBRARY",
    "PLAN_MODES",
    "BuiltCode",
    "CodeCache",
    "CodeOnDisk",
    "CompiledPlan",
    "HeldPlan",
    "Recording",
    "Segment",
    "SegmentBinding",
    "Shelf",
    "StepProgram",
    "code_on_disk",
    "record_program",
    "recordings_made",
    "resolve_backend",
    "shelf_identity",
]

PLAN_MODES = ("auto", "off", "recorded", "compiled", "cuda_graph")
_BACKENDS = {"recorded": HeldPlan, "compiled": CompiledPlan}


def resolve_backend(plan: str, device: torch.device) -> str:
    """The backend that ``plan`` means on ``device``: a name, or ``off``. For ``auto`` the one it begins with.

    Raises BackendUnavailableError for a word that is no plan mode or a backend that is not there.
    """
    if plan not in PLAN_MODES:
        raise BackendUnavailableError(f"plan: one of {', '.join(PLAN_MODES)} expected, found {plan!r}; use 'auto'")
    if plan == "off":
        return "off"
    if plan == "auto":
        return "recorded"
    if plan not in _BACKENDS:
        raise BackendUnavailableError(
            f"plan backend {plan!r} is not in this release (on {device}); use plan='auto', or one of off, "
            f"{', '.join(_BACKENDS)}"
        )
    if plan == "compiled" and device.type != "cpu":
        raise BackendUnavailableError(
            f"plan backend 'compiled' runs on a CPU, found device {device}; use plan='auto', or device='cpu'"
        )
    return plan
