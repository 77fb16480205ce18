"""What this package says of its family to the conformance kit: `fuel check gemma` runs the checks.

One tiny config for each thing in which the generations differ. True logits come from transformers, which is in the
`test` extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuel_core.testing import Conformance, transformers_oracle

SHARED: Mapping[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA3: Mapping[str, Any] = {
    **SHARED,
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 24,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

CONFORMANCE = Conformance(
    family="fuel_gemma.family:FAMILY",
    configs={
        "gemma": {
            **SHARED,
            "model_type": "gemma",
            "hidden_act": "gelu",
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_theta": 10000.0,
        },
        "gemma2": {
            **SHARED,
            "model_type": "gemma2",
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "sliding_window": 5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        "gemma3": GEMMA3,
        "gemma3_capped": {**GEMMA3, "final_logit_softcapping": 1.5, "attention_bias": True, "num_key_value_heads": 4},
    },
    capabilities={
        "bias",
        "embed_scale",
        "full_heads",
        "grouped_heads",
        "rope",
        "rope_variants",
        "tied_head",
        "window",
        "window_variants",
    },
    oracle=transformers_oracle(),
    distribution="fuel-gemma",
)
