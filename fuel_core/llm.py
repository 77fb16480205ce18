"""load() and LanguageModel: a checkpoint on disk becomes something that continues text.

Puts the parts together: checkpoint, family, weights, tokenizer, one cache per thread. Computes nothing itself; the loop
over tokens is `generation.Generation`, and this module only carries its tokens into text.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from fuel_core.checkpoint import load_weights, open_checkpoint
from fuel_core.discovery import family_for
from fuel_core.errors import CapacityError, ConfigError, FuelError, GenerationError, TokenizerError
from fuel_core.generation import FinishReason, GeneratedToken, Generation, StopStrings, check_max_new_tokens, greedy
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import InferenceContext
from fuel_core.text import IncrementalDetokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from fuel_core.backbone import DecodeBackbone
    from fuel_core.checkpoint import Checkpoint
    from fuel_core.persistent_decode import DecodeStats

__all__ = ["Completion", "LanguageModel", "TextPiece", "TextStream", "Usage", "load"]

FIRST_CAPACITY = 512
"""Positions of a thread's first KV cache; it doubles from there."""

_NO_LIMIT = 2**62

_DTYPES = {
    "float32": torch.float32,
    "f32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "f16": torch.float16,
}


def load(
    path: str | os.PathLike[str],
    weights: str = "auto",
    dtype: str | torch.dtype = "auto",
    max_seq_len: int | None = None,
    plan: str = "auto",
    device: str | torch.device = "cpu",
    family: str | None = None,
    threads: int | None = None,
) -> LanguageModel:
    """Load a checkpoint: a Hugging Face folder, a .gguf file, or a Hub id present in the local Hub cache.

    - `weights`: format the parameters are stored in; "auto" keeps the checkpoint's.
    - `dtype`: dtype of activations and KV cache; "auto" is the dtype the weights were loaded in (the checkpoint's,
      unless `weights` names another), but float32 on a CPU where weights are compressed (16-bit products are slower
      there). "f32" and "float32" are the same word.
    - `max_seq_len`: fixes the capacity of every KV cache, in positions; None starts small and doubles up to the
      model's limit.
    - `plan`: "auto", "off", "recorded", "compiled" or "cuda_graph".
    - `family`: the family or distribution to use where several claim the checkpoint.
    - `threads`: torch's number of CPU threads; a setting of the whole process.

    Raises ConfigError or BackendUnavailableError for settings that cannot be used, CheckpointError, FamilyError,
    WeightsError or TokenizerError. A checkpoint without a tokenizer loads; it then takes token ids only.
    """
    if max_seq_len is not None and (isinstance(max_seq_len, bool) or max_seq_len < 1):
        raise ConfigError(f"max_seq_len: a whole number of at least 1 expected, found {max_seq_len!r}")
    if threads is not None:
        if isinstance(threads, bool) or threads < 1:
            raise ConfigError(f"threads: a whole number of at least 1 expected, found {threads!r}")
        torch.set_num_threads(threads)
    # Words are checked before anything large is read; the context knows which devices and plan backends exist here.
    _dtype_word(dtype)
    place = InferenceContext(device, plan=plan).device
    checkpoint = open_checkpoint(path)
    serving = family_for(checkpoint, prefer=family)
    config = serving.resolve_config(checkpoint.raw)
    with torch.device("meta"):
        backbone = serving.build(config)
    report = load_weights(backbone, checkpoint, serving, weights=weights)
    backbone.eval().requires_grad_(False)
    if place.type != "cpu":
        backbone.to(place)
    return LanguageModel(
        backbone,
        checkpoint=checkpoint,
        dtype=_activation_dtype(dtype, backbone, report.dtype, device=place),
        device=place,
        max_seq_len=max_seq_len,
        plan=plan,
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt were taken over from the thread's cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """A finished reply.

    - `text`: without special tokens and without the stop string that ended it.
    - `token_ids`: generated ids, a stop id that ended it included.
    - `finish_reason`: "stop" (stop id or stop string) or "length" (token limit, or the cache is full).
    - `usage`: token counts.
    - `stats`: what this request added to the decode counters (`LanguageModel.stats` has the sums).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: DecodeStats

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one token added to the text; `text` is "" while characters or a possible stop string are held back.

    `finish_reason` is set on the last piece, whose `text` includes everything that was held back.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None


class _Slot:
    """A cache and the context that holds its plans, for one request at a time."""

    def __init__(self, ctx: InferenceContext) -> None:
        self.ctx = ctx
        self.cache: KvCache | None = None
        self.busy = False


class TextStream(Iterator[TextPiece]):
    """A reply as it is generated: iterate for pieces. `completion` is set once the last piece is out.

    May be consumed from another thread than the one that made it. Close it (or leave its `with` block, or drop it) to
    stop early; the cache then serves the thread's next request.
    """

    def __init__(
        self, llm: LanguageModel, generation: Generation, slot: _Slot, stops: StopStrings, whole: bool
    ) -> None:
        self.completion: Completion | None = None
        self._generation, self._slot, self._stops = generation, slot, stops
        # A reply is a text of its own; a continuation keeps the space between the prompt and its first word.
        self._detokenizer = llm.detokenizer(context=() if whole else generation.prompt_ids)
        self._stats_before = slot.ctx.stats.copy()
        self._texts: list[str] = []
        self._open = True

    def __next__(self) -> TextPiece:
        if not self._open:
            raise StopIteration
        try:
            token = self._generation.step()
            assert token is not None, "a finished generation closes its stream"
            piece = self._piece(token)
        except FuelError:
            # Refused before anything moved: the cache is as good as before.
            self.close()
            raise
        except BaseException:
            # Interrupted somewhere inside a step: nothing is known about the cache, so nobody gets it again.
            self._slot.cache = None
            self.close()
            raise
        self._texts.append(piece.text)
        if piece.finish_reason is not None:
            self._complete(piece.finish_reason)
        return piece

    def _piece(self, token: GeneratedToken) -> TextPiece:
        reason = token.finish_reason
        # A stop id ends the text without being part of it, whatever the vocabulary spells it as.
        text = "" if reason == "stop" or self._detokenizer is None else self._detokenizer.push(token.token_id)
        if reason is not None and self._detokenizer is not None:
            text += self._detokenizer.flush()
        text = self._stops.push(text)
        if self._stops.matched is not None:
            reason = "stop"
            self._generation.finish("stop")
        elif reason is not None:
            text += self._stops.flush()
        return TextPiece(text, token.token_id, reason)

    def _complete(self, reason: FinishReason) -> None:
        ids = self._generation.token_ids
        self.completion = Completion(
            text="".join(self._texts),
            token_ids=ids,
            finish_reason=reason,
            usage=Usage(self._generation.prompt_len, len(ids), self._generation.cached_tokens),
            stats=_difference(self._slot.ctx.stats, self._stats_before),
        )
        self.close()

    def close(self) -> None:
        """End the reply here and give the cache back. Idempotent."""
        if self._open:
            self._open = False
            self._slot.busy = False

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class LanguageModel:
    """A loaded model with its tokenizer. Safe to use from several threads: each has its own cache and context.

    `backbone`, `config` (its frozen resolved spec), `checkpoint`, `dtype` and `device` (of activations and caches).
    """

    def __init__(
        self,
        backbone: DecodeBackbone,
        *,
        checkpoint: Checkpoint | None = None,
        tokenizer: Tokenizer | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_seq_len: int | None = None,
        plan: str = "auto",
    ) -> None:
        self.backbone = backbone
        self.config: Any = backbone.config
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = torch.device(device)
        self.plan = plan
        self.max_seq_len = max_seq_len
        self._tokenizer = tokenizer
        self._tokenizer_error: str | None = None
        self._stop_ids: frozenset[int] = frozenset()
        if tokenizer is not None:
            self._stop_ids = tokenizer.stop_token_ids
        elif checkpoint is not None:
            source = checkpoint.tokenizer_files()
            if source.tokenizer_json is None and source.gguf is None:
                self._tokenizer_error = f"{source.origin}: no tokenizer.json found; pass token ids, or add the file"
                self._stop_ids = source.published_stop_ids
            else:
                self._tokenizer = load_tokenizer(source)
                self._stop_ids = self._tokenizer.stop_token_ids
        self._threads = threading.local()

    def __repr__(self) -> str:
        where = f", {str(self.checkpoint.path)!r}" if self.checkpoint is not None else ""
        return f"LanguageModel({self.backbone.decode_family()}{where}, dtype={self.dtype}, device={self.device})"

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises TokenizerError where it has none."""
        if self._tokenizer is None:
            raise TokenizerError(self._tokenizer_error or "this model was made without a tokenizer; pass token ids")
        return self._tokenizer

    @property
    def position_limit(self) -> int | None:
        """Most positions a cache may have: `max_seq_len` where it was given, else the model's limit."""
        if self.max_seq_len is not None:
            return self.max_seq_len
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit is not None else None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a reply."""
        return self._stop_ids

    @property
    def stats(self) -> DecodeStats:
        """Decode counters of the calling thread's context, live."""
        return self.context.stats

    @property
    def context(self) -> InferenceContext:
        """The inference context of the calling thread: counters, plan events, held sessions."""
        return self._thread_slot().ctx

    def detokenizer(self, *, context: Sequence[int] = ()) -> IncrementalDetokenizer | None:
        """A detokenizer for text that follows the ids of `context`; None for a model without a tokenizer."""
        return None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer, context=context)

    # -- text ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        max_new_tokens: int | None = 256,
        temperature: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Continue `prompt`, a text or token ids, as it stands (no chat template).

        - `max_new_tokens`: most tokens to generate; None goes on until a stop or the position limit.
        - `temperature`: 0 is greedy, and all this release offers.
        - `stop`: strings that end the text; none of a stop string is returned.
        - `seed`: no effect on greedy decoding.

        Raises CapacityError for a prompt longer than the limit, GenerationError for parameters that cannot be used
        and for an empty prompt where the model has no BOS, NonFiniteLogitsError, TokenizerError, DecodeError.
        """
        return _drain(self.stream(prompt, max_new_tokens, temperature, stop, seed))

    def stream(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        max_new_tokens: int | None = 256,
        temperature: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> TextStream:
        """As `generate`, piece by piece. Parameters are checked here, computing starts with the first piece."""
        return self._start(self._prompt_ids(prompt), max_new_tokens, temperature, stop, seed, whole=False)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = 512,
        temperature: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        **template_kwargs: Any,
    ) -> Completion:
        """The assistant's reply to a conversation, or to one text of the user.

        `messages` are mappings with `role` and `content`; `template_kwargs` reach the chat template. Everything else
        as in `generate`. Raises ChatTemplateError without a usable template, or when it refuses the messages.
        """
        return _drain(self.stream_chat(messages, max_new_tokens, temperature, stop, seed, **template_kwargs))

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = 512,
        temperature: float = 0.0,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        **template_kwargs: Any,
    ) -> TextStream:
        """As `chat`, piece by piece."""
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        ids = self.tokenizer.encode_chat(conversation, **template_kwargs)
        return self._start(ids, max_new_tokens, temperature, stop, seed, whole=True)

    # -- one request -----------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: str | Sequence[int] | torch.Tensor) -> list[int]:
        if isinstance(prompt, torch.Tensor):
            if prompt.dim() != 1:
                raise GenerationError(f"prompt: ids of shape [tokens] expected, found {list(prompt.shape)}")
            return list(prompt.tolist())
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
                raise GenerationError(f"prompt: a text or a list of token ids expected, found {type(prompt).__name__}")
            return [*prompt]
        ids = self.tokenizer.encode(prompt)
        if ids:
            return ids
        if self.tokenizer.bos_token_id is None:
            raise GenerationError("prompt: a text of at least one token expected, found none, and the model has no BOS")
        return [self.tokenizer.bos_token_id]

    def _start(
        self,
        ids: list[int],
        max_new_tokens: int | None,
        temperature: float,
        stop: str | Sequence[str] | None,
        seed: int | None,
        *,
        whole: bool,
    ) -> TextStream:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature != 0:
            raise GenerationError(
                f"temperature: 0 expected, found {temperature!r}; this release decodes greedily only, leave it out"
            )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise GenerationError(f"seed: a whole number expected, found {seed!r}")
        stops = StopStrings(stop or ())
        if self._tokenizer is None and stop:
            raise GenerationError("stop: a tokenizer is needed to find stop strings; this model has none")
        limit = self.position_limit
        if limit is not None and len(ids) > limit:
            raise CapacityError(
                f"prompt has {len(ids)} tokens, the limit is {limit} positions; shorten the prompt"
                + (" or raise max_seq_len" if self.max_seq_len is not None else "")
            )
        if max_new_tokens is not None:
            check_max_new_tokens(max_new_tokens)
        slot = self._take_slot()
        try:
            generation = Generation(
                self.backbone,
                ids,
                self._prepare_cache(slot, ids, len(ids) + (max_new_tokens or 1) - 1),
                slot.ctx,
                max_new_tokens=_NO_LIMIT if max_new_tokens is None else max_new_tokens,
                stop_token_ids=self._stop_ids,
                sampler=greedy,
                grow=lambda cache: self._grow(slot, cache),
            )
            return TextStream(self, generation, slot, stops, whole)
        except BaseException:
            slot.busy = False
            raise

    def _thread_slot(self) -> _Slot:
        slot: _Slot | None = getattr(self._threads, "slot", None)
        if slot is None:
            slot = self._threads.slot = self._new_slot()
        return slot

    def _new_slot(self) -> _Slot:
        return _Slot(InferenceContext(self.device, plan=self.plan))

    def _take_slot(self) -> _Slot:
        """The thread's slot, or one for this request only while another reply of the thread is still open."""
        slot = self._thread_slot()
        if slot.busy:
            slot = self._new_slot()
        slot.busy = True
        return slot

    def _prepare_cache(self, slot: _Slot, ids: Sequence[int], need: int) -> KvCache:
        """The slot's cache with room for `need` positions, replaced by a larger one where it is too small."""
        capacity = self._capacity(FIRST_CAPACITY, need)
        if slot.cache is None or slot.cache.max_seq_len < capacity:
            shared = 0 if slot.cache is None else slot.cache.common_prefix(ids)
            slot.cache = self._larger_cache(capacity, slot.cache, shared)
        return slot.cache

    def _capacity(self, start: int, need: int) -> int:
        """Smallest doubling of `start` that holds `need` positions, at most the limit."""
        limit = self.position_limit
        if self.max_seq_len is not None:
            return self.max_seq_len
        while start < need:
            start *= 2
        return start if limit is None else min(start, limit)

    def _larger_cache(self, capacity: int, old: KvCache | None, n: int) -> KvCache:
        """A cache of `capacity` positions that takes over the first `n` of `old`."""
        cache = KvCache.with_capacity(
            self.backbone.layer_state_specs(), max_seq_len=capacity, dtype=self.dtype, device=self.device
        )
        if old is not None and n > 0 and (n == old.cached_len or not old.has_rolling_state):
            cache.copy_prefix_from(old, n)
        return cache

    def _grow(self, slot: _Slot, cache: KvCache) -> KvCache | None:
        capacity = self._capacity(cache.max_seq_len, cache.max_seq_len + 1)
        if capacity <= cache.max_seq_len:
            return None
        slot.cache = self._larger_cache(capacity, cache, cache.cached_len)
        return slot.cache


