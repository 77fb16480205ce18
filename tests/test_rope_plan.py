"""RoPE variants against transformers' functions and published numbers; plans and tables against a formula by hand."""

import copy
import dataclasses
import math
import pickle
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fuel_core.decode_shape import ShapeKeyHasher
from fuel_core.errors import ConfigError, DecodeError
from fuel_core.mask_and_rope import LongerList, RopePlan, RopeVariant, build_rope_tables

BANDED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"factor": 2.0, "original_max_position_embeddings": 16}


def key_of(plan):
    hasher = ShapeKeyHasher()
    plan.mix_into(hasher)
    return hasher.finish()


def tables_by_hand(variant, start, seq):
    """Return cos and sin of one variant in float64, [seq, width], one number at a time."""
    cos, sin = np.empty((seq, variant.width)), np.empty((seq, variant.width))
    for row in range(seq):
        for pair, frequency in enumerate(variant.inv_freq):
            angle = (start + row) * frequency
            cos[row, pair] = cos[row, pair + variant.width // 2] = math.cos(angle) * variant.scale
            sin[row, pair] = sin[row, pair + variant.width // 2] = math.sin(angle) * variant.scale
    return cos, sin


# --- Frequencies -----------------------------------------------------------------------------------------------------


def oracle_config(width, theta, published, **scaling):
    """Return a config of transformers that publishes this rope_type."""
    from transformers import PreTrainedConfig

    config = PreTrainedConfig()
    config.hidden_size, config.num_attention_heads, config.head_dim = 4 * width, 4, width
    config.max_position_embeddings = 4096
    config.rope_parameters = {"rope_type": published, "rope_theta": theta, **scaling}
    return config


def oracle(width, theta, published, **scaling):
    """Return (inv_freq, scale) as transformers computes them for a config that publishes this rope_type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scale = ROPE_INIT_FUNCTIONS[published](oracle_config(width, theta, published, **scaling), "cpu")
    return inv_freq.numpy(), scale


SHAPES = [(16, 1e4), (64, 1e6), (128, 5e5), (80, 1e4)]


def assert_matches_oracle(variant, expected):
    inv_freq, scale = expected
    # transformers computes in float32: measured up to 3.1e-7 relative from the exact value on these shapes.
    np.testing.assert_allclose(variant.inv_freq, inv_freq, rtol=1e-6)
    assert variant.scale == pytest.approx(scale, rel=1e-6)
    assert variant.width == 2 * len(inv_freq)


@pytest.mark.parametrize(("width", "theta"), SHAPES)
def test_against_transformers_default(width, theta):
    # The registry holds no entry for the unscaled kind; linear by 1 is the same.
    assert_matches_oracle(RopeVariant.default(width, theta), oracle(width, theta, "linear", factor=1.0))


@pytest.mark.parametrize(("width", "theta"), SHAPES)
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_against_transformers_linear(width, theta, factor):
    assert_matches_oracle(RopeVariant.linear(width, theta, factor), oracle(width, theta, "linear", factor=factor))


@pytest.mark.parametrize(("width", "theta"), SHAPES)
@pytest.mark.parametrize("changed", [{}, {"original_max_position_embeddings": 8192}, {"factor": 32.0}])
def test_against_transformers_banded(width, theta, changed):
    parameters = BANDED | changed
    assert_matches_oracle(RopeVariant.banded(width, theta, **parameters), oracle(width, theta, "llama3", **parameters))


@pytest.mark.parametrize(("width", "theta"), SHAPES)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"original_max_position_embeddings": 4096, "factor": 40.0},
        {"factor": 1.0},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 1.0},
        {"attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"mscale": 0.707, "mscale_all_dim": 0},
        {"truncate": False},
        {"truncate": False, "beta_fast": 1.0},
        {"original_max_position_embeddings": 4},
        {"original_max_position_embeddings": 131072},
    ],
    ids=lambda changed: ",".join(changed) or "plain",
)
def test_against_transformers_yarn(width, theta, changed):
    parameters = YARN | changed
    assert_matches_oracle(RopeVariant.yarn(width, theta, **parameters), oracle(width, theta, "yarn", **parameters))


def test_yarn_fixture_reaches_all_three_bands():
    # Otherwise a ramp computed wrongly, or none at all, could agree with the oracle.
    ratios = np.divide(RopeVariant.yarn(64, 1e6, **YARN).inv_freq, RopeVariant.default(64, 1e6).inv_freq)
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(1 / 8)
    assert np.sum((ratios < 0.999) & (ratios > 0.126)) >= 2
    exact = RopeVariant.yarn(64, 1e6, **YARN, truncate=False)
    assert exact.inv_freq != RopeVariant.yarn(64, 1e6, **YARN).inv_freq


def test_default_is_theta_to_the_power_of_minus_2i_over_width():
    assert RopeVariant.default(4, 1e4).inv_freq == pytest.approx((1.0, 0.01), rel=1e-15)
    assert RopeVariant.default(8, 16.0).inv_freq == pytest.approx((1.0, 0.5, 0.25, 0.125), rel=1e-15)
    assert RopeVariant.default(8, 16.0).scale == 1.0


def test_banded_multipliers_are_the_published_ones():
    banded = RopeVariant.banded(16, 1e4, **BANDED)
    multipliers = np.divide(banded.inv_freq, RopeVariant.default(16, 1e4).inv_freq)
    np.testing.assert_allclose(multipliers, [1, 0.303073] + [0.125] * 6, rtol=2e-6)
    assert banded.scale == 1.0


def test_banded_moves_the_table_where_positions_are_high():
    # At low positions the scaled and the unscaled table are nearly the same, so the comparison is made at 200.
    plain, banded = (
        RopePlan.single(variant, 1) for variant in (RopeVariant.default(16, 1e4), RopeVariant.banded(16, 1e4, **BANDED))
    )
    at_200 = np.abs(build_rope_tables(plain, 200, 1)[0] - build_rope_tables(banded, 200, 1)[0])
    assert at_200.max() > 0.5
    cos, _ = tables_by_hand(banded.variants[0], 200, 1)
    np.testing.assert_allclose(build_rope_tables(banded, 200, 1)[0][0], cos, atol=1e-7)


@pytest.mark.parametrize(("factor", "expected"), [(4, 1.138629), (16, 1.277259), (1, 1.0), (0.5, 1.0)])
def test_yarn_scale_follows_the_factor(factor, expected):
    scale = RopeVariant.yarn(16, 1e4, factor=factor, original_max_position_embeddings=32).scale
    assert scale == pytest.approx(expected, abs=1e-6)


def test_yarn_attention_factor_replaces_the_formula():
    explicit = RopeVariant.yarn(16, 1e4, factor=64, original_max_position_embeddings=32, attention_factor=1.0)
    formula = RopeVariant.yarn(16, 1e4, factor=64, original_max_position_embeddings=32)
    assert explicit.scale == 1.0
    assert formula.scale == pytest.approx(0.1 * math.log(64) + 1)
    assert explicit.inv_freq == formula.inv_freq


def test_divided_takes_the_stored_divisors_of_a_banded_model():
    divisors = np.array([1, 1 / 0.3030726463085457] + [8] * 6)
    divided = RopeVariant.divided(16, 1e4, divisors)
    assert divided.inv_freq == pytest.approx(RopeVariant.banded(16, 1e4, **BANDED).inv_freq, rel=1e-12)
    with pytest.raises(ConfigError, match="8 for width 16, got 7"):
        RopeVariant.divided(16, 1e4, divisors[:7])
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"divisors\[1\]"):
            RopeVariant.divided(4, 1e4, [1.0, bad])


@pytest.mark.parametrize(
    "make",
    [
        RopeVariant.default,
        lambda width, theta: RopeVariant.linear(width, theta, 2.0),
        lambda width, theta: RopeVariant.banded(width, theta, **BANDED),
        lambda width, theta: RopeVariant.yarn(width, theta, **YARN),
        lambda width, theta: RopeVariant.divided(width, theta, [1.0]),
    ],
)
def test_variants_refuse_bad_widths_and_thetas(make):
    for width in (3, 0, -2, 1, 2.0, True):
        with pytest.raises(ConfigError, match="width"):
            make(width, 1e4)
    for theta in (0, -1e4, math.nan, math.inf, True, "1e4", None, 10**400):
        with pytest.raises(ConfigError, match="theta"):
            make(2, theta)


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, None])
def test_scaled_variants_refuse_bad_parameters_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        RopeVariant.banded(16, 1e4, **BANDED | {name: value})
    if name in YARN:
        with pytest.raises(ConfigError, match=name):
            RopeVariant.yarn(16, 1e4, **YARN | {name: value})
    if name == "factor":
        with pytest.raises(ConfigError, match=name):
            RopeVariant.linear(16, 1e4, value)


def test_banded_refuses_bands_that_cross():
    for low in (4.0, 5.0):
        with pytest.raises(ConfigError, match="low_freq_factor must be below"):
            RopeVariant.banded(16, 1e4, **BANDED | {"low_freq_factor": low})


def test_yarn_refuses_bad_parameters():
    for name in ("beta_fast", "beta_slow", "attention_factor"):
        with pytest.raises(ConfigError, match=name):
            RopeVariant.yarn(16, 1e4, **YARN, **{name: -1.0})
    with pytest.raises(ConfigError, match="mscale"):
        RopeVariant.yarn(16, 1e4, **YARN, mscale=math.nan, mscale_all_dim=1.0)
    with pytest.raises(ConfigError, match="theta 1"):
        RopeVariant.yarn(16, 1.0, **YARN)


def test_variant_is_a_frozen_value_of_plain_floats():
    variant = RopeVariant(np.array([1.0, 0.5], dtype=np.float32), np.float64(2))
    twin = RopeVariant([1, 0.5], 2)
    assert variant == twin == pickle.loads(pickle.dumps(variant))
    assert hash(variant) == hash(twin)
    assert {type(x) for x in (*variant.inv_freq, variant.scale)} == {float}
    assert variant != RopeVariant([1, 0.5])
    assert variant != RopeVariant([1, 0.25], 2)
    assert variant.width == 4
    assert RopeVariant([1.0]).scale == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        variant.scale = 1.0


def test_variant_refuses_bad_frequencies_and_scales():
    with pytest.raises(ConfigError, match="empty"):
        RopeVariant([])
    for bad in (math.nan, math.inf, -0.5, True, "1"):
        with pytest.raises(ConfigError, match=r"inv_freq\[1\]"):
            RopeVariant([1.0, bad])
    for bad in (math.nan, math.inf, 0.0, -1.0, True, None):
        with pytest.raises(ConfigError, match="scale"):
            RopeVariant([1.0], bad)
    assert RopeVariant([1.0, 0.0]).inv_freq == (1.0, 0.0), "a pair that does not turn is allowed"


# --- Frequencies that depend on the length ---------------------------------------------------------------------------


def at(variant, length):
    """The frequencies and the scale that a sequence of this length turns by."""
    return variant.frequencies(variant.regime(length)), variant.scale


@pytest.mark.parametrize(("width", "theta"), SHAPES)
@pytest.mark.parametrize("length", [1, 16, 17, 4096])
@pytest.mark.parametrize("more", [{}, {"factor": 4.0}, {"factor": 0.5}, {"attention_factor": 1.7}])
def test_against_transformers_longrope(width, theta, length, more):
    lists = {"short_factor": [1.0 + i / 7 for i in range(width // 2)], "long_factor": [4.0] * (width // 2)}
    original = {"original_max_position_embeddings": 16}
    # The oracle's config has 4096 positions, which is the factor where none is given.
    variant = RopeVariant.longrope(width, theta, **{"factor": 256.0, **lists, **original, **more})
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = oracle_config(width, theta, "longrope", **lists, **original, **more)
    inv_freq, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    np.testing.assert_allclose(at(variant, length)[0], inv_freq.numpy(), rtol=1e-6)
    assert variant.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(("width", "theta"), SHAPES)
@pytest.mark.parametrize("length", [1, 4096, 4097, 9000])
def test_against_transformers_dynamic(width, theta, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    variant = RopeVariant.dynamic(width, theta, factor=2.0, original_max_position_embeddings=4096)
    inv_freq, scale = ROPE_INIT_FUNCTIONS["dynamic"](
        oracle_config(width, theta, "dynamic", factor=2.0), "cpu", seq_len=length
    )
    np.testing.assert_allclose(at(variant, length)[0], inv_freq.numpy(), rtol=1e-6)
    assert variant.scale == scale == 1.0
    if length > 4096:
        assert at(variant, length)[0] != at(variant, length + 1)[0] != variant.inv_freq


def test_longrope_of_the_published_lengths():
    """Length 16 of 16 is short and 17 long, and both lists come with one magnitude."""
    variant = RopeVariant.longrope(16, 1e4, **LONGROPE)
    plain = RopeVariant.default(16, 1e4)
    assert at(variant, 16)[0] == plain.inv_freq == variant.inv_freq
    assert at(variant, 17)[0] == pytest.approx([f / 4 for f in plain.inv_freq], rel=1e-15)
    assert variant.scale == pytest.approx(1.224745, abs=1e-6)
    wide = LONGROPE | {"factor": 131072 / 4096, "original_max_position_embeddings": 4096}
    assert RopeVariant.longrope(16, 1e4, **wide).scale == pytest.approx(1.190238, abs=1e-6)
    # A partial rotation has as many factors as it has pairs.
    assert (
        RopeVariant.longrope(12, 1e4, **LONGROPE | {k: [1.0] * 6 for k in ("short_factor", "long_factor")}).width == 12
    )
    for name in ("short_factor", "long_factor"):
        with pytest.raises(ConfigError, match=f"{name.replace('_', ' ')} must be one per rotated pair, 8.*got 7"):
            RopeVariant.longrope(16, 1e4, **LONGROPE | {name: [1.0] * 7})
        with pytest.raises(ConfigError, match=rf"{name}\[2\]"):
            RopeVariant.longrope(16, 1e4, **LONGROPE | {name: [1.0, 1.0, 0.0, *[1.0] * 5]})


def test_tables_are_those_of_the_whole_sequence():
    variant = RopeVariant.longrope(16, 1e4, **LONGROPE)
    plan = RopePlan([variant, LOCAL], [0, 1])
    long = RopePlan([RopeVariant(variant.longer.inv_freq, variant.scale), LOCAL], [0, 1])
    short = RopePlan([RopeVariant(variant.inv_freq, variant.scale), LOCAL], [0, 1])
    for start, seq, length, expected in (
        (3, 2, None, short),
        (3, 2, 17, long),
        (14, 3, None, long),
        (15, 1, 16, short),
    ):
        for one, other in zip(
            build_rope_tables(plan, start, seq, length), build_rope_tables(expected, start, seq), strict=True
        ):
            assert one.tobytes() == other.tobytes()
    assert plan.structure() == short.structure(), "frequencies are bound, wherever they come from"
    assert (plan.regime(16), plan.regime(17), short.regime(17)) == ((0, 0), (1, 0), None)
    assert plan != short
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))


def test_growing_base_refuses_what_has_no_meaning():
    with pytest.raises(ConfigError, match="width of 4 or more"):
        RopeVariant.dynamic(2, 1e4, **DYNAMIC)
    with pytest.raises(ConfigError, match="factor must be at least 1"):
        RopeVariant.dynamic(16, 1e4, **DYNAMIC | {"factor": 0.5})
    with pytest.raises(ConfigError, match="must have 2 frequencies"):
        RopeVariant([1.0, 0.5], longer=LongerList(16, (1.0,)))


# --- From a checkpoint's parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"kind": "default"}, RopeVariant.default(16, 1e4)),
        ({"kind": "linear", "factor": 4}, RopeVariant.linear(16, 1e4, 4)),
        ({"kind": "banded", **BANDED}, RopeVariant.banded(16, 1e4, **BANDED)),
        ({"kind": "yarn", **YARN}, RopeVariant.yarn(16, 1e4, **YARN)),
        ({"kind": "longrope", **LONGROPE}, RopeVariant.longrope(16, 1e4, **LONGROPE)),
        (
            {"kind": "longrope", **LONGROPE, "attention_factor": 1.3},
            RopeVariant.longrope(16, 1e4, **LONGROPE, attention_factor=1.3),
        ),
        ({"kind": "dynamic", **DYNAMIC}, RopeVariant.dynamic(16, 1e4, **DYNAMIC)),
        (
            {"kind": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
            RopeVariant.yarn(16, 1e4, **YARN, beta_fast=16, beta_slow=2, truncate=False),
        ),
        ({"kind": "yarn", **YARN, "attention_factor": 1.0}, RopeVariant.yarn(16, 1e4, **YARN, attention_factor=1.0)),
        (
            {"kind": "yarn", **YARN, "mscale": 0.5, "mscale_all_dim": 1.0},
            RopeVariant.yarn(16, 1e4, **YARN, mscale=0.5, mscale_all_dim=1.0),
        ),
        (
            {"kind": "default", "frequency_divisors": (1,) * 4 + (8,) * 4},
            RopeVariant.divided(16, 1e4, [1] * 4 + [8] * 4),
        ),
        (
            {"kind": "linear", "factor": 2, "frequency_divisors": (1,) * 4 + (8,) * 4},
            RopeVariant.divided(16, 1e4, [2] * 4 + [16] * 4),
        ),
    ],
)
def test_from_parameters_builds_each_kind(params, expected):
    every = dict.fromkeys((*BANDED, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"))
    every |= dict.fromkeys(("truncate", "frequency_divisors"))
    assert RopeVariant.from_parameters(16, SimpleNamespace(theta=1e4, **params)) == expected
    # None and a missing attribute are the same thing.
    assert RopeVariant.from_parameters(16, SimpleNamespace(theta=1e4, **every | params)) == expected


@pytest.mark.parametrize("kind", ["banana", None, 3, "Default", ["default"]])
def test_from_parameters_refuses_an_unknown_kind_and_lists_the_known(kind):
    known = "is not implemented; use one of banded, default, dynamic, linear, longrope, yarn"
    with pytest.raises(ConfigError, match=known) as caught:
        RopeVariant.from_parameters(16, SimpleNamespace(kind=kind, theta=1e4))
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [
        ("default", {}, "theta"),
        ("linear", {"theta": 1e4}, "factor"),
        *(("banded", {"theta": 1e4} | {k: v for k, v in BANDED.items() if k != name}, name) for name in BANDED),
        *(("yarn", {"theta": 1e4} | {k: v for k, v in YARN.items() if k != name}, name) for name in YARN),
        *(("longrope", {"theta": 1e4} | {k: v for k, v in LONGROPE.items() if k != name}, name) for name in LONGROPE),
        *(("dynamic", {"theta": 1e4} | {k: v for k, v in DYNAMIC.items() if k != name}, name) for name in DYNAMIC),
    ],
)
def test_from_parameters_names_what_is_missing(kind, given, missing):
    with pytest.raises(ConfigError, match=f"'{kind}' needs {missing},"):
        RopeVariant.from_parameters(16, SimpleNamespace(kind=kind, **given))


def test_from_parameters_refuses_divisors_beside_computed_bands():
    for kind, parameters in (("banded", BANDED), ("yarn", YARN)):
        with pytest.raises(ConfigError, match=f"'{kind}'.*frequency_divisors"):
            RopeVariant.from_parameters(
                16, SimpleNamespace(kind=kind, theta=1e4, frequency_divisors=(1,) * 8, **parameters)
            )


# --- Plans -----------------------------------------------------------------------------------------------------------

LOCAL, GLOBAL = RopeVariant.default(8, 1e4), RopeVariant.linear(8, 1e6, 8.0)


def test_single_takes_a_variant_or_a_theta():
    plan = RopePlan.single(LOCAL, 3)
    assert plan == RopePlan([LOCAL], [0, 0, 0]) == RopePlan.single(1e4, 3, width=8) == RopePlan.single(LOCAL, 3, 8)
    assert (plan.n_variants, plan.n_layers, plan.width) == (1, 3, 8)
    with pytest.raises(ConfigError, match="needs a width"):
        RopePlan.single(1e4, 3)
    with pytest.raises(ConfigError, match="width 16 contradicts a variant of width 8"):
        RopePlan.single(LOCAL, 3, 16)


def test_per_layer_base_gives_each_layer_its_own():
    plan = RopePlan.per_layer_base(7, 1e4, 1e6, lambda layer: (layer + 1) % 6 > 0, width=8)
    assert plan == RopePlan([RopeVariant.default(8, 1e4), RopeVariant.default(8, 1e6)], [0, 0, 0, 0, 0, 1, 0])
    assert plan.n_variants == 2
    assert [plan.variant_for_layer(layer) for layer in range(7)] == [0, 0, 0, 0, 0, 1, 0]
    cos, _ = build_rope_tables(plan, 50, 1)
    for variant, theta in enumerate((1e4, 1e6)):
        np.testing.assert_allclose(cos[variant], tables_by_hand(RopeVariant.default(8, theta), 50, 1)[0], atol=1e-7)


def test_per_layer_base_of_equal_bases_is_one_variant():
    assert RopePlan.per_layer_base(4, 1e4, 1e4, lambda layer: layer == 0, width=8) == RopePlan.single(LOCAL, 4)
    assert RopePlan.per_layer_base(4, 1e4, 1e5, lambda layer: layer == 0, width=8).n_variants == 2


def test_per_layer_variant_collapses_when_layers_agree_or_variants_are_equal():
    assert RopePlan.per_layer_variant(3, LOCAL, GLOBAL, lambda layer: True) == RopePlan.single(LOCAL, 3)
    assert RopePlan.per_layer_variant(3, LOCAL, GLOBAL, lambda layer: False) == RopePlan.single(GLOBAL, 3)
    assert RopePlan.per_layer_variant(3, GLOBAL, GLOBAL, lambda layer: layer == 1) == RopePlan.single(GLOBAL, 3)
    assert RopePlan.per_layer_variant(3, LOCAL, GLOBAL, lambda layer: layer == 1) == RopePlan(
        [LOCAL, GLOBAL], [1, 0, 1]
    )


def test_per_layer_variant_compares_the_whole_variant():
    same_angles = RopeVariant(LOCAL.inv_freq, 1.5)
    plan = RopePlan.per_layer_variant(2, LOCAL, same_angles, lambda layer: layer == 0)
    assert plan.n_variants == 2, "equal frequencies with another scale are another table"
    same_theta = RopeVariant.linear(8, 1e4, 2.0)
    assert RopePlan.per_layer_variant(2, LOCAL, same_theta, lambda layer: layer == 0).n_variants == 2


def test_per_layer_variant_of_no_layers_keeps_both():
    assert RopePlan.per_layer_variant(0, LOCAL, GLOBAL, lambda layer: True) == RopePlan([LOCAL, GLOBAL], [])
    assert RopePlan.per_layer_variant(0, LOCAL, LOCAL, lambda layer: True) == RopePlan([LOCAL], [])


def test_plan_refuses_a_layer_with_an_undefined_variant_and_names_both():
    with pytest.raises(ConfigError, match=r"RopePlan: layer 1 selects variant 1.* defines 1"):
        RopePlan([LOCAL], [0, 1])
    for bad in (-1, True, 0.0, None):
        with pytest.raises(ConfigError, match="layer 2"):
            RopePlan([LOCAL, GLOBAL], [0, 1, bad])


def test_plan_refuses_no_variants_and_bare_numbers():
    with pytest.raises(ConfigError, match="at least one"):
        RopePlan([], [])
    with pytest.raises(ConfigError, match="variant 1 must be a RopeVariant"):
        RopePlan([LOCAL, 1e4], [0])


@pytest.mark.parametrize("n_layers", [-1, True, 2.0])
def test_plan_refuses_a_layer_count_that_is_none(n_layers):
    with pytest.raises(ConfigError, match="n_layers"):
        RopePlan.single(LOCAL, n_layers)
    with pytest.raises(ConfigError, match="n_layers"):
        RopePlan.per_layer_variant(n_layers, LOCAL, GLOBAL, lambda layer: True)


@pytest.mark.parametrize("layer", [-1, 3])
def test_plan_refuses_to_answer_for_a_layer_it_does_not_have(layer):
    with pytest.raises(ConfigError, match=f"RopePlan: no layer {layer}.* 3 layers"):
        RopePlan.single(LOCAL, 3).variant_for_layer(layer)


def test_plan_is_a_frozen_value_whether_or_not_tables_were_built():
    plan, twin = RopePlan([LOCAL, GLOBAL], [0, 1]), RopePlan((LOCAL, GLOBAL), (0, 1))
    text, number = repr(plan), hash(plan)
    before = build_rope_tables(plan, 5, 2)
    assert plan == twin
    assert (repr(plan), hash(plan)) == (text, number) == (repr(twin), hash(twin))
    for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), dataclasses.replace(plan)):
        assert copied == plan
        for one, other in zip(before, build_rope_tables(copied, 5, 2), strict=True):
            assert one.tobytes() == other.tobytes()
    replaced = dataclasses.replace(plan, variants=(GLOBAL, LOCAL))
    assert build_rope_tables(replaced, 5, 2)[0][0].tobytes() == before[0][1].tobytes()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.variants = ()


# --- What is baked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        RopeVariant.default(8, 5e5),
        RopeVariant.banded(8, 1e4, **BANDED),
        RopeVariant(LOCAL.inv_freq, 1.5),
    ],
)
def test_structure_leaves_frequencies_and_scales_out(other):
    assert RopePlan.single(other, 3).structure() == RopePlan.single(LOCAL, 3).structure()
    assert key_of(RopePlan.single(other, 3)) == key_of(RopePlan.single(LOCAL, 3))
    assert key_of(RopePlan([other, GLOBAL], [0, 1])) == key_of(RopePlan([LOCAL, GLOBAL], [0, 1]))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(RopePlan([LOCAL, GLOBAL], [1, 0]), id="assignment"),
        pytest.param(RopePlan([LOCAL, GLOBAL], [0, 1, 1]), id="layers"),
        pytest.param(RopePlan([LOCAL, GLOBAL, GLOBAL], [0, 1]), id="variants"),
        pytest.param(RopePlan([LOCAL, RopeVariant.default(16, 1e6)], [0, 1]), id="width"),
        pytest.param(RopePlan([RopeVariant.default(16, 1e4), RopeVariant.default(16, 1e6)], [0, 1]), id="widths"),
    ],
)
def test_structure_sees_everything_else(other):
    plan = RopePlan([LOCAL, GLOBAL], [0, 1])
    assert other.structure() != plan.structure()
    assert key_of(other) != key_of(plan)
    assert key_of(RopePlan([LOCAL, GLOBAL], [0, 1])) == key_of(plan)


# --- Tables ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([1e4, 1e6]), st.sampled_from([1.0, 1.25])), min_size=1, max_size=3
    ),
    st.integers(0, 100_000),
    st.integers(1, 4),
)
def test_tables_equal_the_formula_by_hand(shapes, start, seq):
    variants = [RopeVariant(RopeVariant.default(2 * pairs, theta).inv_freq, scale) for pairs, theta, scale in shapes]
    plan = RopePlan(variants, [0])
    cos, sin = build_rope_tables(plan, start, seq)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (len(variants), seq, plan.width)
    assert plan.width == max(variant.width for variant in variants)
    for index, variant in enumerate(variants):
        for table, expected in zip((cos, sin), tables_by_hand(variant, start, seq), strict=True):
            # The last bit: numpy's cos and the platform's may round differently in float64.
            np.testing.assert_allclose(table[index, :, : variant.width], expected, atol=2e-7)
            assert not table[index, :, variant.width :].any(), "beyond a variant's own width both tables are zero"


def test_tables_are_laid_out_in_halves():
    cos, sin = build_rope_tables(RopePlan([RopeVariant.default(8, 1e4), RopeVariant.default(4, 1e4)], [0, 1]), 3, 2)
    for table in (cos, sin):
        assert (table[0, :, :4] == table[0, :, 4:]).all()
        assert (table[1, :, :2] == table[1, :, 2:4]).all()
        # Neighbouring columns differ, so an interleaved layout could not pass.
        assert (table[0, :, 0] != table[0, :, 1]).all()
    assert cos[0, 0, 0] == pytest.approx(math.cos(3.0))
    assert sin[0, 0, 0] == pytest.approx(math.sin(3.0))
    assert sin[0, 1, 0] == pytest.approx(math.sin(4.0))


def test_tables_at_position_zero_do_not_turn():
    cos, sin = build_rope_tables(RopePlan.single(RopeVariant(LOCAL.inv_freq, 1.5), 1), 0, 1)
    assert (cos == 1.5).all()
    assert (sin == 0.0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 9))
def test_decode_rows_equal_the_prefill_rows_at_their_positions(start, seq):
    plan = RopePlan([LOCAL, GLOBAL], [0, 1])
    for whole, rows in zip(
        build_rope_tables(plan, start, seq),
        zip(*(build_rope_tables(plan, start + row, 1) for row in range(seq)), strict=True),
        strict=True,
    ):
        np.testing.assert_array_equal(whole, np.concatenate(rows, axis=1))


@pytest.mark.parametrize("position", [256, 257, 100_003, 1_000_003])
def test_tables_are_exact_at_positions_that_short_floats_cannot_tell_apart(position):
    import torch

    assert torch.tensor(257, dtype=torch.bfloat16).item() == 256
    variant = RopeVariant.default(64, 1e4)
    cos, sin = build_rope_tables(RopePlan.single(variant, 1), position, 1)
    for table, expected in zip((cos, sin), tables_by_hand(variant, position, 1), strict=True):
        # Measured 3e-8, one rounding to float32. Angles in float32 miss by 6e-6 at 257 and 2e-2 at the last position,
        # frequencies kept in bfloat16 by 5e-2 at 257.
        assert np.abs(table[0] - expected).max() < 1e-6
    assert np.abs(cos - build_rope_tables(RopePlan.single(variant, 1), position - 1, 1)[0]).max() > 1e-2


def test_linear_scaling_is_the_divided_position():
    # Global layers divide the position by 8, local ones do not.
    plan = RopePlan.per_layer_variant(6, LOCAL, GLOBAL, lambda layer: (layer + 1) % 6 > 0)
    cos, sin = build_rope_tables(plan, 96, 1)
    unscaled = build_rope_tables(RopePlan.single(1e6, 1, width=8), 12, 1)
    np.testing.assert_allclose(cos[1], unscaled[0][0], atol=1e-7)
    np.testing.assert_allclose(sin[1], unscaled[1][0], atol=1e-7)
    np.testing.assert_array_equal(cos[0], build_rope_tables(RopePlan.single(1e4, 1, width=8), 96, 1)[0][0])


def test_tables_are_fresh_arrays_that_may_be_written():
    plan = RopePlan.single(LOCAL, 1)
    first = build_rope_tables(plan, 7, 1)
    kept = first[0].copy()
    first[0][:] = 0.0
    assert build_rope_tables(plan, 7, 1)[0].tobytes() == kept.tobytes()


@pytest.mark.parametrize(("start", "seq"), [(0, 0), (-1, 1), (3, -1)])
def test_tables_refuse_a_step_without_tokens_or_before_the_start(start, seq):
    with pytest.raises(DecodeError, match="at least one token"):
        build_rope_tables(RopePlan.single(LOCAL, 1), start, seq)
