"""Who a model is: instance, epoch, config and plans, and how each of them gets into its key."""

import copy
import dataclasses
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from toy_backbone import ToyBackbone, ToyConfig, latent_toy, new_cache, reference, toy

from fuel_core import backbone as backbone_module
from fuel_core import layers
from fuel_core.backbone import DecodeBackbone, DecodeDims, PersistentDecodeModel
from fuel_core.decode_shape import ShapeKey
from fuel_core.errors import ConfigError, GeometryError
from fuel_core.kv_cache import KeyValue
from fuel_core.mask_and_rope import MaskPlan, RopePlan
from fuel_core.persistent_decode import InferenceContext, forward_decode_step

# --- The instance ----------------------------------------------------------------------------------------------------


def test_a_model_keys_as_itself_and_as_no_other_of_its_config():
    one, two = toy(), toy()
    assert one.instance_id != two.instance_id
    assert one.decode_shape_key() == one.decode_shape_key()
    assert one.decode_shape_key() != two.decode_shape_key()
    assert one.structure_key() == two.structure_key(), "recordings are shared by structure"
    assert one.structure_key() != toy(softcap=9.0).structure_key()


def test_ids_are_not_used_again_once_a_model_is_gone():
    seen = set()
    for _ in range(5):
        model = toy(num_hidden_layers=1)
        assert model.instance_id not in seen
        seen.add(model.instance_id)
        del model
        gc.collect()


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_other_models(made):
    model = toy(window=5)
    model.mask_plan = MaskPlan.dense(3)
    model.decode_shape_key()
    twin = made(model)
    assert twin.instance_id != model.instance_id
    assert twin.decode_shape_key() != model.decode_shape_key()
    assert twin.structure_key() == model.structure_key()
    assert twin.mask_plan == MaskPlan.dense(3), "a plan assigned to the original is a part of what was copied"
    twin.mask_plan = MaskPlan.split_window(3, 3, 2)
    assert model.mask_plan == MaskPlan.dense(3), "from here on they go separate ways"


def test_a_deep_copy_decodes_from_its_own_weights_in_one_context():
    model = toy()
    ctx, cache = InferenceContext(), new_cache(model)
    for i in (3, 1):
        forward_decode_step(model, [i], cache, ctx)
    twin, twin_cache = copy.deepcopy(model), new_cache(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1.0)
    for n, i in enumerate((3, 1, 4)):
        logits = forward_decode_step(twin, [i], twin_cache, ctx)
        torch.testing.assert_close(logits.double(), reference(twin, [3, 1, 4][: n + 1])[-1], rtol=0, atol=1e-5)
    logits = forward_decode_step(model, [4], cache, ctx)
    torch.testing.assert_close(logits.double(), reference(model, [3, 1, 4])[-1], rtol=0, atol=1e-5)
    assert ctx.stats.plans_built == 2


# --- The key ---------------------------------------------------------------------------------------------------------


def test_the_key_has_every_component_by_name():
    names = [name for name, _ in toy().decode_shape_key().components]
    bound = {"rope_thetas", "window"}
    expected = {"family", "model", "instance", "epoch", "state", "mask_plan", "rope_plan", "weights"}
    expected |= {f"dims.{f.name}" for f in dataclasses.fields(DecodeDims)}
    expected |= {f"config.{f.name}" for f in dataclasses.fields(ToyConfig) if f.name not in bound | {"sources"}}
    assert set(names) == expected
    assert len(names) == len(expected)


def test_a_field_left_out_of_comparison_is_left_out_of_the_key():
    one, two = toy(sources={"window": "config.json"}), toy(sources={"window": "family default"})
    assert one.structure_key() == two.structure_key()


def test_a_config_value_that_cannot_be_keyed_is_refused_by_name():
    model = toy()
    model.config = dataclasses.replace(model.config, softcap=torch.tensor(3.0))
    with pytest.raises(TypeError, match="Tensor"):
        model.decode_shape_key()


