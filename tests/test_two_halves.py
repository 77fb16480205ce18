"""Both halves of every key component: where it differs a plan is built, where it is equal none is.

Outputs cannot tell an engine that never reuses from one that does, nor counters one that reuses wrongly from one that
is right, so every test here asks for counters, the event with its reason, and logits.
"""

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import nn
from toy_backbone import LatentBackbone, ToyBackbone, ToyConfig, latent_toy, matrix, new_cache, pack, reference, toy

from fuel_core.backbone import DecodeDims, PersistentDecodeModel
from fuel_core.decode_shape import KvAllocId, ShapeKey
from fuel_core.kv_cache import KeyValue
from fuel_core.layers.weight_formats import store
from fuel_core.mask_and_rope import MaskPlan, RopePlan, RopeVariant
from fuel_core.persistent_decode import (
    Disposition,
    InferenceContext,
    Reason,
    SessionKey,
    SessionSlot,
    Validity,
    forward_decode_step,
    forward_with_kv_context,
    forward_with_kv_context_persistent,
    refresh_decode_session,
)
from fuel_core.persistent_decode.build import session_key
from fuel_core.persistent_decode.session import reason_for

PATHS = ["device", "symbol"]


def close(logits, expected, atol=1e-5):
    # Of the largest logit where that is above 1 (weights drawn anew make 8). Genuine: 4e-6; the mildest defect: 6e-2.
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=atol * max(1.0, expected.abs().max().item()))


def decode(model, cache, ctx, ids, check=None):
    """Single-token steps, each compared with ``check(model, ids so far)`` where given; the last logits."""
    for i in ids:
        logits = forward_decode_step(model, [i], cache, ctx)
        if check is not None:
            close(logits, check(model, cache.token_ids)[-1])
    return logits


def last_decision(ctx):
    """The newest event that is not a plain KEPT."""
    return next(event for event in reversed(ctx.plan_events) if event.disposition is not Disposition.KEPT)


# --- Every component, by name ----------------------------------------------------------------------------------------

NAMED_REASONS = {
    "instance": Reason.INSTANCE,
    "epoch": Reason.WEIGHTS_EPOCH,
    "mask_plan": Reason.MASK_STRUCTURE,
    "rope_plan": Reason.ROPE_STRUCTURE,
}
COMPONENTS = [name for name, _ in toy(window=4).decode_shape_key().components]


class Slotted:
    """A built session in a slot, and the key that its next step would need."""

    def __init__(self):
        self.model, self.ctx, self.slot = toy(window=4), InferenceContext(), SessionSlot()
        self.cache = new_cache(self.model)
        forward_with_kv_context_persistent(self.model, [3], self.cache, self.ctx, self.slot)
        self.key = session_key(self.model, self.cache, self.ctx)

    def refresh(self, key):
        return refresh_decode_session(self.slot, key, self.cache, self.ctx)


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_shape_component_that_differs_drops_the_plan_and_equal_ones_keep_it(name):
    held = Slotted()
    parts = dict(held.key.shape_key.components)
    same = dataclasses.replace(held.key, shape_key=ShapeKey.of(dict(parts)))
    assert held.refresh(same) is Disposition.KEPT
    parts[name] = ("another", parts[name])
    other = dataclasses.replace(held.key, shape_key=ShapeKey.of(parts))
    assert held.slot.session.verdict(other).validity is Validity.STALE
    assert held.refresh(other) is Disposition.DROPPED
    event = held.ctx.plan_events[-1]
    assert (event.component, event.reason) == (name, NAMED_REASONS.get(name, Reason.STRUCTURE))
    assert event.now == parts[name]
    assert held.ctx.stats.replans == {event.reason.value: 1}


def test_a_component_that_appears_or_disappears_drops_the_plan():
    for change in (lambda parts: parts.pop("config.softcap"), lambda parts: parts.update({"config.new_field": 1})):
        held = Slotted()
        parts = dict(held.key.shape_key.components)
        change(parts)
        assert held.refresh(dataclasses.replace(held.key, shape_key=ShapeKey.of(parts))) is Disposition.DROPPED
        assert "absent" in (held.ctx.plan_events[-1].was, held.ctx.plan_events[-1].now)


