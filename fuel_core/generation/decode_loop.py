"""One generation: prompt in, one token a step out, until a stop id or a limit.

Drives `forward_decode_step` and nothing below it. Knows neither text nor plans, and allocates no cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fuel_core.errors import CacheStateError, CapacityError, GenerationError
from fuel_core.generation.sampling import Sampler, greedy
from fuel_core.persistent_decode import forward_decode_step

if TYPE_CHECKING:
    from fuel_core.backbone import DecodeBackbone
    from fuel_core.kv_cache import KvCache
    from fuel_core.persistent_decode import InferenceContext

__all__ = ["FinishReason", "GeneratedToken", "Generation", "check_max_new_tokens"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token.

    `index` counts generated tokens from 0. `finish_reason` is set on the last one: "stop" when `token_id` is a stop
    id, "length" when the token limit or the capacity of the cache is reached.
    """

    token_id: int
    index: int
    finish_reason: FinishReason | None = None


class Generation:
    """Generates tokens after `token_ids`, one a `step()`.

    n tokens cost one prefill and n - 1 decode steps: the last token is never run through the model. `cache` keeps its
    positions for the next generation; whatever it shares with the beginning of this prompt is not computed again
    (`cached_tokens`), except that the last prompt token always is, since its logits are needed. The sequence may not
    touch `cache` in between from elsewhere.

    `grow(cache)` is asked for a larger cache holding the same positions when the cache is full; None from it, or no
    `grow`, ends the generation with "length".

    Raises GenerationError for an empty prompt, ids outside the vocabulary or a limit below 1, and CapacityError for
    a prompt longer than the cache; all before anything is computed.
    """

    def __init__(
        self,
        backbone: DecodeBackbone,
        token_ids: Sequence[int],
        cache: KvCache,
        ctx: InferenceContext,
        *,
        max_new_tokens: int,
        stop_token_ids: Collection[int] = frozenset(),
        sampler: Sampler = greedy,
        grow: Callable[[KvCache], KvCache | None] | None = None,
    ) -> None:
        prompt = _checked_ids(token_ids, backbone.decode_dims().vocab)
        check_max_new_tokens(max_new_tokens)
        if len(prompt) > cache.max_seq_len:
            raise CapacityError(
                f"prompt has {len(prompt)} tokens, the KV cache has capacity {cache.max_seq_len}; "
                "shorten the prompt or raise max_seq_len"
            )
        self.backbone, self.cache, self.ctx = backbone, cache, ctx
        self.max_new_tokens = max_new_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.cached_tokens = 0
        """Prompt tokens taken over from the cache instead of computed; known after the first step."""
        self.finish_reason: FinishReason | None = None
        self._sampler = sampler
        self._grow = grow
        self._ids = prompt
        self._prompt_len = len(prompt)
        self._expected_len: int | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt (a copy)."""
        return self._ids[: self._prompt_len]

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return self._prompt_len

    @property
    def token_ids(self) -> list[int]:
        """Ids generated so far, a stop id included (a copy)."""
        return self._ids[self._prompt_len :]

    def finish(self, reason: FinishReason = "stop") -> None:
        """End the generation from outside, as a stop string in its text does."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def step(self) -> GeneratedToken | None:
        """Generate the next token; None once the generation is finished.

        Raises what `forward_decode_step` and the sampler raise (DecodeError, NonFiniteLogitsError), and
        CacheStateError when the cache was used elsewhere since the last step.
        """
        if self.finish_reason is not None:
            return None
        logits = forward_decode_step(self.backbone, self._next_input(), self.cache, self.ctx)
        self._expected_len = self.cache.cached_len
        token_id = self._sampler(logits, self._ids)
        self._ids.append(token_id)
        index = len(self._ids) - self._prompt_len - 1
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
        elif index + 1 >= self.max_new_tokens or not self._has_room():
            self.finish_reason = "length"
        return GeneratedToken(token_id, index, self.finish_reason)

    def __iter__(self) -> Iterator[GeneratedToken]:
        while (token := self.step()) is not None:
            yield token

    def _next_input(self) -> list[int]:
        """Ids of the next step; before the first, rewinds the cache to what it shares with the prompt."""
        if self._expected_len is None:
            self.cached_tokens = self._rewind()
            return self._ids[self.cached_tokens :]
        if self.cache.cached_len != self._expected_len:
            raise CacheStateError(
                f"generation: the cache held {self._expected_len} positions after the last step and holds "
                f"{self.cache.cached_len} now; give every running generation a cache of its own"
            )
        return self._ids[-1:]

    def _rewind(self) -> int:
        shared = min(self.cache.common_prefix(self._ids), self._prompt_len - 1)
        if shared < self.cache.cached_len and self.cache.has_rolling_state:
            # A state that keeps only the latest value cannot go back part of the way.
            shared = 0
        self.cache.truncate_to(shared)
        return shared

    def _has_room(self) -> bool:
        if self.cache.cached_len < self.cache.max_seq_len:
            return True
        larger = self._grow(self.cache) if self._grow is not None else None
        if larger is None:
            return False
        self.cache, self._expected_len = larger, larger.cached_len
        return True


def check_max_new_tokens(max_new_tokens: object) -> None:
    """Raise GenerationError unless `max_new_tokens` is a whole number of at least 1."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens: a whole number of at least 1 expected, found {max_new_tokens!r}")


def _checked_ids(token_ids: Sequence[int], vocab: int) -> list[int]:
    """The ids as ints; raises GenerationError for none at all and for what is no id of the vocabulary."""
    ids: list[int] = []
    for position, token_id in enumerate(token_ids):
        try:
            ids.append(operator.index(token_id))
        except TypeError:
            raise GenerationError(
                f"prompt: whole numbers expected as token ids, found {token_id!r} at position {position}"
            ) from None
        if not 0 <= ids[-1] < vocab:
            raise GenerationError(
                f"prompt: ids in 0..{vocab - 1} expected, found {token_id} at position {position}; "
                "was it encoded with another model's tokenizer?"
            )
    if not ids:
        raise GenerationError("prompt: at least one token id expected, found none")
    return ids
