"""Held sessions: what refreshing one does, what it keeps alive, and what it must never serve."""

import dataclasses
import gc
import weakref

import pytest
import torch
from toy_backbone import ToyBackbone, latent_toy, new_cache, reference, toy

from fuel_core import decode_shape
from fuel_core.decode_shape import ShapeKey
from fuel_core.errors import PlanError, TopologyChanged
from fuel_core.persistent_decode import (
    Disposition,
    InferenceContext,
    Reason,
    SessionSlot,
    Validity,
    drop_decode_session,
    forward_decode_step,
    forward_with_kv_context,
    forward_with_kv_context_persistent,
    rebind_and_realize_prebuilt,
    refresh_decode_session,
)
from fuel_core.persistent_decode.build import session_key
from fuel_core.persistent_decode.session import reason_for


class Held:
    """A model with one built session in a slot of the caller's, and a log of what on_invalidate saw."""

    def __init__(self, offset_path="symbol", **config):
        self.model = toy(**config)
        self.cache = new_cache(self.model)
        self.ctx = InferenceContext(offset_path=offset_path)
        self.slot = SessionSlot()
        self.ids = [3, 1]
        forward_with_kv_context_persistent(self.model, [3], self.cache, self.ctx, self.slot)
        forward_with_kv_context_persistent(self.model, [1], self.cache, self.ctx, self.slot)
        self.seen = []

    def key(self, cache=None):
        return session_key(self.model, cache or self.cache, self.ctx)

    def refresh(self, cache, key=None):
        def on_invalidate():
            session = self.slot.session
            self.seen.append(None if session is None else session.key.alloc_id)

        return refresh_decode_session(self.slot, key or self.key(cache), cache, self.ctx, on_invalidate)


# --- Refreshing, arm by arm ------------------------------------------------------------------------------------------


def test_refresh_keeps_a_matching_session_and_retires_nothing():
    held = Held()
    before = held.slot.session
    assert held.refresh(held.cache) is Disposition.KEPT
    assert held.slot.session is before
    assert held.seen == []
    assert held.ctx.plan_events[-1].reason is Reason.UNCHANGED


@pytest.mark.parametrize(
    ("change", "reason", "component"),
    [
        ({"max_seq_len": 48}, Reason.CAPACITY, "max_seq_len"),
        ({"dtype": torch.bfloat16}, Reason.CACHE_DTYPE, "cache_dtype"),
    ],
)
def test_refresh_drops_a_session_of_another_structure_after_retiring_its_readers(change, reason, component):
    held = Held()
    other = new_cache(held.model, **change)
    assert held.refresh(other) is Disposition.DROPPED
    assert held.slot.session is None
    assert held.seen == [held.cache.alloc_id], "on_invalidate runs while the session is still what it was"
    event = held.ctx.plan_events[-1]
    assert (event.disposition, event.reason, event.component) == (Disposition.DROPPED, reason, component)
    assert held.ctx.stats.replans == {reason.value: 1}
    assert held.refresh(other) is Disposition.ABSENT
    assert len(held.seen) == 1, "there was nothing left to retire"


def test_refresh_repoints_a_session_to_a_cache_of_equal_geometry_and_keeps_it_from_then_on():
    held = Held()
    before = held.slot.session
    other = new_cache(held.model)
    assert held.refresh(other) is Disposition.REBOUND
    assert held.slot.session is before
    assert held.seen == [held.cache.alloc_id], "readers are retired even though the session survives"
    assert held.refresh(other) is Disposition.KEPT
    assert len(held.seen) == 1
    assert held.ctx.stats.rebound_kv == 1
    assert held.ctx.stats.replans == {}


def odd_strided(cache, layer):
    """Give one layer buffers of the right shape that lie differently in memory, past what set_layer allows."""
    cache._layers[layer] = {
        name: torch.zeros_like(t).transpose(1, 2).contiguous().transpose(1, 2) for name, t in cache.layer(layer).items()
    }
    return cache


def test_refresh_drops_a_session_whose_recorded_signature_the_buffers_do_not_match():
    held = Held()
    other = odd_strided(new_cache(held.model), 1)
    assert held.key(other).verdict(held.key()).validity is Validity.ALLOCATION_CHANGED, "structure alone would allow it"
    assert held.refresh(other) is Disposition.DROPPED
    assert held.slot.session is None
    assert held.seen == [held.cache.alloc_id]
    event = held.ctx.plan_events[-1]
    assert event.reason is Reason.REPOINT_REFUSED
    assert "layer 1 slot 'k'" in str(event)
    assert held.ctx.stats.rebound_kv == 0


