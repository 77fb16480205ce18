"""Defects of this family alone, for the sabotage table: the core's suite must stay green under each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fuel_core.testing import Sabotage

from fuel_llama import llama


def _drop_the_q_bias() -> None:
    original = llama.LlamaAttention.forward

    def forward(self: Any, x: torch.Tensor, inputs: Any) -> torch.Tensor:
        kept, self.q_proj.bias = self.q_proj.bias, None
        try:
            return original(self, x, inputs)
        finally:
            self.q_proj.bias = kept

    llama.LlamaAttention.forward = forward  # type: ignore[method-assign]


def _forget_the_second_norm() -> None:
    def forward(self: Any, inputs: Any) -> torch.Tensor:
        h = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        return h + self.mlp(h)

    llama.LlamaLayer.forward = forward  # type: ignore[method-assign]


def _rotate_keys_only() -> None:
    original = llama.layers.attend

    def attend(inputs: Any, q: torch.Tensor, scale: float, **options: Any) -> torch.Tensor:
        return original(inputs, llama.layers.rotate(q, inputs.cos, -inputs.sin), scale, **options)

    # The name in this family's module alone: the shared function must stay as it is.
    llama.layers = SimpleNamespace(**{**vars(llama.layers), "attend": attend})  # type: ignore[assignment]


SABOTAGES = [
    Sabotage("llama-drop-q-bias", "the query bias is not added", _drop_the_q_bias),
    Sabotage("llama-forget-a-norm", "the MLP reads the unnormalised residual", _forget_the_second_norm),
    Sabotage("llama-rotate-keys-only", "queries are turned back before they meet the keys", _rotate_keys_only),
]
