"""Math shared by families, without flags: a family composes these, it does not configure them.

A layer's state and attention (``write_state``, ``read_state``, ``attend``) know both offset paths and every
weight format, so a family's code mentions neither plans nor offsets.
"""

from fuel_core.layers.attention import attend, live_mask, read_state, write_state
from fuel_core.layers.linear import Embedding, Linear, linear, project
from fuel_core.layers.mlp import swiglu
from fuel_core.layers.moe import ExpertLinear, Experts, Router, moe
from fuel_core.layers.norm import LayerNorm, RMSNorm, rms_norm
from fuel_core.layers.rope import rotate, rotate_interleaved

__all__ = [
    "Embedding",
    "ExpertLinear",
    "Experts",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "Router",
    "attend",
    "linear",
    "live_mask",
    "moe",
    "project",
    "read_state",
    "rms_norm",
    "rotate",
    "rotate_interleaved",
    "swiglu",
    "write_state",
]
