"""What this package says of its family to the conformance kit: `fuel check qwen` runs the checks.

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
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
ORIGINAL = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
# Routing is a decision: where rounding to 16 bits turns one, logits differ by more than rounding (0.11 of the largest
# with 2 of 6 experts of this width). With 2 of 4 no row of the kit's ids is near one: bfloat16 0.011, int8 0.013.
EXPERTS: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

CONFORMANCE = Conformance(
    family="fuel_qwen.family:FAMILY",
    configs={
        "qwen2": {**SHARED, "model_type": "qwen2", "rms_norm_eps": 1e-3},
        "qwen2_windows": {
            **SHARED,
            "model_type": "qwen2",
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        "qwen2_yarn": {
            **SHARED,
            "model_type": "qwen2",
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        },
        "qwen3": {**SHARED, "model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True},
        "qwen3_biased": {
            **SHARED,
            "model_type": "qwen3",
            "num_hidden_layers": 3,
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "qwen3_moe": {**SHARED, **EXPERTS},
        "qwen3_moe_mixed": {
            **SHARED,
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    },
    capabilities={"bias", "full_heads", "grouped_heads", "rope", "tied_head", "window", "window_variants"},
    oracle=transformers_oracle(),
    distribution="fuel-qwen",
)
