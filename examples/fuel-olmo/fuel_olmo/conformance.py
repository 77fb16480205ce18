"""What this package says of its family to the conformance kit: `fuel check olmo` runs the checks.

True logits come from transformers, which is in the `test` extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuel_core.testing import Conformance, transformers_oracle

# hidden 96 and four heads of 20: the width of queries is neither hidden_size nor a power of two.
SHARED: Mapping[str, Any] = {
    "model_type": "olmo2",
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 20,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFORMANCE = Conformance(
    family="fuel_olmo.family:FAMILY",
    configs={
        "plain": {**SHARED, "num_key_value_heads": 4},
        "grouped": {
            **SHARED,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    },
    capabilities={"bias", "full_heads", "grouped_heads", "rope", "tied_head"},
    oracle=transformers_oracle(),
    distribution="fuel-olmo",
)