def test_a_refused_swap_is_rebuilt_on_the_buffers_it_was_refused_for():
    held = Held()
    other = odd_strided(new_cache(held.model), 2)
    for i in (5, 6):
        logits = forward_with_kv_context_persistent(held.model, [i], other, held.ctx, held.slot)
    assert held.ctx.stats.plans_built == 2
    torch.testing.assert_close(logits.double(), reference(held.model, [5, 6])[-1], rtol=0, atol=1e-5)


def test_refresh_without_a_session_is_absent():
    held = Held()
    drop_decode_session(held.slot, held.ctx)
    assert held.ctx.plan_events[-1].reason is Reason.ON_REQUEST
    events = len(held.ctx.plan_events)
    assert held.refresh(held.cache) is Disposition.ABSENT
    assert held.seen == []
    drop_decode_session(held.slot, held.ctx)
    assert len(held.ctx.plan_events) == events, "nothing was dropped the second time"


# --- Re-pointing -----------------------------------------------------------------------------------------------------


def logits_of(held, ids, cache):
    """Logits of ``ids`` on the held session itself, whatever refreshing would say."""
    out = rebind_and_realize_prebuilt(held.model, ids, cache, held.ctx, held.slot.session)
    return out[0, -1].double()


@pytest.mark.parametrize("offset_path", ["device", "symbol"])
def test_a_repointed_session_reads_and_writes_the_new_buffers_only(offset_path):
    held = Held(offset_path)
    other = new_cache(held.model)
    forward_with_kv_context(held.model, [9, 2, 6], other, held.ctx)
    old = [t.clone() for layer in range(3) for t in held.cache.layer(layer).values()]
    logits = forward_with_kv_context_persistent(held.model, [5], other, held.ctx, held.slot)
    torch.testing.assert_close(logits.double(), reference(held.model, [9, 2, 6, 5])[-1], rtol=0, atol=1e-5)
    # The fixture can see a session that stayed behind: over the old buffers the answer is another one.
    assert (reference(held.model, [3, 1, 5])[-1] - logits).abs().max() > 0.1
    assert all(map(torch.equal, old, [t for layer in range(3) for t in held.cache.layer(layer).values()]))
    assert (held.ctx.stats.plans_built, held.ctx.stats.rebound_kv) == (1, 1)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_repointing_is_all_or_nothing(layer):
    held = Held()
    before = held.key()
    other = odd_strided(new_cache(held.model), layer)
    refusal = held.slot.session.rebind_kv(other, held.key(other))
    assert f"layer {layer} slot 'k'" in refusal
    assert held.slot.session.verdict(before).validity is Validity.VALID
    found = logits_of(held, [4], held.cache)
    torch.testing.assert_close(found, reference(held.model, [3, 1, 4])[-1], rtol=0, atol=1e-5)
    assert not any(t.any() for i in range(3) for t in other.layer(i).values()), "nothing was written there"


def test_repointing_refuses_a_cache_without_the_slot():
    held = Held()
    other = new_cache(held.model)
    other._layers[2] = {"k": other._layers[2]["k"]}
    assert "layer 2 has no slot 'v'" in held.slot.session.rebind_kv(other, held.key(other))


def test_a_plan_with_baked_addresses_is_never_repointed(monkeypatch):
    held = Held()
    monkeypatch.setattr(type(held.slot.session.plan), "repointable", False)
    assert held.refresh(new_cache(held.model)) is Disposition.DROPPED
    assert held.ctx.plan_events[-1].reason is Reason.REPOINT_REFUSED


def test_a_cleared_cache_is_repointed_to_its_new_storage():
    held = Held()
    held.cache.clear()
    logits = forward_with_kv_context_persistent(held.model, [7], held.cache, held.ctx, held.slot)
    torch.testing.assert_close(logits.double(), reference(held.model, [7])[-1], rtol=0, atol=1e-5)
    assert (held.ctx.stats.plans_built, held.ctx.stats.rebound_kv) == (1, 1)


