"""One step's bound data: computed on the host, then written to the device.

The same two functions serve the build of a plan and every rebind, so a held plan can never see another
formula than the step it replaces. This module does not know what a plan is.

Shape letters: B batch (1), T tokens of this step, S positions, R rope_width, M mask variants, P RoPE variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuel_core.errors import GeometryError
from fuel_core.kv_cache import LayerStateSpec, StateSlot
from fuel_core.mask_and_rope import MaskPlan, RopePlan, build_decode_mask_variants, build_rope_tables

__all__ = [
    "DecodeLayerInputs",
    "DecodeTokenData",
    "DecodeTokenHost",
    "StepSymbols",
    "compute_decode_token_host",
    "upload_decode_token_data",
]


@dataclass(frozen=True, slots=True)
class StepSymbols:
    """The integers of one step. On the symbol path they are arguments of the held plan.

    cached_len: positions filled before this step. attended_len: cached_len + T. window_starts: for each mask
    variant the first position its first row sees (0 when dense); from the same MaskPlan entry as the mask.
    """

    cached_len: int
    attended_len: int
    window_starts: tuple[int, ...]


@dataclass(slots=True)
class DecodeLayerInputs:
    """Everything one layer may read besides its weights.

    On the symbol path ``offset`` is None and the three integers are bound symbols: a layer may do arithmetic
    with them and pass them to torch, and must not compare them or branch on them, because the recorded step
    would keep the branch. On the device-offset path ``offset`` is set and the integers may not be read.
    """

    h: Tensor
    """Hidden state ``[B, T, hidden]``, activation dtype (the cache's)."""
    cos: Tensor
    """RoPE cosines of this layer's variant, float32 ``[B, 1, T, rope_width]``, half-split columns."""
    sin: Tensor
    """RoPE sines, as ``cos``."""
    mask: Tensor
    """Additive mask of this layer's variant, activation dtype ``[B, 1, T, >= attended_len]``: 0 or -inf."""
    offset: Tensor | None
    """Write position of the first token, int64 ``[B]``, or None on the symbol path."""
    cached_len: int
    """Positions filled before this step (symbol path)."""
    attended_len: int
    """Positions filled after this step (symbol path)."""
    window_start: int
    """First position this layer's first row sees; 0 for a dense layer (symbol path)."""
    state: Mapping[str, Tensor]
    """This layer's state buffers by slot name, written in place through ``layers.write_state``."""
    state_spec: LayerStateSpec
    """The spec those buffers were allocated from."""
    layer_idx: int
    """Which layer this is, from 0."""

    @property
    def seq_len(self) -> int:
        """T: tokens of this step, the same integer whatever was recorded."""
        return self.h.shape[1]

    def slot(self, name: str) -> StateSlot:
        """The slot called ``name``. Raises GeometryError naming what the layer keeps."""
        for slot in self.state_spec.slots:
            if slot.name == name:
                return slot
        raise GeometryError(
            f"layer {self.layer_idx} keeps {[s.name for s in self.state_spec.slots]}, found {name!r}; "
            "name one of its slots"
        )


@dataclass(frozen=True, slots=True)
class DecodeTokenHost:
    """One step's bound data on the host."""

    token_ids: npt.NDArray[np.int64]
    """``[T]``"""
    rope_cos: npt.NDArray[np.float32]
    """``[P, T, R]``"""
    rope_sin: npt.NDArray[np.float32]
    """``[P, T, R]``"""
    mask: npt.NDArray[np.float32] | None
    """``[M, 1, T, columns]``, None when nothing reads it"""
    symbols: StepSymbols


def compute_decode_token_host(
    mask_plan: MaskPlan,
    rope_plan: RopePlan,
    token_ids: Sequence[int],
    cached_len: int,
    *,
    mask_columns: int | None,
    sequence_len: int | None = None,
) -> DecodeTokenHost:
    """Compute one step's bound data. ``mask_columns``: width of the mask, None to leave it out.

    ``sequence_len``: positions of the whole sequence where it goes on after this step (see ``build_rope_tables``).
    """
    seq = len(token_ids)
    cos, sin = build_rope_tables(rope_plan, cached_len, seq, sequence_len)
    mask = None if mask_columns is None else build_decode_mask_variants(mask_plan, cached_len, seq, mask_columns)
    symbols = StepSymbols(cached_len, cached_len + seq, mask_plan.window_starts(cached_len))
    return DecodeTokenHost(np.asarray(token_ids, dtype=np.int64), cos, sin, mask, symbols)


@dataclass(slots=True)
class DecodeTokenData:
    """One step's bound data on the device. A held plan owns one of these and is rewritten in place."""

    token_ids: Tensor
    """int64 ``[B, T]``"""
    cos: Tensor
    """float32 ``[P, B, 1, T, R]``"""
    sin: Tensor
    """float32 ``[P, B, 1, T, R]``"""
    mask: Tensor
    """activation dtype ``[M, B, 1, T, columns]``"""
    offset: Tensor | None
    """int64 ``[B]`` on the device-offset path"""
    symbols: StepSymbols
    widths: tuple[int, ...] = field(default=())
    """rope_width of each RoPE variant"""

    def rope_views(self) -> list[tuple[Tensor, Tensor]]:
        """``(cos, sin)`` of each variant, ``[B, 1, T, width]``: views, made once and good for every rebind."""
        return [(self.cos[i][..., :w], self.sin[i][..., :w]) for i, w in enumerate(self.widths)]

    def mask_views(self) -> list[Tensor]:
        """The mask of each variant, ``[B, 1, T, columns]``: views, made once and good for every rebind."""
        return list(self.mask.unbind(0))


def upload_decode_token_data(
    host: DecodeTokenHost,
    *,
    rope_plan: RopePlan,
    n_mask_variants: int,
    dtype: torch.dtype,
    device: torch.device,
    device_offset: bool,
    mask_columns: int = 0,
    into: DecodeTokenData | None = None,
) -> DecodeTokenData:
    """Write one step's bound data to the device: into new tensors, or ``into`` those a held plan owns.

    ``mask_columns`` sizes the mask when ``host.mask`` was left out. Returns ``into`` where given.
    """
    seq = len(host.token_ids)
    if into is None:
        n_rope, _, width = host.rope_cos.shape
        columns = mask_columns if host.mask is None else host.mask.shape[-1]
        into = DecodeTokenData(
            token_ids=torch.empty((1, seq), dtype=torch.int64, device=device),
            cos=torch.empty((n_rope, 1, 1, seq, width), dtype=torch.float32, device=device),
            sin=torch.empty((n_rope, 1, 1, seq, width), dtype=torch.float32, device=device),
            mask=torch.zeros((n_mask_variants, 1, 1, seq, columns), dtype=dtype, device=device),
            offset=torch.empty(1, dtype=torch.int64, device=device) if device_offset else None,
            symbols=host.symbols,
            widths=tuple(variant.width for variant in rope_plan.variants),
        )
    into.token_ids.copy_(torch.from_numpy(host.token_ids).view(1, seq))
    into.cos.copy_(torch.from_numpy(host.rope_cos).view(into.cos.shape))
    into.sin.copy_(torch.from_numpy(host.rope_sin).view(into.sin.shape))
    if host.mask is not None:
        into.mask.copy_(torch.from_numpy(host.mask).view(into.mask.shape))
    if into.offset is not None:
        into.offset.fill_(host.symbols.cached_len)
    into.symbols = host.symbols
    return into