def test_a_config_assigned_past_reconfigure_is_noticed():
    model = toy(rope_thetas=(100.0,))
    before, rope = model.decode_shape_key(), model.rope_plan
    model.config = dataclasses.replace(model.config)
    assert model.decode_shape_key() == before, "an equal config is no change"
    model.config = dataclasses.replace(model.config, rms_norm_eps=1e-3)
    assert model.decode_shape_key() != before
    model.config = dataclasses.replace(model.config, rms_norm_eps=1e-5, rope_thetas=(50.0,))
    assert model.decode_shape_key() == before, "the field that is left different is bound"
    assert model.rope_plan != rope, "and its plan follows"


def test_keys_are_memoised_per_epoch_config_and_plan_structure(monkeypatch):
    made = []
    of = ShapeKey.of.__func__
    monkeypatch.setattr(ShapeKey, "of", classmethod(lambda cls, parts: made.append(1) or of(cls, parts)))
    model = toy(window=5, windowed_layers=(0,))
    for _ in range(5):
        model.decode_shape_key()
    assert len(made) == 1
    model.reconfigure(window=7)
    model.mask_plan = MaskPlan.per_layer_window(3, 9, lambda i: i == 0)
    model.decode_shape_key()
    made.clear()
    dense, mixed = MaskPlan.dense(3), model.mask_plan
    for plan in (dense, mixed, dense, mixed):
        model.mask_plan = plan
        model.decode_shape_key()
    assert len(made) == 1, "going back and forth between two structures computes each once"
    model.bump_weights_epoch()
    model.decode_shape_key()
    assert len(made) == 2


def test_one_held_step_looks_at_every_weight_once(monkeypatch):
    """The check must stay under one per cent of a step; counted, because a timing would say so only on a quiet day."""
    model, ctx = toy(), InferenceContext()
    cache = new_cache(model)
    forward_decode_step(model, [3], cache, ctx)
    looks, snapshots, keys = [], [], []
    snapshot_class = backbone_module._WeightSnapshot
    is_current, init, of = snapshot_class.is_current, snapshot_class.__init__, ShapeKey.of.__func__
    monkeypatch.setattr(snapshot_class, "is_current", lambda self: looks.append(1) or is_current(self))
    monkeypatch.setattr(snapshot_class, "__init__", lambda self, m: snapshots.append(1) or init(self, m))
    monkeypatch.setattr(ShapeKey, "of", classmethod(lambda cls, parts: keys.append(1) or of(cls, parts)))
    for i in (1, 4, 1, 5):
        forward_decode_step(model, [i], cache, ctx)
    assert (len(looks), snapshots, keys) == (4, [], [])
    snapshot = model._weight_snapshot
    assert len(snapshot.pointers) == len(list(model.parameters())) + len(list(model.buffers()))
    assert sum(isinstance(v, torch.nn.Module) for v in snapshot.held) == len(list(model.modules())) - 1


def test_keys_are_the_same_from_every_thread():
    model, keys = toy(), []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        keys.append(model.decode_shape_key())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert len(keys) == 8
    assert model.weights_epoch() == 0


# --- The weights epoch -----------------------------------------------------------------------------------------------


def swap_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def swap_data_of_equal_bytes_elsewhere(model):
    weight = model.norm.weight
    weight.data = torch.cat((weight.data, weight.data))[96:]


def replace_parameter(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)


def replace_parameter_around_the_same_storage(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data, requires_grad=False)


def replace_submodule(model):
    model.layers[1].o_proj = copy.deepcopy(model.layers[1].o_proj)


