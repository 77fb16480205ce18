"""What this package says of its family to the conformance kit: `fuel check llama` runs the checks.

One tiny config for each thing in which the architectures differ. True logits come from transformers, which is in the
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
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
ORIGINAL = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
WINDOWED, DENSE = "sliding_attention", "full_attention"

CONFORMANCE = Conformance(
    family="fuel_llama.family:FAMILY",
    configs={
        "llama": {**SHARED, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
        "llama3": {
            **SHARED,
            "model_type": "llama",
            "num_key_value_heads": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **ORIGINAL,
            },
        },
        "yarn": {
            **SHARED,
            "model_type": "llama",
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "yarn", "factor": 16.0, **ORIGINAL},
        },
        "mistral": {**SHARED, "model_type": "mistral", "sliding_window": 5},
        "ministral": {
            **SHARED,
            "model_type": "ministral",
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": [WINDOWED, DENSE, WINDOWED],
        },
        "ministral3": {
            **SHARED,
            "model_type": "ministral3",
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
        "smollm3": {
            **SHARED,
            "model_type": "smollm3",
            "pad_token_id": None,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": [DENSE, WINDOWED, WINDOWED],
        },
    },
    capabilities={
        "bias",
        "full_heads",
        "grouped_heads",
        "rope",
        "tied_head",
        "window",
        "window_variants",
    },
    oracle=transformers_oracle(),
    distribution="fuel-llama",
)
