"""Defects of this family alone, for the sabotage table: the core's suite must stay green under each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fuel_core.testing import Sabotage

from fuel_gemma import gemma, gemma2, gemma3


def _forget_the_one() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)

    gemma.GemmaRMSNorm.forward = forward  # type: ignore[method-assign]


def _add_the_one_twice() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)

    gemma.GemmaRMSNorm.forward = forward  # type: ignore[method-assign]


def _exact_gelu() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    gemma.GemmaMLP.forward = forward  # type: ignore[method-assign]


def _no_cap_on_scores() -> None:
    original = gemma2.Gemma2Attention.__init__

    def init(self: Any, c: Any) -> None:
        original(self, c)
        self.softcap = None

    gemma2.Gemma2Attention.__init__ = init  # type: ignore[method-assign]


def _skip_a_post_norm() -> None:
    def forward(self: Any, inputs: Any) -> torch.Tensor:
        h = inputs.h + self.self_attn(self.input_layernorm(inputs.h), inputs)
        return h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))  # type: ignore[no-any-return]

    gemma2.Gemma2Layer.forward = forward  # type: ignore[method-assign]


def _one_base_everywhere() -> None:
    gemma3.Gemma3Backbone.decode_rope_plan = gemma.GemmaBackbone.decode_rope_plan  # type: ignore[method-assign]


SABOTAGES = [
    Sabotage("gemma-forget-the-one", "norms multiply by the stored weight of a folder", _forget_the_one),
    Sabotage("gemma-add-the-one-twice", "norms of a GGUF file get another 1", _add_the_one_twice),
    Sabotage("gemma-exact-gelu", "the gate is GELU by the error function", _exact_gelu),
    Sabotage("gemma-no-cap-on-scores", "attention scores are not capped", _no_cap_on_scores),
    Sabotage("gemma-skip-a-post-norm", "what attention returns is added as it is", _skip_a_post_norm),
    Sabotage("gemma-one-base", "windowed layers rotate like the dense ones", _one_base_everywhere),
]
