"""Defects of this family alone, for the sabotage table: the core's suite must stay green under each."""

from __future__ import annotations

from typing import Any

import torch
from fuel_core.testing import Sabotage

from fuel_phi import phi, phi3


def _one_after_the_other() -> None:
    def forward(self: Any, inputs: Any) -> torch.Tensor:
        h = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        return h + self.mlp(self.input_layernorm(h))

    phi.PhiLayer.forward = forward  # type: ignore[method-assign]


def _cut_instead_of_bent() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.nn.functional.relu(self.fc1(x)))

    phi.PhiMLP.forward = forward  # type: ignore[method-assign]


def _keys_and_values_swapped() -> None:
    split = phi.split_qkv

    def swapped(qkv: torch.Tensor, q_width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = split(qkv, q_width)
        return q, v, k

    phi.split_qkv = phi3.split_qkv = swapped  # type: ignore[assignment]


def _up_before_gate() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(torch.nn.functional.silu(gate) * up)

    phi3.Phi3MLP.forward = forward  # type: ignore[method-assign]


def _no_window() -> None:
    def plan(self: Any) -> Any:
        return phi3.MaskPlan.dense(self.config.num_hidden_layers)

    phi3.Phi3Backbone.decode_mask_plan = plan  # type: ignore[method-assign]


SABOTAGES = [
    Sabotage("phi-sequential-block", "the MLP reads what attention left", _one_after_the_other),
    Sabotage("phi-relu", "the MLP cuts where it should bend", _cut_instead_of_bent),
    Sabotage(
        "phi-keys-and-values-swapped",
        "the parts of the fused product are taken in another order",
        _keys_and_values_swapped,
    ),
    Sabotage("phi-up-before-gate", "gate and up change places", _up_before_gate),
    Sabotage("phi-no-window", "every layer attends to the whole prefix", _no_window),
]
