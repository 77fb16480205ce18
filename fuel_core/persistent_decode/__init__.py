"""Plan once, rebind per token: build (the one body), session, driver (rebind), entry points, context."""

from fuel_core.persistent_decode.build import DataConsts, build_decode_graph, code_for, compile_step
from fuel_core.persistent_decode.context import COMPILE_AFTER, DecodeStats, InferenceContext, PlanEvent
from fuel_core.persistent_decode.driver import rebind_and_realize_prebuilt
from fuel_core.persistent_decode.entry import (
    check_arguments,
    drop_decode_session,
    forward_decode_step,
    forward_with_kv_context,
    forward_with_kv_context_persistent,
    refresh_decode_session,
)
from fuel_core.persistent_decode.session import DecodeSession, Disposition, Reason, SessionKey, SessionSlot, Validity

__all__ = [
    "COMPILE_AFTER",
    "DataConsts",
    "DecodeSession",
    "DecodeStats",
    "Disposition",
    "InferenceContext",
    "PlanEvent",
    "Reason",
    "SessionKey",
    "SessionSlot",
    "Validity",
    "build_decode_graph",
    "check_arguments",
    "code_for",
    "compile_step",
    "drop_decode_session",
    "forward_decode_step",
    "forward_with_kv_context",
    "forward_with_kv_context_persistent",
    "rebind_and_realize_prebuilt",
    "refresh_decode_session",
]