ANOTHER = {
    "seq": 2,
    "max_seq_len": 33,
    "n_layers": 4,
    "cache_dtype": torch.bfloat16,
    "device": torch.device("meta"),
    "offset_path": "device",
    "backend": "another",
    "alloc_id": KvAllocId.next(),
}
SESSION_REASONS = {
    "max_seq_len": Reason.CAPACITY,
    "cache_dtype": Reason.CACHE_DTYPE,
    "device": Reason.DEVICE,
    "offset_path": Reason.OFFSET_PATH,
    "backend": Reason.BACKEND,
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SessionKey) if f.name != "shape_key"])
def test_each_session_component_that_differs_is_seen_and_equal_ones_keep_the_plan(name):
    held = Slotted()
    assert held.refresh(dataclasses.replace(held.key)) is Disposition.KEPT
    other = dataclasses.replace(held.key, **{name: ANOTHER[name]})
    verdict = held.slot.session.verdict(other)
    assert verdict.difference.component == name
    if name == "alloc_id":
        assert verdict.validity is Validity.ALLOCATION_CHANGED
        assert held.refresh(other) is Disposition.REBOUND
        assert held.ctx.plan_events[-1].reason is Reason.ALLOCATION
        assert held.ctx.stats.replans == {}
        return
    assert verdict.validity is Validity.STALE
    assert held.refresh(other) is Disposition.DROPPED
    event = held.ctx.plan_events[-1]
    assert event.component == name
    assert event.reason is SESSION_REASONS.get(name, Reason.STRUCTURE) is reason_for(name)


def test_a_changed_allocation_beside_a_changed_structure_is_stale():
    held = Slotted()
    other = dataclasses.replace(held.key, alloc_id=KvAllocId.next(), max_seq_len=33)
    assert held.slot.session.verdict(other).validity is Validity.STALE


# --- Config fields ---------------------------------------------------------------------------------------------------


class ConfigOnly(ToyBackbone):
    """Its arithmetic reads no config at all, so that any field may change under it and only the key can notice."""

    def decode_apply_layer(self, layer_idx, inputs):
        return inputs.h * 1.5

    def decode_final_norm_and_head(self, h):
        return self.lm_head(h)


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 2
    return 2 if value is None else (*value, 2)


FIELDS = dataclasses.fields(ToyConfig)
BOUND = toy().decode_bound_fields()
BAKED = [f.name for f in FIELDS if f.compare and f.name not in BOUND]


def config_only():
    model = ConfigOnly(ToyConfig())
    model.load_state_dict(toy().state_dict())
    return model


@pytest.mark.parametrize("name", BAKED)
def test_every_baked_config_field_invalidates_and_keeps(name):
    model, ctx = config_only(), InferenceContext()
    cache, config = new_cache(model), model.config
    decode(model, cache, ctx, [3, 1])
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (1, 1)

    model.config = dataclasses.replace(config)  # equal, though another object
    decode(model, cache, ctx, [4])
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (1, 2)

    key = model.decode_shape_key()
    model.config = dataclasses.replace(config, **{name: another(getattr(config, name))})
    fits = new_cache(model).specs == cache.specs
    other = cache if fits else new_cache(model)
    decode(model, other, ctx, [1])
    assert ctx.stats.plans_built == 2
    event = last_decision(ctx)
    assert event.reason is Reason.STRUCTURE
    # A field may show first in the dims that it decides; it is a component of its own all the same.
    assert event.component == f"config.{name}" or event.component.startswith("dims.")
    assert model.decode_shape_key().get(f"config.{name}") != key.get(f"config.{name}")
    assert sum(ctx.stats.replans.values()) == 1
    decode(model, other, ctx, [5])
    assert ctx.stats.plans_built == 2, "equal keeps, also after a change"

    model.config = config
    decode(model, cache, ctx, [9])
    assert ctx.stats.plans_built == 2, "the first plan is still held, and right again"


