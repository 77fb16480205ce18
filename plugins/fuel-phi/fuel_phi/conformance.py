"""What this package says of its family to the conformance kit: `fuel check phi` runs the checks.

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
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PHI: Mapping[str, Any] = {**SHARED, "model_type": "phi", "num_key_value_heads": 4, "layer_norm_eps": 1e-4}
PHI3: Mapping[str, Any] = {**SHARED, "model_type": "phi3", "num_key_value_heads": 2, "rms_norm_eps": 1e-4}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
# More than the checks run step by step and less than their high positions: each run is short or long as a whole.
ORIGINAL = 96


def longrope(pairs: int) -> dict[str, Any]:
    """A RoPE block with two lists of this many numbers."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.5 * i for i in range(pairs)],
        "original_max_position_embeddings": ORIGINAL,
    }


CONFORMANCE = Conformance(
    family="fuel_phi.family:FAMILY",
    configs={
        # 20 features a head, of which 10 rotate; queries narrower than the hidden state.
        "phi": {**PHI, "head_dim": 20, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
        "phi_normed": {
            **PHI,
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "partial_rotary_factor": 0.75,
            },
        },
        "phi3": {**PHI3, "num_key_value_heads": 4, "head_dim": 20, "sliding_window": 5, "rope_parameters": DEFAULT},
        "phi3_longrope": {
            **PHI3,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": longrope(12),
        },
        "phi4_mini": {
            **PHI3,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {**longrope(9), "partial_rotary_factor": 0.75},
        },
    },
    capabilities={
        "bias",
        "full_heads",
        "grouped_heads",
        "partial_rotary",
        "rope",
        "tied_head",
        "window",
    },
    oracle=transformers_oracle(),
    distribution="fuel-phi",
)
