"""load() and LanguageModel: a checkpoint on disk becomes something that continues text.

Puts the parts together: checkpoint, family, weights, tokenizer, one cache per thread. Computes nothing itself; the loop
over tokens is `generation.Generation`, and this module only carries its tokens into text.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, overload

import torch

from fuel_core import native
from fuel_core.checkpoint import LoadReport, load_weights, open_checkpoint
from fuel_core.checkpoint.weights import check_layer_count
from fuel_core.discovery import family_for
from fuel_core.errors import (
    BackendUnavailableError,
    CapacityError,
    ChatTemplateError,
    ConfigError,
    GenerationError,
    TokenizerError,
)
from fuel_core.families import Family
from fuel_core.generation import (
    PREFILL_CHUNK,
    FinishReason,
    GeneratedToken,
    Generation,
    Sampler,
    SamplingParams,
    StopStrings,
    TokenLogprob,
    check_max_new_tokens,
)
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import COMPILE_AFTER, InferenceContext, compile_step
from fuel_core.text import IncrementalDetokenizer, Tokenizer, load_tokenizer
from fuel_core.text.chat_template import check_messages

if TYPE_CHECKING:
    from fuel_core.backbone import DecodeBackbone
    from fuel_core.checkpoint import Checkpoint, TokenizerSource
    from fuel_core.persistent_decode import DecodeStats
    from fuel_core.plan_backends import BuiltCode

__all__ = [
    "AsyncTextStream",
    "Completion",
    "LanguageModel",
    "Prompt",
    "RequestOptions",
    "TextPiece",
    "TextStream",
    "Usage",
    "load",
]

Prompt = str | Sequence[int] | torch.Tensor
"""A text, or token ids."""

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, or one text of the user."""

FIRST_CAPACITY = 512
"""Positions of a thread's first KV cache; it doubles from there."""

_NO_LIMIT = 2**62

_IDLE_SLOTS = 4
"""Caches kept for requests that have no thread of their own (see `LanguageModel`)."""