def swap_two_layers(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def append_layer(model):
    model.layers.append(copy.deepcopy(model.layers[0]))


def drop_bias(model):
    model.layers[2].q_proj.bias = None


def add_bias(model):
    model.layers[0].o_proj.bias = nn.Parameter(torch.zeros(96), requires_grad=False)


def assign_state(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def change_dtype(model):
    model.to(torch.bfloat16)


def change_dtype_of_one(model):
    model.layers[0].k_proj.to(torch.float16)


SWAPS = [
    swap_data,
    swap_data_of_equal_bytes_elsewhere,
    replace_parameter,
    replace_parameter_around_the_same_storage,
    replace_submodule,
    swap_two_layers,
    append_layer,
    drop_bias,
    add_bias,
    assign_state,
    change_dtype,
    change_dtype_of_one,
    PersistentDecodeModel.bump_weights_epoch,
]


@pytest.mark.parametrize("swap", SWAPS, ids=lambda f: f.__name__)
def test_weights_that_are_swapped_bump_the_epoch_once(swap):
    model = toy()
    key, epoch = model.decode_shape_key(), model.weights_epoch()
    swap(model)
    assert model.weights_epoch() == epoch + 1
    assert model.weights_epoch() == epoch + 1, "once"
    assert model.decode_shape_key() != key
    assert model.decode_shape_key().get("epoch") == epoch + 1


def write_in_place(model):
    model.lm_head.weight.add_(1.0)
    model.norm.weight.data.mul_(2.0)


def load_in_place(model):
    model.load_state_dict(toy(seed=9).state_dict())


def assign_the_same_objects(model):
    model.lm_head.weight = model.lm_head.weight
    model.layers[0] = model.layers[0]


KEEPS = [
    write_in_place,
    load_in_place,
    assign_the_same_objects,
    lambda model: model.to(torch.float32),
    lambda model: model.to("cpu"),
    lambda model: model.eval().train(),
    lambda model: model.requires_grad_(False),
    lambda model: model.state_dict(),
    copy.deepcopy,
]


@pytest.mark.parametrize("change", KEEPS)
def test_weights_that_stay_where_they_are_keep_the_epoch(change):
    model = toy()
    key = model.decode_shape_key()
    change(model)
    assert model.weights_epoch() == 0
    assert model.decode_shape_key() == key


def test_a_bump_forgets_what_was_recorded_for_the_old_weights():
    model, ctx = toy(), InferenceContext()
    forward_decode_step(model, [3], new_cache(model), ctx)
    assert len(model._programs) == 1
    model.bump_weights_epoch()
    assert model._programs == {}


def test_a_packed_format_is_part_of_the_weights_component():
    model = toy()
    before = model.decode_shape_key().get("weights")
    model.lm_head.packed_format = "f32"
    model.bump_weights_epoch()
    after = model.decode_shape_key().get("weights")
    assert before != after
    assert ("lm_head", "f32") in after[1]


# --- reconfigure and assigned plans ----------------------------------------------------------------------------------


def state_of(model):
    return model.config, model.mask_plan, model.rope_plan, model.decode_shape_key()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"no_such_field": 1}, ConfigError, r"toy: .*bound field expected, found .no_such_field"),
        ({"head_dim": 24}, ConfigError, r"toy: field 'head_dim' is baked.*\['rope_thetas', 'window'\]"),
        ({"window": 3, "softcap": 1.0}, ConfigError, "'softcap' is baked"),
        ({"window": 0}, ConfigError, "at least 1"),
        ({"rope_thetas": (-1.0,)}, ConfigError, "above 0"),
        ({"window": 3, "rope_thetas": ("x",)}, ConfigError, "number"),
    ],
)
def test_reconfigure_refuses_and_leaves_everything_as_it_was(change, error, says):
    model = toy(window=5)
    model.mask_plan = MaskPlan.split_window(3, 3, 4)
    before = state_of(model)
    with pytest.raises(error, match=says):
        model.reconfigure(**change)
    assert state_of(model) == before
    assert state_of(model)[0] is before[0]


def test_reconfigure_changes_the_plans_and_not_the_key():
    model = toy(window=5)
    key = model.decode_shape_key()
    model.reconfigure(window=2, rope_thetas=(77.0,))
    assert model.mask_plan == MaskPlan.split_window(3, 3, 2)
    assert model.rope_plan == RopePlan.single(77.0, 3, 20)
    assert model.config.window == 2
    assert model.decode_shape_key() == key


def test_reconfigure_to_another_structure_changes_the_key():
    model = toy(window=5, rope_thetas=(10.0, 20.0))
    keys = [model.decode_shape_key()]
    model.reconfigure(window=None)
    keys.append(model.decode_shape_key())
    model.reconfigure(rope_thetas=(10.0, 10.0))
    keys.append(model.decode_shape_key())
    assert len(set(keys)) == 3


