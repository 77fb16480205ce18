"""A live model changes between requests and steps: whatever was computed or held before must not leak into after."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy_backbone import ToyBackbone, new_cache, toy

from fuel_core import layers
from fuel_core.errors import CacheStateError, ConfigError, DecodeError, GeometryError
from fuel_core.generation import Generation
from fuel_core.llm import LanguageModel
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant
from fuel_core.persistent_decode import (
    Disposition,
    InferenceContext,
    Reason,
    SessionSlot,
    forward_decode_step,
    forward_with_kv_context_persistent,
)

PROMPT = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8]


def _change_rope_plan(model: ToyBackbone) -> None:
    model.rope_plan = RopePlan.single(RopeVariant.default(20, 77.0), 3)


def _change_mask_plan(model: ToyBackbone) -> None:
    model.mask_plan = MaskPlan([4], [0, 0, 0])


def _reconfigure(model: ToyBackbone) -> None:
    model.reconfigure(rope_thetas=(77.0,))


def _replace_weight(model: ToyBackbone) -> None:
    weight = model.layers[0].v_proj.weight
    model.layers[0].v_proj.weight = nn.Parameter(weight * 2, requires_grad=False)


def _edit_in_place_and_say_so(model: ToyBackbone) -> None:
    model.layers[0].v_proj.weight.mul_(2)
    model.bump_weights_epoch()


CHANGES = [_change_rope_plan, _change_mask_plan, _reconfigure, _replace_weight, _edit_in_place_and_say_so]


@pytest.mark.parametrize("change", CHANGES)
def test_a_prefix_computed_before_a_change_is_not_taken_over(change) -> None:
    model = toy()
    llm = LanguageModel(model)
    llm.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    assert llm.generate(PROMPT, max_new_tokens=4, ignore_eos=True).usage.cached_tokens == len(PROMPT) - 1
    with torch.no_grad():
        change(model)
    found = llm.generate(PROMPT, max_new_tokens=4, ignore_eos=True, logprobs=1)
    fresh = LanguageModel(model, plan="off").generate(PROMPT, max_new_tokens=4, ignore_eos=True, logprobs=1)
    assert found.usage.cached_tokens == 0
    assert found.token_ids == fresh.token_ids
    assert [t.logprob for t in found.logprobs] == pytest.approx([t.logprob for t in fresh.logprobs], abs=1e-4)
    # and the twin: with nothing changed since, the prefix is taken over again
    assert llm.generate(PROMPT, max_new_tokens=4, ignore_eos=True).usage.cached_tokens == len(PROMPT) - 1


def test_the_facade_shows_the_config_in_force() -> None:
    model = toy()
    llm = LanguageModel(model)
    model.reconfigure(rope_thetas=(77.0,))
    assert llm.config is model.config
    assert llm.config.rope_thetas == (77.0,)


def test_a_cache_of_another_model_gives_no_prefix() -> None:
    first, second = toy(), toy(seed=1)
    cache, ctx = new_cache(first), InferenceContext()
    list(Generation(first, PROMPT, cache, ctx, max_new_tokens=2))
    other = Generation(second, PROMPT, cache, ctx, max_new_tokens=2)
    list(other)
    assert other.cached_tokens == 0


def test_a_change_in_the_middle_keeps_only_what_came_before_it() -> None:
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model)
    before = model.rope_plan
    forward_decode_step(model, PROMPT[:4], cache, ctx)
    _change_rope_plan(model)
    forward_decode_step(model, PROMPT[4:], cache, ctx)
    assert cache.reusable_prefix(PROMPT, model.content_version()) == 0
    model.rope_plan = before
    assert cache.reusable_prefix(PROMPT, model.content_version()) == 4
    cache.truncate_to(4)
    assert cache.reusable_prefix(PROMPT, model.content_version()) == 4


class WithPlaces(ToyBackbone):
    """Has places that hold nothing yet: a bias that is None, an adapter slot, a module without children."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.register_module("adapter", None)
        self.plain = nn.Identity()

    def decode_final_norm_and_head(self, h: torch.Tensor) -> torch.Tensor:
        h = h if self.adapter is None else h + self.adapter(h)
        for child in self.plain.children():
            h = h + child(h)
        for extra in self.plain.buffers():
            h = h + extra
        return super().decode_final_norm_and_head(h)


def _linear(width: int = 96) -> layers.Linear:
    made = layers.Linear(width, width)
    made.weight.data = torch.full((width, width), 0.02)
    return made