@pytest.mark.parametrize("name", [f.name for f in FIELDS if not f.compare])
def test_a_field_that_is_no_configuration_does_not_invalidate(name):
    model, ctx = config_only(), InferenceContext()
    cache = new_cache(model)
    decode(model, cache, ctx, [3, 1])
    model.config = dataclasses.replace(model.config, **{name: {"window": "config.json"}})
    decode(model, cache, ctx, [4])
    assert ctx.stats.plans_built == 1


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(DecodeDims)])
def test_every_field_of_the_dims_is_a_component_of_its_own(name):
    class OtherDims(ToyBackbone):
        def decode_dims(self):
            return dataclasses.replace(super().decode_dims(), **{name: 5})

    one, other = toy(), OtherDims(ToyConfig())
    parts, others = dict(one.decode_shape_key().components), dict(other.decode_shape_key().components)
    differ = {part for part in parts if part.startswith("dims.") and parts[part] != others[part]}
    assert differ == {f"dims.{name}"}


# --- Bound fields ----------------------------------------------------------------------------------------------------

# The toy to start from, and the values that the field takes one after another.
BOUND_CHANGES = {
    "rope_thetas": ({"rope_thetas": (10000.0, 100.0)}, [(500.0, 100.0), (500.0, 7.0), (10000.0, 100.0)]),
    "window": ({"window": 4, "windowed_layers": (0, 2)}, [2, 7, 1, 30, 4]),
}


def test_every_bound_field_has_its_changes():
    assert set(BOUND_CHANGES) == BOUND


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize("through", ["reconfigure", "config"])
@pytest.mark.parametrize("name", sorted(BOUND))
def test_a_bound_field_that_changes_is_followed_without_a_rebuild(name, through, offset_path):
    config, values = BOUND_CHANGES[name]
    model, ctx = toy(**config), InferenceContext(offset_path=offset_path)
    cache, ids = new_cache(model, 16), [3, 1, 4, 1, 5, 9]
    before = decode(model, cache, ctx, ids, reference)
    session = ctx.sessions[0]
    for n, value in enumerate(values):
        if through == "reconfigure":
            model.reconfigure(**{name: value})
        else:
            model.config = dataclasses.replace(model.config, **{name: value})
        cache.truncate_to(0)
        after = decode(model, cache, ctx, ids, reference)
        if n < len(values) - 1:
            assert (after - before).abs().max() > 1e-3, "the change is one that outputs show"
        before = after
    assert ctx.sessions == (session,)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (1, 6 * len(values) + 5)
    assert ctx.stats.replans == {}


# --- Model and weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize("made", [lambda m: toy(seed=1), copy.deepcopy, copy.copy], ids=["new", "deepcopy", "copy"])
def test_another_instance_is_built_anew_and_each_keeps_its_own(made, offset_path):
    model, ctx = toy(), InferenceContext(offset_path=offset_path)
    cache = new_cache(model)
    decode(model, cache, ctx, [3, 1], reference)
    other = made(model)
    other_cache = new_cache(other)
    decode(other, other_cache, ctx, [3, 1], reference)
    event = last_decision(ctx)
    ids = model.instance_id.get(), other.instance_id.get()
    assert (event.reason, event.component, (event.was, event.now)) == (Reason.INSTANCE, "instance", ids)
    decode(model, cache, ctx, [4], reference)
    decode(other, other_cache, ctx, [4], reference)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 4)
    assert ctx.stats.replans == {"instance": 1}


class OtherFamily(ToyBackbone):
    def decode_family(self):
        return "other-toy"


class OtherClass(ToyBackbone):
    pass


@pytest.mark.parametrize(("other", "component"), [(OtherFamily, "family"), (OtherClass, "model")])
def test_another_family_or_class_of_equal_config_is_built_anew(other, component):
    model, twin, ctx = toy(), other(ToyConfig()), InferenceContext()
    twin.load_state_dict(model.state_dict())
    decode(model, new_cache(model), ctx, [3, 1])
    decode(twin, new_cache(twin), ctx, [3, 1], reference)
    event = last_decision(ctx)
    assert (event.reason, event.component) == (Reason.STRUCTURE, component)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 2)


def data(model):
    for p in model.parameters():
        p.data = p.data * 1.5


def one_parameter(model):
    model.layers[1].o_proj.weight = nn.Parameter(model.layers[1].o_proj.weight * -1.0, requires_grad=False)


def one_submodule(model):
    model.layers[2] = copy.deepcopy(toy(seed=5).layers[2])


def assigned_state(model):
    model.load_state_dict(toy(seed=6).state_dict(), assign=True)


def moved(model):
    model.to(torch.float64).to(torch.float32)
    model.lm_head.weight.mul_(-1.0)


