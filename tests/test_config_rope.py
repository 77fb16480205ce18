"""RoPE parameters: every published spelling gives one and the same spec, and nothing unknown is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint_writers import TINY, reader, resolve

from fuel_core.checkpoint import ConfigReader, RawConfig, RopeParameters
from fuel_core.errors import ConfigError

BANDED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}


def test_both_type_keys_mean_the_same() -> None:
    old = {k: v for k, v in BANDED.items() if k != "rope_type"} | {"type": "llama3"}
    rope = reader(rope_scaling=BANDED).rope()
    assert rope.kind == "banded"
    assert rope == reader(rope_scaling=old).rope()
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (8.0, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 32
    assert rope != reader().rope()


def test_old_and_new_spelling_give_equal_specs() -> None:
    scaling = {**BANDED, "factor": 32.0, "original_max_position_embeddings": 8192}
    common = {**TINY, "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": ...}
    plain = {k: v for k, v in common.items() if v is not ...}
    old = {**plain, "rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    new = {**plain, "rope_parameters": {**scaling, "rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert resolve(old) == resolve(new)
    assert hash(resolve(old)) == hash(resolve(new))
    assert resolve(new).rope.theta == 500000.0


def test_per_layer_type_blocks_give_the_same_as_two_bases() -> None:
    old = reader(rope_theta=1000000, rope_local_base_freq=10000, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = reader(
        rope_theta=...,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )

    def both(r: ConfigReader) -> tuple[RopeParameters, RopeParameters]:
        return (
            r.rope(layer_type="full_attention"),
            r.rope(layer_type="sliding_attention", theta_key="rope_local_base_freq", scaled=False, into="rope_local"),
        )

    assert both(old) == both(new)
    full, local = both(new)
    assert (full.theta, full.kind, full.factor) == (1e6, "linear", 8.0)
    assert (local.theta, local.kind, local.factor) == (1e4, "default", None)


def test_per_layer_type_blocks_cannot_be_read_as_one() -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=r"one per layer type \(full_attention, sliding_attention\)"):
        reader(rope_theta=..., rope_parameters=nested).rope()
    same = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}
    assert reader(rope_theta=..., rope_parameters=same).rope().theta == 1e6


def test_missing_base_is_an_error_unless_the_family_states_one() -> None:
    with pytest.raises(ConfigError, match=r"expected 'rope_theta'.*found nothing"):
        reader(rope_theta=...).rope()
    with pytest.raises(ConfigError, match="'rope_theta'"):
        reader(rope_theta=..., rope_parameters={"rope_type": "default"}).rope()
    r = reader({"rope_theta": 10000.0}, rope_theta=...)
    assert r.rope().theta == 10000.0
    spec = resolve({k: v for k, v in TINY.items() if k != "rope_theta"}, {"rope_theta": 5000})
    assert spec.rope.theta == 5000.0
    assert "family default" in spec.sources["rope"]


def test_unknown_type_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'banana'.*default, dynamic, linear, llama3, longrope, none, su, yarn"):
        reader(rope_scaling={"rope_type": "banana", "factor": 2.0}).rope()
    with pytest.raises(ConfigError, match="unknown RoPE type 7"):
        reader(rope_scaling={"type": 7}).rope()


def test_kind_the_family_does_not_implement_is_refused_by_name() -> None:
    r = reader(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert r.rope().kind == "dynamic"
    with pytest.raises(ConfigError, match=r"'dynamic'.*not implemented.*one of default, banded"):
        r.rope(kinds=("default", "banded"))


def test_unknown_key_is_refused_unless_the_family_reads_it() -> None:
    block = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "scaling_beta": 0.1}
    with pytest.raises(ConfigError, match="unknown RoPE key 'scaling_beta'"):
        reader(rope_scaling=block).rope()
    assert reader(rope_scaling=block).rope(allow=("scaling_beta",)).extra == (("scaling_beta", 0.1),)


@pytest.mark.parametrize(
    "absent", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
)
def test_banded_without_one_of_its_numbers_names_it(absent: str) -> None:
    with pytest.raises(ConfigError, match=f"needs {absent}"):
        reader(rope_scaling={k: v for k, v in BANDED.items() if k != absent}).rope()


@pytest.mark.parametrize("value", ["8", True, 0, -1, float("nan"), float("inf"), None])
def test_impossible_factor_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="factor"):
        reader(rope_scaling={**BANDED, "factor": value}).rope()


def test_yarn_keeps_every_number_and_takes_the_limit_as_original_length() -> None:
    block = {"type": "yarn", "factor": 4.0, "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": False}
    rope = reader(rope_scaling=block).rope()
    assert (rope.kind, rope.factor, rope.attention_factor) == ("yarn", 4.0, 1.0)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, False)
    assert rope.original_max_position_embeddings == 128
    explicit = reader(rope_scaling={**block, "original_max_position_embeddings": 32}).rope()
    assert explicit.original_max_position_embeddings == 32


def test_scaling_added_by_hand_to_a_newer_file_keeps_the_base() -> None:
    added = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = reader(
        rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=added
    ).rope()
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 1e6, 4.0)


def test_longrope_spellings_agree_and_the_lists_have_half_the_rotated_width() -> None:
    lists = {"short_factor": [1.0] * 9, "long_factor": [4.0] * 9}
    base = {"head_dim": 24, "original_max_position_embeddings": 16, "max_position_embeddings": 64}
    old = reader(**base, partial_rotary_factor=0.75, rope_scaling={**lists, "type": "su"}).rope()
    new = reader(
        head_dim=24,
        max_position_embeddings=64,
        rope_theta=...,
        rope_parameters={
            **lists,
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
        },
    ).rope()
    assert old == new
    assert hash(old) == hash(new)
    assert old.rotary_width(24) == 18
    assert old.factor == 4.0
    with pytest.raises(ConfigError, match="expected 12 numbers in 'short_factor'"):
        reader(**base, rope_scaling={**lists, "type": "longrope"}).rope()


@pytest.mark.parametrize(
    ("factor", "head_dim", "width"), [(0.4, 80, 32), (0.5, 64, 32), (0.75, 128, 96), (1.0, 16, 16)]
)
def test_rotary_width_is_the_truncated_share(factor: float, head_dim: int, width: int) -> None:
    assert RopeParameters("default", 1e4, factor).rotary_width(head_dim) == width


def test_rotary_width_survives_a_share_made_by_dividing() -> None:
    for head_dim in range(2, 300, 2):
        for width in range(2, head_dim + 1, 2):
            assert RopeParameters("default", 1e4, width / head_dim).rotary_width(head_dim) == width


def test_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 1"):
        reader(partial_rotary_factor=1.5).rope()


def test_default_kind_ignores_numbers_that_change_nothing() -> None:
    assert reader(rope_scaling={"rope_type": "default", "factor": 8.0}).rope() == reader().rope()


def test_block_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="'rope_scaling' to be an object"):
        reader(rope_scaling=["llama3"]).rope()


def test_nested_decoder_keys_reach_the_rope_block() -> None:
    text: dict[str, Any] = {**TINY, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    rope = ConfigReader(RawConfig.from_config({"model_type": "outer", "text_config": text})).rope()
    assert (rope.kind, rope.factor) == ("linear", 8.0)


# -- half-migrated files and contradictions -----------------------------------------------------------------------


def test_half_migrated_file_takes_the_block_then_what_stands_beside_it_then_the_family() -> None:
    """The rule: nested, else flat, else the family's default."""
    flat = reader(rope_theta=5000.0, rope_parameters={"rope_type": "linear", "factor": 2.0}).rope()
    nested = reader(rope_theta=..., rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000}).rope()
    family = reader({"rope_theta": 5000}, rope_theta=..., rope_parameters={"rope_type": "linear", "factor": 2.0}).rope()
    assert flat == nested == family
    assert flat.theta == 5000.0
    share = reader(partial_rotary_factor=0.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).rope()
    assert share.partial_rotary_factor == 0.5
    original = reader(original_max_position_embeddings=32, rope_parameters={"rope_type": "yarn", "factor": 4.0}).rope()
    assert original.original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            r"rope_parameters\.rope_theta and rope_theta to agree, found 10000\.0 and 1000000\.0",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            r"rope_parameters\.partial_rotary_factor and partial_rotary_factor to agree, found 0\.25 and 0\.5",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            r"rope_type and type to agree, found 'yarn' and 'linear'",
        ),
        (
            {"rope_scaling": {"type": "banana", "rope_type": "default"}},
            r"rope_type and type to agree, found 'default' and 'banana'",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            },
            r"rope_scaling\.rope_type and rope_parameters\.rope_type to agree, found 'linear' and 'yarn'",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            r"rope_scaling\.factor and rope_parameters\.factor to agree, found 2\.0 and 4\.0",
        ),
    ],
)
def test_two_values_for_one_fact_are_refused_by_both_names(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        reader(**changes).rope()
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_original_length_of_the_block_counts_before_the_one_beside_it(key: str) -> None:
    """As the reference does it, save for one family, which puts the outer one into its block itself."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    if key == "rope_scaling":
        assert (
            reader(rope_scaling=block, original_max_position_embeddings=64).rope().original_max_position_embeddings
            == 32
        )
        return
    with pytest.raises(
        ConfigError, match=r"rope_parameters\.original_max_position_embeddings and original_max_position"
    ):
        reader(rope_parameters=block, original_max_position_embeddings=64).rope()


# Finite, and yet no frequency comes of it that is.
@pytest.mark.parametrize("value", [1e-320, 1e-10, 1e10, 1e308])
@pytest.mark.parametrize(
    "key", ["factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale"]
)
def test_number_far_from_every_rotation_is_refused_by_its_key(key: str, value: float) -> None:
    if key == "mscale" and value < 1.0:
        return
    with pytest.raises(ConfigError, match=rf"'config\.json: rope_scaling: {key}' to be a number .*at most 1e\+09"):
        reader(rope_scaling={**BANDED, key: value}).rope()


@pytest.mark.parametrize(("value", "in_block"), [(1e-320, False), (1e31, False), (1e-10, True), (1e308, True)])
def test_base_far_from_every_base_is_refused(value: float, in_block: bool) -> None:
    changes: dict[str, Any] = {"rope_parameters": {"rope_theta": value}, "rope_theta": None}
    with pytest.raises(ConfigError, match=r"rope_theta' to be a number of at least 1e-09 and at most 1e\+30"):
        reader(**changes if in_block else {"rope_theta": value}).rope()


def test_base_of_one_has_no_bands() -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.raises(ConfigError, match=r"rope_theta to differ from 1 where the RoPE type is 'yarn'"):
        reader(rope_theta=1.0, rope_scaling=block).rope()
    assert reader(rope_theta=1.0).rope().theta == 1.0


@pytest.mark.parametrize("key", ["original_max_position_embeddings", "partial_rotary_factor", "truncate"])
def test_value_inside_the_block_is_refused_with_the_block(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"'config\.json: rope_scaling: {key}' to be"):
        reader(rope_scaling={**BANDED, "rope_type": "yarn", key: "7"}).rope()


def test_two_values_that_agree_are_one() -> None:
    plain = reader(rope_scaling={"rope_type": "linear", "factor": 2.0}).rope()
    both = reader(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0}).rope()
    again = reader(
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000},
    ).rope()
    assert plain == both == again
    assert reader(rope_scaling={"type": "su", "rope_type": "longrope"}, rope_theta=...).raw
    words = {"type": "su", "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    assert reader(rope_scaling=words, original_max_position_embeddings=32).rope().kind == "longrope"


@pytest.mark.parametrize(("head_dim", "share"), [(32, 0.1), (32, 0.01), (33, 1.0), (1, 1.0)])
def test_rotated_width_must_be_even_and_at_least_two(head_dim: int, share: float) -> None:
    with pytest.raises(ConfigError, match="an even number of rotated dimensions"):
        reader(head_dim=head_dim, partial_rotary_factor=share).rope()