def _difference(now: DecodeStats, before: DecodeStats) -> DecodeStats:
    """Counters added between two readings of one context."""
    changes: dict[str, Any] = {}
    for field in fields(now):
        new, old = getattr(now, field.name), getattr(before, field.name)
        if isinstance(new, dict):
            changes[field.name] = {key: n - old.get(key, 0) for key, n in new.items() if n != old.get(key, 0)}
        elif isinstance(new, int | float):
            changes[field.name] = new - old
    return replace(now, **changes)


def _drain(stream: TextStream) -> Completion:
    with stream:
        for _ in stream:
            pass
    assert stream.completion is not None, "a drained stream is complete"
    return stream.completion


def _dtype_word(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype a word names, None for "auto"; raises ConfigError for any other word."""
    if dtype == "auto":
        return None
    found = _DTYPES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ConfigError(f"dtype: auto, {', '.join(_DTYPES)} expected, found {dtype!r}")
    return found


def _activation_dtype(
    dtype: str | torch.dtype, backbone: DecodeBackbone, loaded: str, *, device: torch.device
) -> torch.dtype:
    """The dtype that is named; for "auto" the one the weights were `loaded` in, unless they are compressed."""
    named = _dtype_word(dtype)
    if named is not None:
        return named
    if any(getattr(module, "packed_format", None) is not None for module in backbone.modules()):
        # What packed weights hold has no dtype of its own; the config still says what the model was trained in.
        return torch.float32 if device.type == "cpu" else _DTYPES[getattr(backbone.config, "dtype", None) or "float32"]
    return _DTYPES[loaded]