def declared(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    model.bump_weights_epoch()


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize("swap", [data, one_parameter, one_submodule, assigned_state, moved, declared])
def test_swapped_weights_are_built_anew_and_followed(swap, offset_path):
    model, ctx = toy(), InferenceContext(offset_path=offset_path)
    cache = new_cache(model)
    before = decode(model, cache, ctx, [3, 1, 4], reference)
    swap(model)
    cache.truncate_to(0)
    after = decode(model, cache, ctx, [3, 1, 4], lambda m, ids: reference(m, ids))
    assert (after - before).abs().max() > 1e-3
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 4)
    assert ctx.stats.replans == {"weights_epoch": 1}
    dropped, absent = list(ctx.plan_events)[2:4]
    assert (dropped.disposition, absent.disposition) == (Disposition.DROPPED, Disposition.ABSENT)
    for event in (dropped, absent):
        assert (event.reason, event.component, event.was, event.now) == (Reason.WEIGHTS_EPOCH, "epoch", 0, 1)
    assert len(ctx.sessions) == 1, "the plan over the old weights can never serve again"


def test_weights_of_another_dtype_are_built_anew():
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model)
    component = model.decode_shape_key().get("weights")
    decode(model, cache, ctx, [3, 1])
    model.to(torch.bfloat16)
    assert model.decode_shape_key().get("weights") != component
    cache.truncate_to(0)
    logits = decode(model, cache, ctx, [3, 1])
    expected = reference(model, [3, 1])[-1]
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()
    assert ctx.stats.replans == {"weights_epoch": 1}


def in_place(model):
    with torch.no_grad():
        model.layers[0].q_proj.weight.mul_(-1.0)
        model.lm_head.weight.data.add_(0.1)


def loaded_in_place(model):
    model.load_state_dict(toy(seed=6).state_dict())


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize("edit", [in_place, loaded_in_place])
def test_weights_edited_in_place_are_followed_without_a_rebuild(edit, offset_path):
    model, ctx = toy(), InferenceContext(offset_path=offset_path)
    cache = new_cache(model)
    before = decode(model, cache, ctx, [3, 1, 4], reference)
    edit(model)
    cache.truncate_to(0)
    after = decode(model, cache, ctx, [3, 1, 4], reference)
    assert (after - before).abs().max() > 1e-3
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 5, {})


def requantised(model, word):
    store(model.lm_head, -matrix(model.lm_head).float(), word)


def other_format(model, word):
    store(model.lm_head, -matrix(model.lm_head).float(), "bf16")


def scale_replaced(model, word):
    name = {"int8": "weight_scale", "int4": "weight_scale_and_zero"}[word]
    setattr(model.lm_head, name, nn.Parameter(-getattr(model.lm_head, name), requires_grad=False))


def packed_error(logits, model, ids):
    expected = reference(model, ids)[-1]
    return float((logits.double() - expected).norm() / expected.norm())


# Relative; worst genuine 0.03 (the kernels read and write bfloat16), and the sign turned is 2.
PACKED_TOLERANCE = 0.1


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("swap", [requantised, other_format, scale_replaced])
def test_swapped_packed_weights_are_built_anew_and_followed(swap, word, offset_path):
    model, ctx = pack(toy(), word), InferenceContext(offset_path=offset_path)
    cache = new_cache(model)
    before = decode(model, cache, ctx, [3, 1, 4])
    assert packed_error(before, model, [3, 1, 4]) < PACKED_TOLERANCE
    swap(model, word)
    cache.truncate_to(0)
    after = decode(model, cache, ctx, [3, 1, 4])
    assert packed_error(after, model, [3, 1, 4]) < PACKED_TOLERANCE
    assert packed_error(before, model, [3, 1, 4]) > 1.9
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (2, 4, {"weights_epoch": 1})


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_packed_weights_edited_in_place_are_followed_without_a_rebuild(word, offset_path):
    model, ctx = pack(toy(), word), InferenceContext(offset_path=offset_path)
    cache = new_cache(model)
    before = decode(model, cache, ctx, [3, 1, 4])
    with torch.no_grad():
        getattr(model.lm_head, {"int8": "weight_scale", "int4": "weight_scale_and_zero"}[word]).neg_()
    cache.truncate_to(0)
    after = decode(model, cache, ctx, [3, 1, 4])
    assert packed_error(after, model, [3, 1, 4]) < PACKED_TOLERANCE
    assert packed_error(before, model, [3, 1, 4]) > 1.9
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 5, {})


