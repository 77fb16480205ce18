"""State and attention: the calls through which a family meets the KV cache.

A family says what to keep and what to attend with; where the rows go and which of them are visible is
decided here, once for both offset paths.

Shape letters: B batch, H query heads, G kv heads, T tokens of this step, S positions of the buffer,
N positions attended, K head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuel_core import native
from fuel_core.errors import GeometryError
from fuel_core.token_data import DecodeLayerInputs

__all__ = ["attend", "live_mask", "read_state", "write_state"]

# Query rows scored at once in a long prefill: bounds the score matrix to [B, H, 128, N].
_QUERY_BLOCK = 128


def write_state(inputs: DecodeLayerInputs, name: str, rows: Tensor) -> None:
    """Store this step's rows of slot ``name`` in place.

    rows: ``[B, G, T, K]`` for ``k`` and ``v`` of a KeyValue layer, ``[B, T, *shape]`` for a named positional
    slot, ``[B, *shape]`` for a rolling one. Cast to the cache's dtype if needed.
    Raises GeometryError when the layer keeps no such slot or the shape differs.
    """
    slot, buffer = inputs.slot(name), inputs.state[name]
    axis = slot.seq_axis
    expected = list(buffer.shape)
    if axis is not None:
        expected[axis] = inputs.seq_len
    if list(rows.shape) != expected:
        raise GeometryError(
            f"layer {inputs.layer_idx}: rows of slot {name!r}: expected shape {expected}, found {list(rows.shape)}; "
            "write [B, heads, T, width]"
        )
    rows = rows.to(buffer.dtype)
    if axis is None:
        buffer.copy_(rows)
    elif inputs.offset is None:
        buffer.narrow(axis, inputs.cached_len, inputs.seq_len).copy_(rows)
    else:
        positions = inputs.offset.unsqueeze(1) + torch.arange(inputs.seq_len, device=buffer.device)  # [B, T]
        if buffer.shape[0] == 1:
            buffer.index_copy_(axis, positions.flatten(), rows)
        else:  # every batch row has an offset of its own
            shape = [1] * rows.dim()
            shape[0], shape[axis] = positions.shape
            buffer.scatter_(axis, positions.view(shape).expand_as(rows), rows)


def read_state(inputs: DecodeLayerInputs, name: str) -> Tensor:
    """The rows of slot ``name`` that this step may attend to; a view of the buffer.

    On the symbol path the live rows from the layer's window start on (``[B, G, N, K]`` or ``[B, N, *shape]``);
    on the device-offset path the whole capacity, of which ``live_mask`` hides the rest. A rolling slot is whole.
    """
    slot, buffer = inputs.slot(name), inputs.state[name]
    axis = slot.seq_axis
    if axis is None or inputs.offset is not None:
        return buffer
    return buffer.narrow(axis, inputs.window_start, inputs.attended_len - inputs.window_start)


def live_mask(inputs: DecodeLayerInputs) -> Tensor | None:
    """Additive mask ``[B, 1, T, N]`` for the rows ``read_state`` returns, or None where all are visible.

    One query on the symbol path sees every row from its window start to itself, so nothing needs hiding.
    """
    if inputs.offset is not None:
        return inputs.mask
    if inputs.seq_len == 1:
        return None
    return inputs.mask.narrow(3, inputs.window_start, inputs.attended_len - inputs.window_start)


def attend(inputs: DecodeLayerInputs, q: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Attention of ``q [B, H, T, K]`` over the layer's ``k`` and ``v``; returns ``[B, T, H * K]``.

    Scores are ``q kᵀ * scale``, then ``softcap * tanh(scores / softcap)`` where given, then the mask, then a
    float32 softmax. H must be a multiple of the layer's kv heads; query head h reads kv head h // (H / G).
    """
    keys, values, mask = read_state(inputs, "k"), read_state(inputs, "v"), live_mask(inputs)
    batch, n_heads, seq_len, head_dim = q.shape
    n_kv_heads = keys.shape[1]
    if n_heads % n_kv_heads:
        raise GeometryError(
            f"layer {inputs.layer_idx}: {n_heads} query heads are not a multiple of {n_kv_heads} kv heads; "
            "check the views"
        )
    if mask is None:
        rows = native.attend_one(q, keys, values, scale, softcap)
        if rows is not None:
            return rows.view(batch, seq_len, n_heads * head_dim).to(q.dtype)
    q = q.to(keys.dtype)
    if seq_len <= _QUERY_BLOCK:
        out = _attend_rows(q, keys, values, mask, scale, softcap)
    else:
        out = torch.cat(
            [
                _attend_rows(
                    q[:, :, start : start + _QUERY_BLOCK],
                    keys,
                    values,
                    None if mask is None else mask[:, :, start : start + _QUERY_BLOCK],
                    scale,
                    softcap,
                )
                for start in range(0, seq_len, _QUERY_BLOCK)
            ],
            dim=2,
        )
    return out.transpose(1, 2).reshape(batch, seq_len, n_heads * head_dim)


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """One block of query rows: ``[B, H, T, K] -> [B, H, T, K]``; heads of a group share one product."""
    batch, n_heads, seq_len, head_dim = q.shape
    n_kv_heads = keys.shape[1]
    rows = (n_heads // n_kv_heads) * seq_len
    scores = torch.matmul(q.reshape(batch, n_kv_heads, rows, head_dim), keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        if seq_len > 1:  # [B, G, H/G * T, N] += [B, 1, T, N]: give the group its own axis for the sum
            grouped = scores.view(batch, n_kv_heads, n_heads // n_kv_heads, seq_len, -1)
            scores = (grouped + mask.unsqueeze(2)).view(batch, n_kv_heads, rows, -1)
        else:
            scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).view(batch, n_heads, seq_len, values.shape[-1])
