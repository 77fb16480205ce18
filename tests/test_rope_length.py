"""Sequences that outgrow an original length: the plan stays, and the cached rows turn as those of the whole sequence.

Truth is a float64 forward over the whole sequence by the frequencies of its length; it shares no code with the decode
path. Genuine error up to 1.4e-5 (logits up to 4); rows that stay as they were turned: 1.0 and more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from toy_backbone import ToyBackbone, latent_toy, new_cache, reference, toy

from fuel_core.errors import CapacityError, DecodeError
from fuel_core.generation import Generation
from fuel_core.llm import LanguageModel
from fuel_core.mask_and_rope import RopePlan, RopeVariant
from fuel_core.persistent_decode import (
    Disposition,
    InferenceContext,
    Reason,
    SessionSlot,
    entry,
    forward_decode_step,
    forward_with_kv_context,
    forward_with_kv_context_persistent,
)

TOLERANCE = 1e-4
ORIGINAL, WIDTH = 10, 20
IDS = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 61, 44, 7, 12, 50, 27]
LONG = RopeVariant.longrope(
    WIDTH,
    10000.0,
    short_factor=[1.0 + 0.1 * i for i in range(WIDTH // 2)],
    long_factor=[3.0 + 0.3 * i for i in range(WIDTH // 2)],
    factor=8.0,
    original_max_position_embeddings=ORIGINAL,
)
DYNAMIC = RopeVariant.dynamic(WIDTH, 10000.0, factor=4.0, original_max_position_embeddings=ORIGINAL)
VARIANTS = {"longrope": LONG, "dynamic": DYNAMIC}
PATHS = ["symbol", "device"]


def turned(variant: RopeVariant) -> ToyBackbone:
    model = toy()
    model.rope_plan = RopePlan.single(variant, 3)
    return model


def truth(model: ToyBackbone, variant: RopeVariant, ids: Sequence[int]) -> Tensor:
    """float64 logits after the last id."""
    frequencies = torch.tensor(variant.frequencies(variant.regime(len(ids))), dtype=torch.float64)
    return reference(model, ids, frequencies, variant.scale)[-1]


def error(model: ToyBackbone, variant: RopeVariant, ids: Sequence[int], logits: Tensor) -> float:
    return float((logits.double() - truth(model, variant, ids)).abs().max())


def reasons(ctx: InferenceContext) -> list[Reason]:
    return [event.reason for event in ctx.plan_events]


def test_the_frequencies_matter_here() -> None:
    model = turned(LONG)
    for variant in VARIANTS.values():
        other = RopeVariant(variant.inv_freq, variant.scale)
        far = truth(model, variant, IDS) - truth(model, other, IDS)
        assert float(far.abs().max()) > 1000 * TOLERANCE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("plan", ["recorded", "off"])
def test_crossing_the_original_length_keeps_the_plan_and_turns_the_cache(path: str, plan: str) -> None:
    model = turned(LONG)
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path, plan=plan)
    forward_decode_step(model, IDS[:5], cache, ctx)
    for n in range(6, len(IDS) + 1):
        logits = forward_decode_step(model, IDS[n - 1 : n], cache, ctx)
        assert error(model, LONG, IDS[:n], logits) < TOLERANCE, n
        assert cache.token_ids == IDS[:n]
    stats = ctx.stats
    assert stats.recomputed_tokens == ORIGINAL
    assert reasons(ctx).count(Reason.ROPE_LENGTH) == 1
    if plan == "off":
        assert (stats.plans_built, stats.fresh_steps) == (0, 1 + 11)
        return
    # One build, and every other single token through it: the crossing one as well.
    assert (stats.plans_built, stats.rebinds, stats.replans, stats.rebound_kv) == (1, 10, {}, 0)
    assert stats.fresh_steps == 1
    (event,) = [event for event in ctx.plan_events if event.reason is Reason.ROPE_LENGTH]
    assert (event.disposition, event.component, event.was, event.now) == (Disposition.KEPT, "sequence_len", 10, 11)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("chunks", [[16], [5, 5, 6], [9, 2, 5], [10, 1, 1, 4], [1] * 16])
def test_every_way_to_cut_a_sequence_ends_in_the_same_logits(kind: str, path: str, chunks: list[int]) -> None:
    model, variant = turned(VARIANTS[kind]), VARIANTS[kind]
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path)
    fed = 0
    for size in chunks:
        logits = forward_decode_step(model, IDS[fed : fed + size], cache, ctx)
        fed += size
        assert error(model, variant, IDS[:fed], logits) < TOLERANCE, fed
    assert ctx.stats.plans_built <= 1
    assert ctx.stats.replans == {}


def test_the_growing_base_costs_the_whole_cache_at_every_token_beyond_the_original_length() -> None:
    model = turned(DYNAMIC)
    cache, ctx = new_cache(model), InferenceContext("cpu")
    for n in range(1, 14):
        forward_decode_step(model, IDS[n - 1 : n], cache, ctx)
    assert ctx.stats.recomputed_tokens == 10 + 11 + 12
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 12, {})


@pytest.mark.parametrize("path", PATHS)
def test_rewinding_below_the_original_length_turns_the_rows_back(path: str) -> None:
    model = turned(LONG)
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path)
    forward_decode_step(model, IDS, cache, ctx)
    cache.truncate_to(6)
    logits = forward_decode_step(model, IDS[6:7], cache, ctx)
    assert error(model, LONG, IDS[:7], logits) < TOLERANCE
    assert ctx.stats.recomputed_tokens == 6
    other = new_cache(model, 40)
    forward_decode_step(
        model, IDS, cache.__class__.with_capacity(cache.specs, max_seq_len=9 + 9, dtype=cache.dtype), ctx
    )
    other.copy_prefix_from(cache, 7)
    logits = forward_decode_step(model, IDS[7:8], other, ctx)
    assert error(model, LONG, IDS[:8], logits) < TOLERANCE
    assert ctx.stats.recomputed_tokens == 6, "copied rows know what they were turned by"


def test_copies_of_a_cache_know_what_their_rows_were_turned_by() -> None:
    model = turned(LONG)
    cache, ctx = new_cache(model), InferenceContext("cpu")
    forward_decode_step(model, IDS[:8], cache, ctx)
    for twin in (copy.copy(cache), copy.deepcopy(cache)):
        logits = forward_decode_step(model, IDS[8:12], twin, ctx)
        assert error(model, LONG, IDS[:12], logits) < TOLERANCE


@pytest.mark.parametrize("call", ["fresh", "slot"])
def test_the_calls_below_turn_the_cache_too(call: str) -> None:
    model, slot = turned(LONG), SessionSlot()
    cache, ctx = new_cache(model), InferenceContext("cpu")

    def step(ids: list[int]) -> Tensor:
        if call == "fresh":
            return forward_with_kv_context(model, ids, cache, ctx)
        return forward_with_kv_context_persistent(model, ids, cache, ctx, slot)

    step(IDS[:4])
    for n in range(5, 14):
        assert error(model, LONG, IDS[:n], step(IDS[n - 1 : n])) < TOLERANCE
    assert ctx.stats.recomputed_tokens == ORIGINAL
    assert ctx.stats.plans_built == (0 if call == "fresh" else 1)


def test_a_chunk_may_be_told_how_long_the_sequence_will_be() -> None:
    model = turned(LONG)
    cache, ctx = new_cache(model), InferenceContext("cpu")
    for start in (0, 4, 8):
        forward_decode_step(model, IDS[start : start + 4], cache, ctx, sequence_len=12)
    logits = forward_decode_step(model, IDS[12:13], cache, ctx)
    assert error(model, LONG, IDS[:13], logits) < TOLERANCE
    assert ctx.stats.recomputed_tokens == 0
    for wrong in (13, 0, True, 14.0):
        with pytest.raises(DecodeError, match=r"sequence_len must be an integer of at least 14"):
            forward_decode_step(model, IDS[13:14], cache, ctx, sequence_len=wrong)
    assert cache.cached_len == 13


def test_a_generation_turns_its_prompt_once_and_crosses_once() -> None:
    model = turned(LONG)
    long_prompt = InferenceContext("cpu")
    generation = Generation(model, IDS[:13], new_cache(model), long_prompt, max_new_tokens=4, prefill_chunk=3)
    tokens = [token.token_id for token in generation]
    assert long_prompt.stats.recomputed_tokens == 0
    ctx = InferenceContext("cpu")
    crossing = Generation(model, IDS[:7], new_cache(model), ctx, max_new_tokens=8, prefill_chunk=3)
    written = [*IDS[:7], *(token.token_id for token in crossing)]
    assert ctx.stats.recomputed_tokens == ORIGINAL
    assert (ctx.stats.plans_built, ctx.stats.replans) == (1, {})
    for ids, count in ((IDS[:13] + tokens, 4), (written, 8)):
        for n in range(len(ids) - count, len(ids)):
            assert int(truth(model, LONG, ids[:n]).argmax()) == ids[n]


def test_a_prefix_that_was_turned_otherwise_is_not_taken_over_as_it_is() -> None:
    model = turned(LONG)
    llm = LanguageModel(model)
    first = llm.generate(IDS[:8], max_new_tokens=2, ignore_eos=True)
    second = llm.generate(IDS[:13], max_new_tokens=2, ignore_eos=True)
    assert second.usage.cached_tokens == 0
    again = llm.generate(IDS[:8], max_new_tokens=2, ignore_eos=True)
    assert again.token_ids == first.token_ids
    assert (
        LanguageModel(turned(LONG)).generate(IDS[:13], max_new_tokens=2, ignore_eos=True).token_ids == second.token_ids
    )


@pytest.mark.parametrize("path", PATHS)
def test_failing_while_the_cache_is_turned_loses_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = turned(LONG)
    cache, ctx = new_cache(model), InferenceContext("cpu", offset_path=path)
    for n in range(1, ORIGINAL + 1):
        forward_decode_step(model, IDS[n - 1 : n], cache, ctx)
    monkeypatch.setattr(entry, "_RECOMPUTE_CHUNK", 4)
    apply: Callable[..., Tensor] = ToyBackbone.decode_apply_layer
    calls = 0

    def interrupted(self: ToyBackbone, layer_idx: int, inputs: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:  # in the second chunk
            raise KeyboardInterrupt
        return apply(self, layer_idx, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(ToyBackbone, "decode_apply_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward_decode_step(model, IDS[10:11], cache, ctx)
    assert (cache.token_ids, ctx.stats.recomputed_tokens) == (IDS[:10], 0)
    assert Reason.ROPE_LENGTH not in reasons(ctx)
    for n in range(11, 14):
        assert error(model, LONG, IDS[:n], forward_decode_step(model, IDS[n - 1 : n], cache, ctx)) < TOLERANCE
    assert (ctx.stats.plans_built, ctx.stats.recomputed_tokens) == (1, 10)


def test_a_full_cache_is_refused_before_anything_is_computed_again() -> None:
    model = turned(LONG)
    cache, ctx = new_cache(model, ORIGINAL), InferenceContext("cpu")
    forward_decode_step(model, IDS[:ORIGINAL], cache, ctx)
    with pytest.raises(CapacityError):
        forward_decode_step(model, IDS[10:11], cache, ctx)
    assert (cache.cached_len, ctx.stats.recomputed_tokens) == (ORIGINAL, 0)


def test_rolling_state_is_computed_again_with_the_rest() -> None:
    model = latent_toy(rolling=True)
    variant = RopeVariant.longrope(
        12,
        10000.0,
        short_factor=[1.0] * 6,
        long_factor=[4.0] * 6,
        factor=8.0,
        original_max_position_embeddings=ORIGINAL,
    )
    model.rope_plan = RopePlan.single(variant, 3)
    cache, ctx = new_cache(model), InferenceContext("cpu")
    for n in range(1, 14):
        stepwise = forward_decode_step(model, IDS[n - 1 : n], cache, ctx)
    whole = forward_decode_step(model, IDS[:13], new_cache(model), InferenceContext("cpu"))
    assert ctx.stats.recomputed_tokens == ORIGINAL
    torch.testing.assert_close(stepwise, whole, atol=TOLERANCE, rtol=0.0)


def test_other_plans_are_never_computed_again() -> None:
    model = toy()
    cache, ctx = new_cache(model), InferenceContext("cpu")
    for token in IDS:
        forward_decode_step(model, [token], cache, ctx, sequence_len=40)
    assert ctx.stats.recomputed_tokens == 0