# --- What a session keeps alive --------------------------------------------------------------------------------------


def test_a_session_lets_go_of_the_buffers_of_a_dead_cache_and_serves_the_next_one():
    model, ctx = toy(), InferenceContext()
    gone = new_cache(model)
    forward_decode_step(model, [3], gone, ctx)
    refs = [weakref.ref(t) for layer in range(3) for t in gone.layer(layer).values()]
    kept = new_cache(model, 48)
    del gone
    forward_decode_step(model, [3], kept, ctx)
    gc.collect()
    assert [ref() for ref in refs] == [None] * 6
    again = new_cache(model)
    for i in (5, 6):
        logits = forward_decode_step(model, [i], again, ctx)
    torch.testing.assert_close(logits.double(), reference(model, [5, 6])[-1], rtol=0, atol=1e-5)
    assert (ctx.stats.plans_built, ctx.stats.rebound_kv) == (2, 1), "its plan was kept for this"


def test_a_session_keeps_the_buffers_of_a_living_cache():
    model, ctx = toy(), InferenceContext()
    first, second = new_cache(model), new_cache(model, 48)
    forward_decode_step(model, [3], first, ctx)
    forward_decode_step(model, [3], second, ctx)
    forward_decode_step(model, [1], first, ctx)
    assert ctx.stats.rebound_kv == 0
    assert ctx.stats.rebinds == 1


def test_a_session_lets_go_of_storage_that_clear_released():
    model, ctx = toy(), InferenceContext()
    cache, other = new_cache(model), new_cache(model, 48)
    forward_decode_step(model, [3], cache, ctx)
    refs = [weakref.ref(t) for layer in range(3) for t in cache.layer(layer).values()]
    cache.clear()
    forward_decode_step(model, [3], other, ctx)
    gc.collect()
    assert [ref() for ref in refs] == [None] * 6


def test_a_session_keeps_what_it_baked_alive_and_dropping_it_lets_go():
    held = Held(hidden_size=104)  # recorded here first: no other model of this process has that width
    weights = [weakref.ref(p) for p in held.model.parameters()]
    slot, cache, ctx = held.slot, held.cache, held.ctx
    del held
    gc.collect()
    assert all(ref() is not None for ref in weights), "the plan reads them on its next step"
    drop_decode_session(slot, ctx)
    gc.collect()
    # A recording is shared by models to come: it must not hold the weights of the one that it was taken from.
    assert [ref() for ref in weights] == [None] * len(weights)
    assert cache.cached_len == 2


# --- What must never be served ---------------------------------------------------------------------------------------


def forged(key: ShapeKey, value: int) -> ShapeKey:
    twin = ShapeKey(key.components)
    object.__setattr__(twin, "value", value)
    return twin


def test_keys_whose_hashes_collide_are_still_different():
    held, other = Held(), toy(seed=1)
    mine = held.key()
    theirs = session_key(other, held.cache, held.ctx)
    collided = dataclasses.replace(theirs, shape_key=forged(theirs.shape_key, mine.shape_key.value))
    assert collided.shape_key.value == mine.shape_key.value
    verdict = held.slot.session.verdict(collided)
    assert verdict.validity is Validity.STALE
    assert verdict.difference.component == "instance"
    same = dataclasses.replace(mine, shape_key=forged(mine.shape_key, mine.shape_key.value))
    assert held.slot.session.verdict(same).validity is Validity.VALID


def test_two_models_decode_rightly_when_every_hash_is_one_number(monkeypatch):
    monkeypatch.setattr(decode_shape, "fnv1a_64", lambda data, basis=0: 7)
    ctx = InferenceContext()
    models = [toy(seed=0), toy(seed=1)]
    caches = [new_cache(m) for m in models]
    assert models[0].decode_shape_key().value == models[1].decode_shape_key().value == 7
    for step, i in enumerate((3, 1, 4)):
        for model, cache in zip(models, caches, strict=True):
            logits = forward_decode_step(model, [i], cache, ctx)
            torch.testing.assert_close(logits.double(), reference(model, [3, 1, 4][: step + 1])[-1], rtol=0, atol=1e-5)
    assert ctx.stats.plans_built == 2
    assert ctx.stats.rebinds == 4


