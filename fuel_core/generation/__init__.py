"""The loop from prompt to finish reason: Generation, how a token is chosen, when to stop.

Sees token ids and logits, and text only where a stop string has to be matched. Owns no cache and no plan.
"""

from __future__ import annotations

from fuel_core.generation.decode_loop import FinishReason, GeneratedToken, Generation, check_max_new_tokens
from fuel_core.generation.sampling import Sampler, greedy
from fuel_core.generation.stopping import StopStrings

__all__ = ["FinishReason", "GeneratedToken", "Generation", "Sampler", "StopStrings", "check_max_new_tokens", "greedy"]
