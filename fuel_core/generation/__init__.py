"""The loop from prompt to finish reason: Generation, how a token is chosen, when to stop.

Sees token ids and logits, and text only where a stop string has to be matched. Owns no cache and no plan.
"""

from __future__ import annotations

from fuel_core.generation.decode_loop import (
    PREFILL_CHUNK,
    FinishReason,
    GeneratedToken,
    Generation,
    check_max_new_tokens,
    prefill_chunks,
)
from fuel_core.generation.sampling import (
    Sampler,
    SamplingParams,
    TokenLogprob,
    TokenSampler,
    distribution,
    greedy,
    sample,
    token_logprob,
)
from fuel_core.generation.stopping import StopStrings

__all__ = [
    "PREFILL_CHUNK",
    "FinishReason",
    "GeneratedToken",
    "Generation",
    "Sampler",
    "SamplingParams",
    "StopStrings",
    "TokenLogprob",
    "TokenSampler",
    "check_max_new_tokens",
    "distribution",
    "greedy",
    "prefill_chunks",
    "sample",
    "token_logprob",
]