def test_equal_packed_models_share_recordings_and_other_formats_do_not():
    ctx, models = (
        InferenceContext(),
        [pack(toy(seed=s, rms_norm_eps=3e-5), w) for s, w in ((0, "int8"), (1, "int8"), (0, "int4"))],
    )
    keys = [str(model.structure_key()) for model in models]
    assert keys[0] == keys[1] != keys[2]
    made = []
    for model in models:
        decode(model, new_cache(model), ctx, [3, 1])
        made.append(ctx.stats.recordings)
    assert made[1] == made[0] < made[2]


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim"])
def test_another_state_geometry_is_another_structure(name):
    one, other = toy(), toy(**{name: 4})
    assert one.decode_shape_key().get("state") != other.decode_shape_key().get("state")
    assert toy().decode_shape_key().get("state") == one.decode_shape_key().get("state")
    assert latent_toy(rolling=True).decode_shape_key().get("state") != latent_toy().decode_shape_key().get("state")
    assert isinstance(one.layer_state_specs()[0], KeyValue)


# --- Plan structure --------------------------------------------------------------------------------------------------

MASKS = {
    "a window where there was none": (MaskPlan.dense(3), MaskPlan.split_window(3, 3, 4)),
    "another layer windowed": (
        MaskPlan.per_layer_window(3, 4, lambda i: i == 0),
        MaskPlan.per_layer_window(3, 4, lambda i: i == 1),
    ),
    "another number of variants": (MaskPlan([4, None], [0, 1, 0]), MaskPlan([4, None, 2], [0, 1, 2])),
}
A, B, C = (RopeVariant.default(20, theta) for theta in (10000.0, 100.0, 7.0))
NARROW = RopeVariant.default(12, 100.0)
ROPES = {
    "another layer": (RopePlan([A, B], [0, 1, 1]), RopePlan([A, B], [0, 0, 1])),
    "another number of variants": (RopePlan([A, B], [0, 1, 1]), RopePlan([A, B, C], [0, 1, 2])),
    "another width": (RopePlan.single(A, 3), RopePlan.single(NARROW, 3)),
}


def fresh(model, ids):
    """The same ids without plans, for plans that were assigned: the reference knows the config's only."""
    return forward_with_kv_context(
        model, ids, new_cache(model, 40), InferenceContext(plan="off"), all_positions=True
    ).double()


@pytest.mark.parametrize("offset_path", PATHS)
@pytest.mark.parametrize(
    ("kind", "reason", "was", "now"),
    [
        *(("mask_plan", Reason.MASK_STRUCTURE, *pair) for pair in MASKS.values()),
        *(("rope_plan", Reason.ROPE_STRUCTURE, *pair) for pair in ROPES.values()),
    ],
    ids=[*MASKS, *(f"rope: {name}" for name in ROPES)],
)
def test_another_plan_structure_is_built_anew_and_going_back_is_not(kind, reason, was, now, offset_path):
    model, ctx = toy(), InferenceContext(offset_path=offset_path)
    cache, ids = new_cache(model), [3, 1, 4, 1, 5, 9]
    outputs = []
    for plan in (was, now, was):
        setattr(model, kind, plan)
        cache.truncate_to(0)
        outputs.append(decode(model, cache, ctx, ids, fresh))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
    close(outputs[2], outputs[0].double())
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 16)
    event = last_decision(ctx)
    assert (event.reason, event.component) == (reason, kind)
    assert ctx.stats.replans == {reason.value: 1}


