"""From logits to a token id. A sampler sees one row of logits and the ids so far; it never sees the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fuel_core.errors import NonFiniteLogitsError

__all__ = ["Sampler", "check_finite", "greedy"]


class Sampler(Protocol):
    """Chooses the next token.

    `logits`: float32 [vocab], owned by the caller of the sampler, not to be written. `token_ids`: prompt and generated
    ids so far, oldest first. Returns an id in 0..vocab-1. Raises NonFiniteLogitsError for logits that contain NaN or
    infinities.
    """

    def __call__(self, logits: Tensor, token_ids: Sequence[int]) -> int: ...


def check_finite(logits: Tensor) -> None:
    """Raise NonFiniteLogitsError when any of `logits` [vocab] is NaN or infinite.

    A softmax or an argmax over such a row still returns some token, for ever the same one; nothing downstream shows it.
    """
    # One pass over the row, and NaN reaches both ends.
    low, high = torch.aminmax(logits)
    if not bool(torch.isfinite(high - low)):
        bad = int((~torch.isfinite(logits)).sum())
        if bad:
            raise NonFiniteLogitsError(
                f"finite logits expected, found {bad} of {logits.numel()} NaN or infinite; "
                "check the weights, or try dtype='float32'"
            )


def greedy(logits: Tensor, token_ids: Sequence[int]) -> int:
    """The id with the highest logit, the lowest id on ties. Uses no random numbers."""
    check_finite(logits)
    # torch.argmax documents the first of several maxima.
    return int(torch.argmax(logits))
