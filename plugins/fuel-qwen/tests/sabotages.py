"""Defects of this family alone, for the sabotage table: the core's suite must stay green under each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fuel_core.testing import Sabotage

from fuel_qwen import qwen2, qwen3, qwen3_moe


def _drop_the_q_bias() -> None:
    original = qwen2.Qwen2Attention.forward

    def forward(self: Any, x: torch.Tensor, inputs: Any) -> torch.Tensor:
        kept, self.q_proj.bias = self.q_proj.bias, None
        try:
            return original(self, x, inputs)
        finally:
            self.q_proj.bias = kept

    qwen2.Qwen2Attention.forward = forward  # type: ignore[method-assign]


def _forget_the_q_norm() -> None:
    original = qwen3.Qwen3Attention.forward

    def forward(self: Any, x: torch.Tensor, inputs: Any) -> torch.Tensor:
        norm, self.q_norm = self.q_norm, torch.nn.Identity()
        try:
            return original(self, x, inputs)
        finally:
            self.q_norm = norm

    qwen3.Qwen3Attention.forward = forward  # type: ignore[method-assign]


def _forget_the_routing_weights() -> None:
    def moe(inputs: Any, x: torch.Tensor, router: Any, experts: Any) -> torch.Tensor:
        def even(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = router(rows)
            return torch.full_like(weights, 1.0 / weights.shape[-1]), chosen

        return layers.moe(inputs, x, even, experts)  # type: ignore[arg-type]

    layers = qwen3_moe.layers
    # The name in this family's module alone: the shared function must stay as it is.
    qwen3_moe.layers = SimpleNamespace(**{**vars(layers), "moe": moe})  # type: ignore[assignment]


SABOTAGES = [
    Sabotage("qwen-drop-q-bias", "the query bias of Qwen2 is not added", _drop_the_q_bias),
    Sabotage("qwen-forget-q-norm", "queries of Qwen3 are not normalised", _forget_the_q_norm),
    Sabotage("qwen-even-experts", "the chosen experts count alike", _forget_the_routing_weights),
]