def test_reconfigure_lets_go_of_an_assigned_plan():
    model = toy(window=5)
    model.mask_plan = MaskPlan.split_window(3, 3, 4)
    model.reconfigure(window=3)
    assert model.mask_plan.windows == (3,)


@pytest.mark.parametrize(
    ("name", "plan", "error", "says"),
    [
        ("mask_plan", MaskPlan.dense(4), GeometryError, "toy: mask_plan covers 4 layers, the model has 3"),
        ("mask_plan", MaskPlan.dense(2), GeometryError, "covers 2 layers"),
        ("mask_plan", RopePlan.single(10.0, 3, 20), ConfigError, "must be a MaskPlan, found RopePlan"),
        ("mask_plan", None, ConfigError, "found NoneType"),
        ("rope_plan", RopePlan.single(10.0, 4, 20), GeometryError, "toy: rope_plan covers 4 layers"),
        ("rope_plan", MaskPlan.dense(3), ConfigError, "must be a RopePlan, found MaskPlan"),
    ],
)
def test_a_plan_that_cannot_be_the_models_is_refused_on_assignment(name, plan, error, says):
    model = toy(window=5)
    before = state_of(model)
    with pytest.raises(error, match=says):
        setattr(model, name, plan)
    assert state_of(model) == before


def test_an_assigned_plan_is_read_at_once():
    model = toy()
    key = model.decode_shape_key()
    model.rope_plan = RopePlan.single(50.0, 3, 20)
    assert model.rope_plan.variants[0].inv_freq[1] == pytest.approx(50.0**-0.1)
    assert model.decode_shape_key() == key
    model.mask_plan = MaskPlan.split_window(3, 1, 2)
    assert model.mask_plan.n_variants == 2
    assert model.decode_shape_key() != key


# --- The contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decode_shape_key", "structure_key", "_key_components", "weights_epoch"])
def test_identity_cannot_be_overridden_by_a_family(name):
    with pytest.raises(TypeError, match=f"Narrow overrides {name}"):
        type("Narrow", (ToyBackbone,), {name: lambda self: None})
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(TypeError, match=f"Mixed overrides {name}"):
        type("Mixed", (mixin, ToyBackbone), {})
    type("Fine", (ToyBackbone,), {"decode_family": lambda self: "fine"})


HOOKS = [
    "decode_family",
    "layer_state_specs",
    "decode_dims",
    "decode_mask_plan",
    "decode_rope_plan",
    "decode_token_embedding",
    "decode_apply_layer",
    "decode_final_norm_and_head",
]


@pytest.mark.parametrize("missing", HOOKS)
def test_a_family_that_forgets_a_hook_cannot_be_constructed(missing):
    hooks = {name: getattr(ToyBackbone, name) for name in HOOKS if name != missing}
    forgetful = type("Forgetful", (DecodeBackbone,), hooks)
    with pytest.raises(TypeError, match=missing):
        forgetful()


def test_nothing_is_bound_unless_a_family_says_so():
    model = latent_toy(window=4)
    assert model.decode_bound_fields() == frozenset()
    assert model.decode_shape_key().get("config.window") == 4
    with pytest.raises(ConfigError, match="baked"):
        model.reconfigure(window=3)


def test_dims_take_layers_and_kv_sizes_from_the_state_specs():
    dims = DecodeDims.of([KeyValue(2, 6)] * 3, hidden=96, vocab=7, rope_width=4, embed_scale=1.5)
    assert dims == DecodeDims(3, 96, 7, 4, 1.5, 2, 6)
    assert latent_toy().decode_dims().head_dim is None
    assert toy().decode_dims().n_kv_heads == 2


def test_a_tied_head_is_looked_at_in_both_places():
    model = toy()
    model.lm_head.weight = model.embed_tokens.weight
    model.weights_epoch()
    model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.clone(), requires_grad=False)
    assert model.weights_epoch() == 1
    assert isinstance(model.lm_head, layers.Linear)