_T = TypeVar("_T")

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
    family: str | Family | None = None,
    threads: int | None = None,
    prefill_chunk: int | None = None,
) -> LanguageModel:
    """Load a checkpoint: a Hugging Face folder, a .gguf file, or a Hub id present in the local Hub cache.

    - `weights`: format the parameters are stored in: "f32", "bf16", "f16", "int8", "int4"; "auto" keeps the
      checkpoint's, for a GGUF file each tensor at its own width (docs/weights.md).
    - `dtype`: dtype of activations and KV cache; "auto" is the dtype the weights were loaded in (the checkpoint's,
      unless `weights` names another), but float32 on a CPU where weights are compressed (16-bit products are slower
      there). "f32" and "float32" are the same word.
    - `max_seq_len`: fixes the capacity of every KV cache, in positions; None starts small and doubles up to the
      model's limit.
    - `plan`: "auto", "off", "recorded", "compiled" or "cuda_graph".
    - `family`: the family or distribution to use where several claim the checkpoint; or a Family itself, which need
      not be installed.
    - `threads`: torch's number of CPU threads; a setting of the whole process.
    - `prefill_chunk`: how many prompt tokens run at once (None: 512). Memory follows it; results do not.

    Raises ConfigError or BackendUnavailableError for settings that cannot be used, CheckpointError, FamilyError,
    WeightsError or TokenizerError. A checkpoint without a tokenizer loads; it then takes token ids only.
    """
    _at_least_one("max_seq_len", max_seq_len)
    _at_least_one("threads", threads)
    _at_least_one("prefill_chunk", prefill_chunk)
    if family is not None and not isinstance(family, str | Family):
        raise ConfigError(
            f"family: the name of a family or distribution, or a Family, expected, found {family!r:.80}; see "
            "`fuel families`"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    # Words are checked before anything large is read; the context knows which devices and plan backends exist here.
    _dtype_word(dtype)
    place = InferenceContext(device if isinstance(device, str) else _device(device), plan=plan).device
    if place.type == "meta":
        raise ConfigError("device: one that computes expected, found 'meta', which has no memory; use device='cpu'")
    checkpoint = open_checkpoint(path)
    if place.type == "cpu":
        native.prepare()
    serving = family_for(checkpoint, prefer=family)
    config = serving.resolve_config(checkpoint.raw)
    check_layer_count(config, checkpoint, serving)
    with torch.device("meta"):
        backbone = serving.build(config)
    report = load_weights(backbone, checkpoint, serving, weights=weights, device=place.type)
    backbone.eval().requires_grad_(False)
    if place.type != "cpu":
        backbone.to(place)
    model = LanguageModel(
        backbone,
        checkpoint=checkpoint,
        dtype=activation_dtype(dtype, backbone, report.dtype, device=place),
        device=place,
        max_seq_len=max_seq_len,
        plan=plan,
        prefill_chunk=prefill_chunk,
    )
    model.load_report = report
    return model


class RequestOptions(TypedDict, total=False):
    """The keywords that every request takes besides its prompt and `max_new_tokens`.

    The sampling ones are the fields of `SamplingParams`, which says what each does; None (or absent) stands for the
    default of the call: greedy decoding for `generate` and `stream`, the checkpoint's published sampling for `chat` and
    `stream_chat`.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    logprobs: int | None
    sampling: SamplingParams | None
    """Stands in for the call's defaults; single keywords still win over it."""
    stop: str | Sequence[str] | None
    """Strings that end the text; none of a stop string is returned."""
    sampler: Sampler | None
    """Chooses each token, `(logits, token_ids) -> id`, in the place of all sampling keywords but `logprobs`."""
    ignore_eos: bool
    """Go on past the ids that end a reply; stop strings and limits still end it."""
    on_progress: Callable[[int, int], None] | None
    """Called as (done, total) prompt tokens while a prompt is computed."""


_OPTIONS = frozenset(RequestOptions.__annotations__)
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


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
    - `seed`: the seed that gives this reply again; None where nothing was drawn.
    - `logprobs`: one `TokenLogprob` a token of `token_ids`, None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: DecodeStats
    seed: int | None = None
    logprobs: list[TokenLogprob] | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one token added to the text; `text` is "" while characters or a possible stop string are held back.

    `finish_reason` is set on the last piece, whose `text` includes everything that was held back. `logprob` is the
    token's, if asked for.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


class _Lease:
    """The right to use a slot. Held by one reply; when the last reference to it is gone, the slot is free."""

    __slots__ = ("__weakref__", "slot")

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot
        slot.lease = weakref.ref(self)

    def end(self) -> None:
        if self.slot.lease is not None and self.slot.lease() is self:
            self.slot.lease = None


class _Slot:
    """A cache and the context that holds its plans, for one request at a time."""

    def __init__(self, ctx: InferenceContext) -> None:
        self.ctx = ctx
        self.cache: KvCache | None = None
        # Weak, so that a reply that was dropped, or never came to be because of an interrupt, frees the slot.
        self.lease: weakref.ref[_Lease] | None = None

    @property
    def busy(self) -> bool:
        return self.lease is not None and self.lease() is not None


@dataclass(frozen=True)
class _Request:
    """The checked keywords of one request."""

    max_new_tokens: int | None
    sampling: SamplingParams
    stop: str | Sequence[str]
    ignore_eos: bool
    on_progress: Callable[[int, int], None] | None
    sampler: Sampler | None
    whole: bool
    """Whether the reply is a text of its own (chat) rather than the continuation of one."""


class TextStream(Iterator[TextPiece]):
    """A reply as it is generated: iterate for pieces. `completion` is set once the last piece is out.

    May be consumed from another thread than the one that made it. Close it (or leave its `with` block, or drop it) to
    stop early; the cache then serves the thread's next request. An exception inside a step, KeyboardInterrupt
    included, closes it too, and leaves the cache to the next request as far as it was filled.
    """

    def __init__(
        self, llm: LanguageModel, generation: Generation, lease: _Lease, request: _Request, *, keeps_lease: bool = False
    ) -> None:
        self.completion: Completion | None = None
        self._llm, self._generation, self._request, self._keeps_lease = llm, generation, request, keeps_lease
        self._lease: _Lease | None = lease
        self._stops = StopStrings(request.stop)
        # A reply is a text of its own; a continuation keeps the space between the prompt and its first word.
        self._detokenizer = llm.detokenizer(context=() if request.whole else generation.prompt_ids)
        self._stats_before = lease.slot.ctx.stats.copy()
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def __next__(self) -> TextPiece:
        if self._lease is None:
            raise StopIteration
        try:
            self._llm._check_open()
            token = self._generation.step()
            assert token is not None, "a finished generation closes its stream"
            piece = self._piece(token)
            self._texts.append(piece.text)
            if piece.logprob is not None:
                self._logprobs.append(piece.logprob)
            if piece.finish_reason is not None:
                self._complete(piece.finish_reason)
        except BaseException:
            # Whatever happened: a step that did not end left the cache as long as it was, and the next generation
            # looks at what it holds before it uses it.
            self.close()
            raise
        return piece

    @property
    def usage(self) -> Usage:
        """Token counts so far; `cached_tokens` is known once the first piece is out."""
        generation = self._generation
        return Usage(generation.prompt_len, len(generation.token_ids), generation.cached_tokens)

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
        return TextPiece(text, token.token_id, reason, self._llm._with_text(token.logprob))

    def _complete(self, reason: FinishReason) -> None:
        assert self._lease is not None, "only an open stream completes"
        ids = self._generation.token_ids
        self.completion = Completion(
            text="".join(self._texts),
            token_ids=ids,
            finish_reason=reason,
            usage=self.usage,
            stats=_difference(self._lease.slot.ctx.stats, self._stats_before),
            seed=self._generation.seed,
            logprobs=None if self._request.sampling.logprobs is None else list(self._logprobs),
        )
        if not self._keeps_lease:
            self.close()

    def _fork(self, seed: int | None) -> TextStream:
        """Another reply to the same prompt in the same slot."""
        assert self._lease is not None, "forked while its lease lasts"
        generation = self._generation.fork(seed)
        return TextStream(self._llm, generation, self._lease, self._request, keeps_lease=True)

    def close(self) -> None:
        """End the reply here and give the cache back. Idempotent."""
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """Calls functions in a worker thread, one at a time, and can be told that nobody waits any more."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self.running = False
        self._at_end: Callable[[], None] | None = None

    async def call(self, function: Callable[[], _T]) -> _T:
        """The result of `function`, run in the event loop's thread pool.

        When the waiting task is cancelled, `cancelled` is set for the function to look at, and the cancellation goes
        on at once; the thread finishes what it is in the middle of.
        """
        self.running = True

        def run() -> _T:
            try:
                self.check()
                return function()
            finally:
                with self._lock:
                    self.running = False
                    at_end, self._at_end = self._at_end, None
                if at_end is not None:
                    at_end()

        future = asyncio.get_running_loop().run_in_executor(None, run)
        try:
            # Shielded: a call taken back before a thread had picked it up would never reach its end.
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.cancelled.set()
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    def check(self) -> None:
        """Raise GenerationError once nobody waits any more."""
        if self.cancelled.is_set():
            raise GenerationError("a reply that somebody waits for expected, found a cancelled one; ask again")

    def finally_do(self, function: Callable[[], None]) -> None:
        """Run `function` now, or in the thread as soon as it has finished what it is in the middle of."""
        with self._lock:
            if self.running:
                self._at_end = function
                return
        function()

    def progress(self, on_progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """`on_progress`, which ends a prefill between two chunks once nobody waits for it."""

        def report(done: int, total: int) -> None:
            self.check()
            if on_progress is not None:
                on_progress(done, total)

        return report


class AsyncTextStream(AsyncIterator[TextPiece]):
    """A reply as it is generated, for `async for`. Each step runs in a worker thread: the event loop never waits.

    `completion` is set once the last piece is out. Cancelling the task that waits for a piece ends the reply, within
    one step or one chunk of the prompt; so do `aclose()` and leaving its `async with` block. Parameters are checked
    when the first piece is asked for; `on_progress` is called in the worker thread.
    """

    def __init__(self, start: Callable[[_Worker], TextStream]) -> None:
        self.completion: Completion | None = None
        self._start = start
        self._stream: TextStream | None = None
        self._worker = _Worker()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextPiece:
        if self._closed:
            raise StopAsyncIteration
        if self._worker.running:
            raise GenerationError("one task at a time may wait for a reply, found a second; open a stream for each")
        try:
            piece = await self._worker.call(self._next)
        except BaseException:
            self._close()
            raise
        if piece is None:
            raise StopAsyncIteration
        if self._stream is not None:
            self.completion = self._stream.completion
        return piece

    def _next(self) -> TextPiece | None:
        if self._stream is None:
            self._stream = self._start(self._worker)
        return next(self._stream, None)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.cancelled.set()
            self._worker.finally_do(self._end)

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()

    async def aclose(self) -> None:
        """End the reply here and give the cache back. Idempotent."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


class LanguageModel:
    """A loaded model with its tokenizer. Safe to use from several threads: each has its own cache and context.

    `config` is the backbone's frozen resolved spec; `dtype` and `device` are those of activations and caches;
    `prefill_chunk` is how many prompt tokens run at once. Requests without a thread of their own (the async ones, and a
    second reply while a thread's first is still open) share a few caches more. `close()`, or the end of a `with` block,
    lets go of caches, plans and weights. `load_report` is what `load` found out about formats; None without it.
    """

    def __init__(
        self,
        backbone: DecodeBackbone,
        *,
        checkpoint: Checkpoint | None = None,
        tokenizer: Tokenizer | None = None,
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_seq_len: int | None = None,
        plan: str = "auto",
        prefill_chunk: int | None = None,
    ) -> None:
        named = _dtype_word(dtype)
        if named is None:
            raise ConfigError(f"dtype: {', '.join(_DTYPES)} expected, found {dtype!r}; load() resolves 'auto'")
        _at_least_one("max_seq_len", max_seq_len)
        _at_least_one("prefill_chunk", prefill_chunk)
        self._backbone: DecodeBackbone | None = backbone
        self.checkpoint = checkpoint
        self.dtype = named
        # The context knows which devices and plan backends exist here; a request would only find out later.
        self.device = InferenceContext(_device(device), plan=plan).device
        self.plan = plan
        self.max_seq_len = max_seq_len
        self.prefill_chunk = PREFILL_CHUNK if prefill_chunk is None else prefill_chunk
        self.load_report: LoadReport | None = None
        self.compile_after = COMPILE_AFTER
        """Under plan "auto": decode steps before native code is made in the background, 0 for at once. Read when a
        thread makes its first request."""
        self._tokenizer = tokenizer
        self._tokenizer_error: str | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._generation_config: Mapping[str, Any] = {}
        if tokenizer is not None:
            self._stop_ids, self._generation_config = tokenizer.stop_token_ids, tokenizer.generation_config
        elif checkpoint is not None:
            source = checkpoint.tokenizer_files()
            self._generation_config = source.generation_config
            if source.tokenizer_json is None and source.gguf is None:
                self._tokenizer_error = _no_tokenizer(source)
                self._stop_ids = source.published_stop_ids
            else:
                self._tokenizer = load_tokenizer(source)
                self._stop_ids = self._tokenizer.stop_token_ids
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._slots: weakref.WeakSet[_Slot] = weakref.WeakSet()
        self._shared_slots: list[_Slot] = []

    def __repr__(self) -> str:
        if self._backbone is None:
            return "LanguageModel(closed)"
        where = f", {str(self.checkpoint.path)!r}" if self.checkpoint is not None else ""
        return f"LanguageModel({self.backbone.decode_family()}{where}, dtype={self.dtype}, device={self.device})"

    # -- facts -------------------------------------------------------------------------------------------

    def compile(self) -> list[BuiltCode]:
        """Make the native code that `plan="auto"` and "compiled" use for this model, and wait for it.

        Says for each distinct layer what became of it; what was refused before is tried again. Code on disk is not made
        twice. Raises GenerationError on a closed model and BackendUnavailableError on another device than a CPU.
        """
        if self.device.type != "cpu":
            raise BackendUnavailableError(f"compile: device cpu expected, found {self.device}; load with device='cpu'")
        return compile_step(self.backbone, self.dtype, again=True)

    @property
    def backbone(self) -> DecodeBackbone:
        """The model itself. Raises GenerationError once this object is closed."""
        self._check_open()
        assert self._backbone is not None, "open"
        return self._backbone

    @property
    def config(self) -> Any:
        """The model's frozen resolved spec, as it is now. Raises GenerationError once this object is closed."""
        return self.backbone.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises TokenizerError where it has none."""
        if self._tokenizer is None:
            raise TokenizerError(
                self._tokenizer_error or "tokenizer: expected one, found a model made without it; pass token ids"
            )
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
    def published_sampling(self) -> SamplingParams:
        """The sampling the checkpoint publishes, which `chat` follows unless told otherwise.

        From `generation_config.json`, or the same keys inside `config.json` where that file is absent: temperature
        (1 where only other keys are published), top_k, top_p, min_p, repetition_penalty. `do_sample: false`, or none of
        these, is greedy. Raises GenerationError for a published value that cannot be used.
        """
        published = self._generation_config
        given = {
            name: published[name]
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if published.get(name) is not None
        }
        draws = published.get("do_sample")
        if draws is None:
            draws = bool(given.keys() - {"repetition_penalty"})
        given["temperature"] = given.get("temperature", 1.0) if draws else 0.0
        try:
            return SamplingParams(**given)
        except GenerationError as error:
            raise GenerationError(
                f"published generation config: {error}; correct the file, or pass sampling="
            ) from None

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

    # -- its end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of every cache, plan and weight. Open replies end with their next step. Idempotent.

        Any request afterwards raises GenerationError.
        """
        self._backbone = None
        for slot in list(self._slots):
            slot.cache = None
            slot.ctx.drop_sessions()
        if self.checkpoint is not None:
            self.checkpoint.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._backbone is None:
            raise GenerationError("an open LanguageModel expected, found one that was closed; load it again")

    # -- requests ----------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 256,
        *,
        n: None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Prompt, max_new_tokens: int | None = 256, *, n: int, **options: Unpack[RequestOptions]
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 256,
        *,
        n: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Continue `prompt`, a text or token ids, as it stands (no chat template).

        - `max_new_tokens`: most tokens to generate; None goes on until a stop or the position limit.
        - `n`: that many completions, as a list. The prompt is computed once. Where a seed is drawn from or given, the
          i-th (from 0) is what a single request with seed + i gives.
        - `temperature` (0, greedy, by default), `top_k`, `top_p`, `min_p`, `repetition_penalty`, `frequency_penalty`,
          `presence_penalty`, `logit_bias`, `seed`, `logprobs`, or `sampling`, a SamplingParams that holds them: see
          `SamplingParams`.
        - `sampler`: a function of one's own from logits and ids to the next id, in the place of all of these but
          `logprobs`: see `Sampler`. With `n` it chooses for every completion, one after the other.
        - `stop`: strings that end the text; none of a stop string is returned. `ignore_eos`: go on past ids that end
          a reply.
        - `on_progress(done, total)`: called with prompt tokens while a prompt is computed.

        Raises CapacityError for a prompt longer than the limit, GenerationError for parameters that cannot be used
        and for an empty prompt where the model has no BOS, NonFiniteLogitsError, TokenizerError, DecodeError.
        """
        self._check_options("generate", options)
        request = self._request(max_new_tokens, options, whole=False)
        return self._finish(self._prompt_ids(prompt), request, n)

    def stream(self, prompt: Prompt, max_new_tokens: int | None = 256, **options: Unpack[RequestOptions]) -> TextStream:
        """As `generate`, piece by piece. Parameters are checked here, computing starts with the first piece."""
        self._check_options("stream", options)
        return self._start(self._prompt_ids(prompt), self._request(max_new_tokens, options, whole=False))

    @overload
    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        n: None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        n: int,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...
    def chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        n: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """The assistant's reply to a conversation, or to one text of the user.

        `messages` are mappings with `role` and `content`; `template_kwargs` reach the chat template (`tools`,
        `enable_thinking`, ...). Sampling is what the checkpoint publishes (`published_sampling`) except for the
        keywords given here; everything else is as in `generate`. Raises ChatTemplateError without a usable template,
        or when it refuses the messages.
        """
        self._check_options("chat", options)
        request = self._request(max_new_tokens, options, whole=True)
        return self._finish(self._chat_ids(messages, template_kwargs), request, n)

    def stream_chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> TextStream:
        """As `chat`, piece by piece."""
        self._check_options("stream_chat", options)
        request = self._request(max_new_tokens, options, whole=True)
        return self._start(self._chat_ids(messages, template_kwargs), request)

    def stream_reply(
        self, prompt_ids: Sequence[int], max_new_tokens: int | None = 512, **options: Unpack[RequestOptions]
    ) -> TextStream:
        """As `stream_chat`, for a conversation that is ids already (`tokenizer.encode_chat` makes them)."""
        self._check_options("stream_reply", options)
        return self._start([*prompt_ids], self._request(max_new_tokens, options, whole=True))

    # -- requests of an event loop -------------------------------------------------------------------------

    @overload
    async def agenerate(
        self, prompt: Prompt, max_new_tokens: int | None = 256, *, n: None = None, **options: Unpack[RequestOptions]
    ) -> Completion: ...
    @overload
    async def agenerate(
        self, prompt: Prompt, max_new_tokens: int | None = 256, *, n: int, **options: Unpack[RequestOptions]
    ) -> list[Completion]: ...
    async def agenerate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 256,
        *,
        n: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """As `generate`, in a worker thread. Cancelling the task ends the work within one step or chunk."""
        self._check_options("agenerate", options)
        worker = _Worker()
        return await worker.call(
            lambda: self._finish(
                self._prompt_ids(prompt), self._request(max_new_tokens, options, whole=False), n, worker
            )
        )

    def astream(
        self, prompt: Prompt, max_new_tokens: int | None = 256, **options: Unpack[RequestOptions]
    ) -> AsyncTextStream:
        """As `stream`, for `async for`; the event loop never waits for a step."""
        self._check_options("astream", options)
        return AsyncTextStream(
            lambda worker: self._start(
                self._prompt_ids(prompt), self._request(max_new_tokens, options, whole=False), worker
            )
        )

    @overload
    async def achat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        n: None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...
    @overload
    async def achat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        n: int,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...
    async def achat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        n: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """As `chat`, in a worker thread. Cancelling the task ends the work within one step or chunk."""
        self._check_options("achat", options)
        worker = _Worker()
        return await worker.call(
            lambda: self._finish(
                self._chat_ids(messages, template_kwargs),
                self._request(max_new_tokens, options, whole=True),
                n,
                worker,
            )
        )

    def astream_chat(
        self,
        messages: Messages,
        max_new_tokens: int | None = 512,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """As `stream_chat`, for `async for`; the event loop never waits for a step."""
        self._check_options("astream_chat", options)
        return AsyncTextStream(
            lambda worker: self._start(
                self._chat_ids(messages, template_kwargs),
                self._request(max_new_tokens, options, whole=True),
                worker,
            )
        )

    # -- one request -----------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, torch.Tensor):
            if prompt.dim() != 1:
                raise GenerationError(
                    f"prompt: ids of shape [tokens] expected, found {list(prompt.shape)}; pass one row"
                )
            return list(prompt.tolist())
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
                raise GenerationError(
                    f"prompt: a text or a list of token ids expected, found {type(prompt).__name__}; pass one"
                )
            return [*prompt]
        ids = self.tokenizer.encode(prompt)
        if ids:
            return ids
        if self.tokenizer.bos_token_id is None:
            raise GenerationError(
                "prompt: a text of at least one token expected, found none, and the model has no BOS; give it a text"
            )
        return [self.tokenizer.bos_token_id]

    def _chat_ids(self, messages: Messages, template_kwargs: Mapping[str, Any] | None) -> list[int]:
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        extra = {} if template_kwargs is None else template_kwargs
        if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
            raise ChatTemplateError(
                f"template_kwargs: a mapping from names to values expected, found {extra!r:.80}; pass a dict"
            )
        reserved = sorted({"messages", "self"}.intersection(extra))
        if reserved:
            raise ChatTemplateError(
                f"template_kwargs: what the template takes besides the messages expected, found {', '.join(reserved)}; "
                "leave it out"
            )
        check_messages(conversation)
        for index, message in enumerate(conversation):
            # Something else may stand in for the content, such as the call of a tool; nothing at all may not.
            if all(value is None for key, value in message.items() if key not in ("role", "name")):
                raise ChatTemplateError(
                    f"chat message {index} must have a 'content', found none in {dict(message)!r:.80}; give it a text"
                )
        return self.tokenizer.encode_chat(conversation, **extra)

    def _check_options(self, call: str, options: Mapping[str, Any]) -> None:
        """Raise TypeError for a keyword that no request has, and GenerationError on a closed model."""
        for name in options:
            if name not in _OPTIONS:
                hint = "; what the chat template takes goes into template_kwargs=" if "chat" in call else ""
                raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
        self._check_open()

    def _request(self, max_new_tokens: int | None, options: RequestOptions, *, whole: bool) -> _Request:
        """The checked form of a request's keywords. Raises GenerationError for what cannot be used."""
        if max_new_tokens is not None:
            check_max_new_tokens(max_new_tokens)
        given: dict[str, Any] = {
            name: value for name, value in options.items() if name in _SAMPLING and value is not None
        }
        sampling = options.get("sampling")
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise GenerationError(
                f"sampling: a SamplingParams expected, found {type(sampling).__name__}; pass SamplingParams(...)"
            )
        sampler = options.get("sampler")
        if sampler is not None:
            if not callable(sampler):
                raise GenerationError(
                    f"sampler: a function of (logits, token_ids) expected, found {sampler!r:.80}; pass one"
                )
            beside = sorted({*given, *(() if sampling is None else ("sampling",))} - {"logprobs"})
            if beside:
                raise GenerationError(
                    f"sampler: expected to choose alone, found {', '.join(beside)} beside it; leave one of them out"
                )
        if sampling is None:
            sampling = self.published_sampling if whole and sampler is None else SamplingParams()
        sampling = replace(sampling, **given)
        sampling.check_vocab(self.backbone.decode_dims().vocab)
        given_stop = options.get("stop")
        if given_stop is not None and not isinstance(given_stop, Iterable):
            raise GenerationError(f"stop: a text or a list of texts expected, found {given_stop!r:.80}; pass one")
        stop = () if not given_stop else given_stop if isinstance(given_stop, str) else tuple(given_stop)
        StopStrings(stop)
        on_progress = options.get("on_progress")
        if on_progress is not None and not callable(on_progress):
            raise GenerationError(
                f"on_progress: a function of (done, total) expected, found {on_progress!r:.80}; pass one"
            )
        if self._tokenizer is None and stop:
            raise GenerationError(
                "stop: a tokenizer to find stop strings expected, found a model without one; stop at ids instead"
            )
        return _Request(
            max_new_tokens,
            sampling,
            stop,
            bool(options.get("ignore_eos", False)),
            on_progress,
            sampler,
            whole,
        )

    def _start(
        self, ids: list[int], request: _Request, worker: _Worker | None = None, *, replies: int = 1
    ) -> TextStream:
        """The stream of a request: everything is checked, nothing computed yet.

        `replies`: how many the prompt will get; the stream keeps its slot then. `worker`: the thread that works for an
        event loop.
        """
        limit = self.position_limit
        if limit is not None and len(ids) > limit:
            raise CapacityError(
                f"prompt has {len(ids)} tokens, the limit is {limit} positions; shorten the prompt"
                + (" or raise max_seq_len" if self.max_seq_len is not None else "")
            )
        lease = self._take_slot(ids, shared=worker is not None)
        try:
            slot, sampling = lease.slot, request.sampling
            generation = Generation(
                self.backbone,
                ids,
                self._prepare_cache(slot, ids, len(ids) + (request.max_new_tokens or 1) - 1),
                slot.ctx,
                max_new_tokens=_NO_LIMIT if request.max_new_tokens is None else request.max_new_tokens,
                stop_token_ids=frozenset() if request.ignore_eos else self._stop_ids,
                sampling=sampling,
                sampler=request.sampler,
                grow=lambda cache: self._grow(slot, cache),
                prefill_chunk=self.prefill_chunk,
                on_progress=request.on_progress if worker is None else worker.progress(request.on_progress),
                # Sixteen bits round differently in a prompt and in single steps: positions taken over from another
                # request would make a seed mean something else after it. In float32 they differ far too little.
                reuse_cache=sampling.seed is None or sampling.is_greedy or self.dtype == torch.float32,
                forkable=replies > 1,
            )
            return TextStream(self, generation, lease, request, keeps_lease=replies > 1)
        except BaseException:
            lease.end()
            raise

    def _finish(
        self, ids: list[int], request: _Request, n: int | None, worker: _Worker | None = None
    ) -> Completion | list[Completion]:
        """The completion of a request, or `n` of them."""
        if n is None:
            with self._start(ids, request, worker) as stream:
                return _drain(stream, worker)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise GenerationError(f"n: a whole number of at least 1 expected, found {n!r}; give one")
        with self._start(ids, request, worker, replies=n) as first:
            done = [_drain(first, worker)]
            seed = done[0].seed
            for i in range(1, n):
                done.append(_drain(first._fork(None if seed is None else (seed + i) % 2**64), worker))
        return done

    def _with_text(self, logprob: TokenLogprob | None) -> TokenLogprob | None:
        """The log-probability with its tokens spelled out."""
        if logprob is None or self._tokenizer is None:
            return logprob
        decode = self._tokenizer.decode
        top = tuple(replace(t, token=decode([t.token_id], skip_special_tokens=False)) for t in logprob.top)
        return replace(logprob, token=decode([logprob.token_id], skip_special_tokens=False), top=top)

    # -- slots ---------------------------------------------------------------------------------------------

    def _thread_slot(self) -> _Slot:
        slot: _Slot | None = getattr(self._threads, "slot", None)
        if slot is None:
            slot = self._threads.slot = self._new_slot()
        return slot

    def _new_slot(self) -> _Slot:
        self._check_open()
        slot = _Slot(InferenceContext(self.device, plan=self.plan, compile_after=self.compile_after))
        self._slots.add(slot)
        return slot

    def _take_slot(self, ids: Sequence[int], *, shared: bool) -> _Lease:
        """The thread's slot, or one of the shared ones where the request has no thread, or its thread's is in use."""
        if not shared:
            slot = self._thread_slot()
            if not slot.busy:
                return _Lease(slot)
        with self._lock:
            idle = [slot for slot in self._shared_slots if not slot.busy]
            best = max(idle, key=lambda slot: slot.cache.common_prefix(ids) if slot.cache else 0, default=None)
            if best is None:
                best = self._new_slot()
            # Most recently used first; a burst of requests leaves only a few caches behind.
            stays = [slot for slot in idle if slot is not best][: _IDLE_SLOTS - 1]
            busy = [slot for slot in self._shared_slots if slot.busy]
            self._shared_slots = [best, *busy, *stays]
            return _Lease(best)

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


def _drain(stream: TextStream, worker: _Worker | None = None) -> Completion:
    """The completion of a stream; ends early once nobody waits for it."""
    while stream.completion is None:
        if worker is not None:
            worker.check()
        next(stream)
    return stream.completion


def _no_tokenizer(source: TokenizerSource) -> str:
    """What is missing from a checkpoint without a tokenizer, and where to get it."""
    expected = f"{source.origin}: expected tokenizer.json, found"
    if (Path(source.origin) / "tokenizer.model").is_file():
        return (
            f"{expected} tokenizer.model alone; convert it (in Python, with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or pass token ids"
        )
    return f"{expected} none; add the file, or in Python pass token ids to generate()"


def _at_least_one(name: str, value: object) -> None:
    """Raise ConfigError for what is neither None nor a whole number from 1 that 31 bits hold."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name}: a whole number of at least 1 expected, found {value!r:.80}; give one")
    if value is not None and value >= 2**31:
        raise ConfigError(
            f"{name}: a whole number of at most {2**31 - 1} expected, found {value!r:.80}; give a smaller one"
        )


def _device(device: object) -> torch.device:
    """The device that is named, whether or not it is here; BackendUnavailableError for what names none."""
    try:
        if isinstance(device, str | torch.device):
            return torch.device(device)
    except RuntimeError:
        # torch's own message lists every backend that exists anywhere.
        pass
    raise BackendUnavailableError(f"device: 'cpu' or 'cuda' expected, found {str(device)!r:.80}; use device='cpu'")


def _dtype_word(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype a word names, None for "auto"; raises ConfigError for any other word."""
    if dtype == "auto":
        return None
    found = _DTYPES.get(dtype.lower()) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise ConfigError(f"dtype: auto, {', '.join(_DTYPES)} expected, found {dtype!r}; name one of them")
    return found


def activation_dtype(
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
