"""Defects of this family alone, for the sabotage table: the core's suite must stay green under each."""

from __future__ import annotations

from typing import Any

import torch
from fuel_core.testing import Sabotage

from fuel_olmo import olmo


def _norms_before_the_blocks() -> None:
    def forward(self: Any, inputs: Any) -> torch.Tensor:
        h: torch.Tensor = inputs.h + self.self_attn(self.post_attention_layernorm(inputs.h), inputs)
        return h + self.mlp(self.post_feedforward_layernorm(h))

    olmo.OlmoLayer.forward = forward  # type: ignore[method-assign]


def _forgotten_q_norm() -> None:
    original = olmo.OlmoAttention.forward

    def forward(self: Any, x: torch.Tensor, inputs: Any) -> torch.Tensor:
        kept, self.q_norm = self.q_norm, torch.nn.Identity()
        try:
            return original(self, x, inputs)
        finally:
            self.q_norm = kept

    olmo.OlmoAttention.forward = forward  # type: ignore[method-assign]


SABOTAGES = [
    Sabotage("olmo-pre-norm", "the norms stand before the blocks", _norms_before_the_blocks),
    Sabotage("olmo-no-q-norm", "queries are not normalised", _forgotten_q_norm),
]