# --- Cache and context -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"), [({"max_seq_len": 20}, Reason.CAPACITY), ({"dtype": torch.float16}, Reason.CACHE_DTYPE)]
)
@pytest.mark.parametrize("offset_path", PATHS)
def test_a_cache_of_other_capacity_or_dtype_is_built_anew_and_one_of_equal_is_not(change, reason, offset_path):
    model, ctx = toy(), InferenceContext(offset_path=offset_path)
    first, other = new_cache(model), new_cache(model, **change)
    decode(model, first, ctx, [3, 1], reference)
    logits = decode(model, other, ctx, [3, 1])
    close(logits, reference(model, [3, 1])[-1], atol=1e-5 if "dtype" not in change else 0.05)
    event = last_decision(ctx)
    assert (event.disposition, event.reason) == (Disposition.ABSENT, reason)
    assert ctx.stats.plans_built == 2
    decode(model, new_cache(model), ctx, [3, 1], reference)
    assert ctx.stats.plans_built == 2
    event = last_decision(ctx)
    assert (event.disposition, event.reason, event.component) == (Disposition.REBOUND, Reason.ALLOCATION, "alloc_id")
    assert ctx.stats.rebound_kv == 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("offset_path", "device", Reason.OFFSET_PATH), ("backend", "another", Reason.BACKEND)],
)
def test_another_offset_path_or_backend_is_built_anew_and_going_back_is_not(name, value, reason):
    model, ctx = toy(), InferenceContext(plan="recorded")
    cache, was = new_cache(model), getattr(ctx, name)
    decode(model, cache, ctx, [3, 1], reference)
    setattr(ctx, name, value)
    decode(model, cache, ctx, [4, 1], reference)
    event = last_decision(ctx)
    assert (event.reason, event.component, event.was, event.now) == (reason, name, was, value)
    setattr(ctx, name, was)
    decode(model, cache, ctx, [5, 9], reference)
    assert (ctx.stats.plans_built, ctx.stats.rebinds) == (2, 4)


# --- Over-keying -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_path", PATHS)
def test_nothing_that_is_bound_ever_rebuilds(offset_path):
    model = toy(window=4, windowed_layers=(0, 2), rope_thetas=(10000.0, 100.0))
    ctx, cache = InferenceContext(offset_path=offset_path), new_cache(model, 40)
    decode(model, cache, ctx, [3], reference)
    session, outputs = ctx.sessions[0], []

    def again():
        cache.truncate_to(0)
        outputs.append(decode(model, cache, ctx, [3, 1, 4, 1, 5, 9], fresh))

    again()
    cos = model.rope_plan
    for change in (
        lambda: model.reconfigure(rope_thetas=(300.0, 100.0)),
        lambda: model.reconfigure(window=2),
        lambda: setattr(model, "mask_plan", MaskPlan([3, None], model.mask_plan.per_layer)),
        lambda: setattr(model, "rope_plan", RopePlan([C, A], cos.per_layer)),
        lambda: setattr(model, "rope_plan", RopePlan([RopeVariant(C.inv_freq, 1.2), A], cos.per_layer)),
        lambda: setattr(model, "rope_plan", RopePlan([RopeVariant.linear(20, 7.0, 8.0), A], cos.per_layer)),
        lambda: in_place(model),
    ):
        change()
        again()
    moved = [float((a - b).abs().max()) for a, b in pairwise(outputs)]
    assert min(moved) > 1e-4, "each of them reaches the outputs"
    # Tokens and positions: every id, every position to the last, with several tokens at once and truncations between.
    cache.truncate_to(0)
    for n in range(40):
        forward_decode_step(model, [66 - n], cache, ctx)
    for length in (39, 12, 0):
        cache.truncate_to(length)
        decode(model, cache, ctx, [5], fresh)
    forward_decode_step(model, [1, 2, 3], cache, ctx)
    decode(model, cache, ctx, [8, 7], fresh)
    forward_with_kv_context(model, [1], cache, ctx, all_positions=True)
    decode(model, cache, ctx, [8], fresh)
    assert ctx.sessions == (session,)
    assert (ctx.stats.plans_built, ctx.stats.replans, ctx.stats.rebound_kv) == (1, {}, 0)
    assert ctx.stats.rebinds == ctx.stats.decode_steps - 1 - 1, "all but the build and the fresh single-token step"


def test_a_hundred_steps_are_one_build_and_ninety_nine_rebinds():
    model, ctx = latent_toy(), InferenceContext()
    cache = new_cache(model, 100)
    decode(model, cache, ctx, [n % 67 for n in range(100)])
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.recordings <= 3) == (1, 99, True)
    assert [str(event) for event in ctx.plan_events] == ["step 1 ABSENT (first_step)", "steps 2..100 KEPT (unchanged)"]
    assert isinstance(model, LatentBackbone)
    assert isinstance(model, PersistentDecodeModel)