def test_rebinding_without_a_session_is_refused():
    held = Held()
    with pytest.raises(PlanError, match="held session is expected"):
        rebind_and_realize_prebuilt(held.model, [4], held.cache, held.ctx, None)
    assert held.cache.cached_len == 2


def test_a_session_without_buffers_is_refused():
    held = Held()
    held.slot.session.plan.detach()
    with pytest.raises(PlanError, match="attached KV buffers expected, found none"):
        rebind_and_realize_prebuilt(held.model, [4], held.cache, held.ctx, held.slot.session)
    assert held.cache.cached_len == 2


def test_check_weights_notices_a_weight_moved_under_the_plan():
    held = Held()
    plan = held.slot.session.plan
    plan.check_weights()
    held.model.layers[2].o_proj.weight.add_(1.0)
    plan.check_weights()  # written in place: the plan reads the same storage
    weight = held.model.layers[2].o_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(PlanError, match="layer 2: weight"):
        plan.check_weights()


# --- A plan that is no longer what was built -------------------------------------------------------------------------


def negate_output(graph):
    out = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(out):
        out.args = (graph.call_function(torch.ops.aten.neg.default, (out.args[0],)),)


class RecordedForItself(ToyBackbone):
    """Records a head that no other test's model shares, so that rewriting it is this test's business alone."""

    def decode_final_norm_and_head(self, h):
        return super().decode_final_norm_and_head(h) * 1.25


@pytest.mark.parametrize("slotted", [True, False])
def test_a_rewritten_plan_serves_the_token_fresh_and_is_built_anew(slotted):
    model = RecordedForItself(toy().config)
    model.load_state_dict(toy().state_dict())
    twin = RecordedForItself(model.config)
    twin.load_state_dict(toy(seed=1).state_dict())
    ctx, slot = InferenceContext(), SessionSlot()
    caches = {model: new_cache(model), twin: new_cache(twin)}

    def step(of, i):
        if slotted and of is model:
            return forward_with_kv_context_persistent(of, [i], caches[of], ctx, slot)
        return forward_decode_step(of, [i], caches[of], ctx)

    ids = [3, 1, 4, 1, 5]
    for i in ids[:2]:
        step(model, i)
        step(twin, i)
    session = slot.session if slotted else ctx.sessions[1]
    recording = session.plan.program.segments[-1].recording
    recording.rewrite(negate_output)
    with pytest.raises(TopologyChanged):
        session.plan.run(session.bound.symbols)
    for n in (3, 4, 5):
        for of in (model, twin):
            logits = step(of, ids[n - 1])
            expected = reference(of, ids[:n])[-1] * 1.25
            torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5)
    assert ctx.stats.replans["topology_changed"] == 2
    assert ctx.stats.plans_built == 4
    assert ctx.stats.fresh_steps == 2, "one token of each model while its plan was gone"
    assert any(event.reason is Reason.TOPOLOGY_CHANGED for event in ctx.plan_events)


# --- Observable structure --------------------------------------------------------------------------------------------


def test_a_session_lists_its_ops_and_what_it_reads():
    symbol, device = Held("symbol").slot.session, Held("device").slot.session
    assert len(symbol.ops) > 30
    assert all("::" in op or "." in op or op.isidentifier() for op in symbol.ops)
    assert "mask" not in symbol.reads
    assert {"cached_len", "attended_len", "cos", "sin", "token_ids"} <= symbol.reads
    assert {"mask", "offset", "cos", "sin", "token_ids"} <= device.reads
    assert "cached_len" not in device.reads
    assert (symbol.device_offset, device.device_offset) == (False, True)


def test_sessions_of_named_slots_are_repointed_slot_by_slot():
    model, ctx, slot = latent_toy(), InferenceContext(), SessionSlot()
    one, other = new_cache(model), new_cache(model)
    forward_with_kv_context_persistent(model, [3], one, ctx, slot)
    logits = forward_with_kv_context_persistent(model, [3], other, ctx, slot)
    assert ctx.stats.rebound_kv == 1
    assert torch.equal(one.layer(0)["latent"], other.layer(0)["latent"])
    assert logits.isfinite().all()


def test_every_unnamed_component_means_structure():
    assert reason_for("config.hidden_size") is Reason.STRUCTURE
    assert reason_for("epoch") is Reason.WEIGHTS_EPOCH
