"""One generation: prompt in, one token a step out, until a stop id or a limit.

Drives `forward_decode_step` and nothing below it. Knows neither text nor plans, and allocates no cache but a snapshot.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from fuel_core.errors import CacheStateError, CapacityError, GenerationError
from fuel_core.generation.sampling import (
    Sampler,
    SamplingParams,
    TokenLogprob,
    TokenSampler,
    check_finite,
    token_logprob,
)
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import check_arguments, forward_decode_step
from fuel_core.profiling import span

if TYPE_CHECKING:
    from fuel_core.backbone import DecodeBackbone
    from fuel_core.persistent_decode import InferenceContext

__all__ = ["PREFILL_CHUNK", "FinishReason", "GeneratedToken", "Generation", "check_max_new_tokens", "prefill_chunks"]

FinishReason = Literal["stop", "length"]

_T = TypeVar("_T")

PREFILL_CHUNK = 512
"""Most prompt tokens that run at once, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token.

    `index` counts generated tokens from 0. `finish_reason` is set on the last one: "stop" when `token_id` is a stop
    id, "length" when the token limit or the capacity of the cache is reached. `logprob` is there if asked for.
    """

    token_id: int
    index: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


class Generation:
    """Generates tokens after `token_ids`, one a `step()`.

    n tokens cost one prefill and n - 1 decode steps: the last token is never run through the model. `cache` keeps its
    positions for the next generation; whatever it shares with the beginning of this prompt is not computed again
    (`cached_tokens`), except that the last prompt token always is, since its logits are needed. The sequence may not
    touch `cache` in between from elsewhere.

    - `sampling`: how tokens are chosen (greedy by default); `sampler` replaces the choice itself (`Sampler`).
    - `prefill_chunk`: most prompt tokens that run at once (2 at least; one more where a single token would be left
      over, which would be a decode step). Memory for a prompt follows the chunk, results do not.
    - `on_progress(done, total)`: called with prompt tokens after each chunk; an exception from it ends the step, and
      the chunks done so far are not computed again by the next.
    - `grow(cache)`: asked for a larger cache holding the same positions when the cache is full; None from it, or no
      `grow`, ends the generation with "length".
    - `reuse_cache=False`: compute the whole prompt whatever the cache holds.
    - `forkable`: keep what `fork` needs where state cannot be rewound.

    An exception inside a step (KeyboardInterrupt included) leaves the generation usable: the next `step` finds out
    what the cache holds and computes the rest.

    Raises GenerationError for an empty prompt, ids outside the vocabulary or a limit below 1, CapacityError for a
    prompt longer than the cache, and DecodeError for arguments in the wrong places; all before anything is computed.
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
        sampling: SamplingParams | None = None,
        sampler: Sampler | None = None,
        grow: Callable[[KvCache], KvCache | None] | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        on_progress: Callable[[int, int], None] | None = None,
        reuse_cache: bool = True,
        forkable: bool = False,
    ) -> None:
        check_arguments("Generation", "(backbone, token_ids, cache, ctx)", model=backbone, cache=cache, ctx=ctx)
        vocab = backbone.decode_dims().vocab
        prompt = _checked_ids(token_ids, vocab)
        check_max_new_tokens(max_new_tokens)
        if isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int) or prefill_chunk < 1:
            raise GenerationError(
                f"prefill_chunk: a whole number of at least 1 expected, found {prefill_chunk!r}; give one"
            )
        if len(prompt) > cache.max_seq_len:
            raise CapacityError(
                f"prompt has {len(prompt)} tokens, the KV cache has capacity {cache.max_seq_len}; "
                "shorten the prompt or raise max_seq_len"
            )
        self.backbone, self.cache, self.ctx = backbone, cache, ctx
        self.max_new_tokens = max_new_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.sampling = SamplingParams() if sampling is None else sampling
        self.prefill_chunk = prefill_chunk
        self.on_progress = on_progress
        self.cached_tokens = 0
        """Prompt tokens taken over from the cache instead of computed; known after the first step."""
        self.finish_reason: FinishReason | None = None
        self._vocab = vocab
        self._prompt_len = len(prompt)
        self._token_sampler = TokenSampler(self.sampling, vocab=vocab, prompt_len=self._prompt_len)
        self._sampler: Sampler = self._token_sampler if sampler is None else sampler
        self._grow = grow
        self._ids = prompt
        self._reuse_cache = reuse_cache
        self._forkable = forkable
        # Whether the last step ended well, so that the cache holds every id but the newest.
        self._settled = False
        self._started = False
        # Logits of a finished forward, and the number of ids they follow: valid for exactly that many.
        self._logits: tuple[int, Tensor] | None = None
        self._prompt_logits: Tensor | None = None
        self._snapshot: KvCache | None = None
        # Of the first decode step. Another one rounds differently, and a seed would mean something else with it.
        self._backend: str | None = None

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

    @property
    def seed(self) -> int | None:
        """The seed in use; None where nothing is drawn."""
        return self._token_sampler.seed

    def finish(self, reason: FinishReason = "stop") -> None:
        """End the generation from outside, as a stop string in its text does."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def step(self) -> GeneratedToken | None:
        """Generate the next token; None once the generation is finished.

        Raises what `forward_decode_step` and the sampler raise (DecodeError, NonFiniteLogitsError), GenerationError for
        what a sampler returns that is no id of the vocabulary, and
        CacheStateError when the cache was used elsewhere since the last step.
        """
        if self.finish_reason is not None:
            return None
        if self._logits is None or self._logits[0] != len(self._ids):
            settled, self._settled = self._settled, False
            self._logits = (len(self._ids), self._decode() if settled else self._catch_up())
        logits = self._logits[1]
        with span("fuel.sampling"):
            token_id = self._choose(logits)
        logprob = None if self.sampling.logprobs is None else token_logprob(logits, token_id, self.sampling.logprobs)
        index = len(self._ids) - self._prompt_len
        reason: FinishReason | None = None
        if token_id in self.stop_token_ids:
            reason = "stop"
        elif index + 1 >= self.max_new_tokens or not self._has_room():
            reason = "length"
        # In this order: what interrupts between the two may cost the last token, but never passes a stop.
        self.finish_reason = reason
        self._ids.append(token_id)
        self._settled = True
        return GeneratedToken(token_id, index, reason, logprob)

    def _choose(self, logits: Tensor) -> int:
        if self._sampler is self._token_sampler:
            return self._token_sampler(logits, self._ids)
        check_finite(logits)
        # Copies: what a sampler writes into its arguments, or keeps of them, must not change the reply.
        return _checked_choice(_call("sampler", self._sampler, logits.clone(), (*self._ids,)), self._vocab)

    def __iter__(self) -> Iterator[GeneratedToken]:
        while (token := self.step()) is not None:
            yield token

    def prefill(self) -> None:
        """Compute the prompt now instead of in the first step. Raises what `step` raises."""
        if self._prompt_logits is None:
            self._logits = (self._prompt_len, self._catch_up())

    def fork(self, seed: int | None = None) -> Generation:
        """Another generation after the same prompt, which is not computed again. It takes the cache over from this one.

        `seed` replaces that of `sampling`. The result is what a generation with that seed gives alone. A model whose
        state cannot be rewound needs `forkable=True` here. Raises CacheStateError when the cache no longer holds the
        prompt.
        """
        self.prefill()
        prompt = self.prompt_ids
        if self._snapshot is not None:
            self.cache.copy_prefix_from(self._snapshot, self._prompt_len)
        elif self.cache.common_prefix(prompt) < self._prompt_len or (
            self.cache.has_rolling_state and self.cache.cached_len != self._prompt_len
        ):
            raise CacheStateError(
                f"fork: the {self._prompt_len} positions of the prompt are expected in the cache, found others; fork "
                "before it is used elsewhere, and with forkable=True where state cannot be rewound"
            )
        else:
            self.cache.truncate_to(self._prompt_len)
        other = copy.copy(self)
        other.sampling = replace(self.sampling, seed=seed)
        other._token_sampler = TokenSampler(other.sampling, vocab=self._vocab, prompt_len=self._prompt_len)
        if self._sampler is self._token_sampler:
            other._sampler = other._token_sampler
        other._ids = prompt
        other.finish_reason = None
        other.cached_tokens = self._prompt_len
        assert self._prompt_logits is not None, "prefill computed them"
        other._logits = (self._prompt_len, self._prompt_logits)
        return other

    # -- one forward -------------------------------------------------------------------------------------

    def _decode(self) -> Tensor:
        """Logits after the newest id: one decode step."""
        if self.cache.cached_len != len(self._ids) - 1:
            raise CacheStateError(
                f"generation: the cache held {len(self._ids) - 1} positions after the last step and holds "
                f"{self.cache.cached_len} now; give every running generation a cache of its own"
            )
        return self._forward(self._ids[-1:])

    def _forward(self, ids: list[int]) -> Tensor:
        """Run `ids`; a single one is a decode step and stays on the plan backend that the first one found."""
        if len(ids) > 1 and self.backbone.rope_plan.depends_on_length:
            # Rows of a chunk belong to the whole sequence, and turn by the frequencies of its length.
            return forward_decode_step(self.backbone, ids, self.cache, self.ctx, sequence_len=len(self._ids))
        if len(ids) > 1 or not self.ctx.may_compile:
            return forward_decode_step(self.backbone, ids, self.cache, self.ctx)
        if self._backend is None:
            self.ctx.refresh_backend()
        logits = forward_decode_step(self.backbone, ids, self.cache, self.ctx, keep_backend=self._backend)
        if self._backend is None:
            self._backend = self.ctx.backend_of(self.backbone.decode_shape_key(), self.cache.dtype)
        return logits

    def _catch_up(self) -> Tensor:
        """Logits after all ids: rewind the cache to what it shares with them, and run the others in chunks."""
        total = len(self._ids)
        done = self._rewind()
        if not self._started:
            # What is turned by the frequencies of another length is computed again by the first chunk.
            alike = self.cache.turned_by(self.backbone.rope_plan.regime(total))
            self.cached_tokens, self._started = done if alike else 0, True
        logits: Tensor | None = None
        for size in prefill_chunks(total - done, self.prefill_chunk):
            logits = self._forward(self._ids[done : done + size])
            done += size
            if self.on_progress is not None and total == self._prompt_len:
                _call("on_progress", self.on_progress, done, total)
        assert logits is not None, "at least the last id is run"
        if total == self._prompt_len:
            if self._forkable and self.cache.has_rolling_state:
                self._snapshot = KvCache.with_capacity(
                    self.cache.specs, max_seq_len=total, dtype=self.cache.dtype, device=self.cache.device
                )
                self._snapshot.copy_prefix_from(self.cache, total)
            self._prompt_logits = logits
        return logits

    def _rewind(self) -> int:
        """How many leading ids the cache keeps: as many as it shares, but never the last id."""
        self.backbone.weights_epoch()
        held = self.cache.reusable_prefix(self._ids, self.backbone.content_version())
        shared = min(held, len(self._ids) - 1)
        if not self._reuse_cache and not self._started:
            shared = 0
        if shared < self.cache.cached_len and self.cache.has_rolling_state:
            # A state that keeps only the latest value cannot go back part of the way.
            shared = 0
        self.cache.truncate_to(shared)
        try:
            self.cache.check_room(len(self._ids) - shared, self.backbone.decode_family())
        except CacheStateError:
            # A step that was interrupted tore the rolling state; from the beginning it is whole again.
            shared = 0
            self.cache.truncate_to(0)
        return shared

    def _has_room(self) -> bool:
        if self.cache.cached_len < self.cache.max_seq_len:
            return True
        larger = self._grow(self.cache) if self._grow is not None else None
        if larger is None:
            return False
        self.cache = larger
        return True


def prefill_chunks(n: int, chunk: int) -> list[int]:
    """`n` tokens in pieces of `chunk` (2 at least). One token left over joins the piece before it.

    A single token is a decode step: it would build or use a plan, and be counted as one, in the middle of a prompt.
    """
    chunk = max(chunk, 2)
    whole, rest = divmod(n, chunk)
    sizes = [chunk] * whole
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


def check_max_new_tokens(max_new_tokens: object) -> None:
    """Raise GenerationError unless `max_new_tokens` is a whole number of at least 1."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise GenerationError(
            f"max_new_tokens: a whole number of at least 1 expected, found {max_new_tokens!r}; give one"
        )