@pytest.mark.parametrize(
    "fill_place",
    [
        lambda m: setattr(m.layers[0].q_proj, "bias", nn.Parameter(torch.ones(80), requires_grad=False)),
        lambda m: setattr(m, "adapter", _linear()),
        lambda m: m.plain.add_module("first", _linear()),
        lambda m: m.plain.register_buffer("first", torch.full((96,), 0.5)),
    ],
    ids=["a bias that was None", "an empty module slot", "a first child", "a first buffer"],
)
def test_filling_an_empty_place_rebuilds_the_plan(fill_place) -> None:
    base = toy()
    model = WithPlaces(base.config)
    model.load_state_dict(base.state_dict(), assign=True)
    model.layers[0].q_proj.bias = None
    cache, ctx = new_cache(model), InferenceContext()
    for token in PROMPT[:4]:
        forward_decode_step(model, [token], cache, ctx)
    fill_place(model)
    found = forward_decode_step(model, [7], cache, ctx)
    assert ctx.stats.plans_built == 2
    assert ctx.stats.replans == {"weights_epoch": 1}
    oracle, off = new_cache(model), InferenceContext(plan="off")
    cache.truncate_to(4)
    oracle.copy_prefix_from(cache, 4)
    torch.testing.assert_close(found, forward_decode_step(model, [7], oracle, off), rtol=0, atol=2e-5)
    forward_decode_step(model, [7], cache, ctx)
    assert ctx.stats.plans_built == 2


def test_a_build_that_fails_leaves_the_callers_session_and_the_counters() -> None:
    model, ctx, slot = toy(), InferenceContext(), SessionSlot()
    cache = new_cache(model)
    for token in PROMPT[:3]:
        forward_with_kv_context_persistent(model, [token], cache, ctx, slot)
    session, events, stats = slot.session, list(ctx.plan_events), ctx.stats.as_dict()
    with torch.device("meta"):
        broken = ToyBackbone(model.config)
    with pytest.raises(GeometryError):
        forward_with_kv_context_persistent(broken, [1], new_cache(model), ctx, slot)
    assert slot.session is session
    assert list(ctx.plan_events) == events
    assert ctx.stats.as_dict() == stats
    forward_with_kv_context_persistent(model, [5], cache, ctx, slot)
    assert ctx.stats.plans_built == 1


def test_a_build_that_fails_is_told_by_the_build_that_succeeds() -> None:
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model)
    forward_decode_step(model, [1], cache, ctx)
    kept = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.empty_like(kept, device="meta"), requires_grad=False)
    with pytest.raises(DecodeError):
        forward_decode_step(model, [2], cache, ctx)
    model.lm_head.weight = kept
    forward_decode_step(model, [2], cache, ctx)
    assert ctx.stats.plans_built == 2
    assert ctx.stats.replans == {"weights_epoch": 1}
    assert [(e.disposition, e.reason) for e in ctx.plan_events][-2:] == [
        (Disposition.DROPPED, Reason.WEIGHTS_EPOCH),
        (Disposition.ABSENT, Reason.WEIGHTS_EPOCH),
    ]


@pytest.mark.parametrize("n", [1.5, True, "2", None])
def test_truncate_refuses_what_is_no_integer_and_changes_nothing(n) -> None:
    model = toy()
    cache = new_cache(model)
    forward_decode_step(model, PROMPT, cache, InferenceContext())
    with pytest.raises(CacheStateError, match="integer"):
        cache.truncate_to(n)
    with pytest.raises(CacheStateError, match="integer"):
        new_cache(model).copy_prefix_from(cache, n)
    assert (cache.cached_len, cache.token_ids) == (len(PROMPT), PROMPT)


def test_a_rope_plan_wider_than_a_head_is_refused_where_it_is_assigned() -> None:
    model = toy()
    before = model.rope_plan
    with pytest.raises(GeometryError, match="rotates 48 features, a head has 20"):
        model.rope_plan = RopePlan.single(RopeVariant.default(48, 300.0), 3)
    assert model.rope_plan is before


def test_reconfigure_with_values_of_no_use_is_one_error_and_rolled_back() -> None:
    model = toy()
    config, plan = model.config, model.rope_plan
    with pytest.raises(ConfigError, match="rope_thetas"):
        model.reconfigure(rope_thetas=None)
    assert model.config is config
    assert model.rope_plan is plan


def test_set_layer_refuses_one_buffer_for_two_slots() -> None:
    cache = new_cache(toy())
    shared = torch.zeros_like(cache.layer(0)["k"])
    with pytest.raises(GeometryError, match="share one buffer"):
        cache.set_layer(0, {"k": shared, "v": shared})


def test_a_weight_restrided_under_the_plan_is_refused_at_the_next_repoint() -> None:
    model, ctx = toy(), InferenceContext()
    forward_decode_step(model, [1], new_cache(model), ctx)
    weight = model.layers[0].q_proj.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))  # same pointer, so no epoch shows it
    found = forward_decode_step(model, [1], new_cache(model), ctx)
    assert ctx.stats.replans == {"repoint_refused": 1}
    assert ctx.stats.plans_built == 2
    fresh = forward_decode_step(model, [1], new_cache(model), InferenceContext(plan="off"))
    torch.testing.assert_close(found, fresh, rtol=0, atol=2e-5)