def _call(what: str, function: Callable[..., _T], *arguments: object) -> _T:
    """Call a function of the caller's. Its StopIteration would end whoever iterates, as if the reply were whole."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise GenerationError(f"{what}: a return expected, found StopIteration; catch it there") from error


def _checked_choice(token_id: object, vocab: int) -> int:
    """What a sampler returned, as an id. An int, or an integer tensor of one element."""
    try:
        # A truth value is the sign of a comparison that was meant to pick something.
        if isinstance(token_id, bool) or (isinstance(token_id, Tensor) and token_id.dtype == torch.bool):
            raise TypeError
        chosen = operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        raise GenerationError(f"sampler: a token id expected, found {token_id!r:.80}; return an int") from None
    if not 0 <= chosen < vocab:
        raise GenerationError(f"sampler: a token id in 0..{vocab - 1} expected, found {chosen}; return one of these")
    return chosen


def _checked_ids(token_ids: Sequence[int], vocab: int) -> list[int]:
    """The ids as ints; raises GenerationError for none at all and for what is no id of the vocabulary."""
    ids: list[int] = []
    for position, token_id in enumerate(token_ids):
        try:
            ids.append(operator.index(token_id))
        except TypeError:
            raise GenerationError(
                f"prompt: whole numbers expected as token ids, found {token_id!r} at position {position}; convert it"
            ) from None
        if not 0 <= ids[-1] < vocab:
            raise GenerationError(
                f"prompt: ids in 0..{vocab - 1} expected, found {token_id} at position {position}; "
                "was it encoded with another model's tokenizer?"
            )
    if not ids:
        raise GenerationError("prompt: at least one token id expected, found none; begin with the BOS id")
    return ids
