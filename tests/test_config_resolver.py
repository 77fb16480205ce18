"""Config values: types, sources, defaults, nesting, head width, dtype, quantisation."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
from checkpoint_writers import TINY, reader, resolve

from fuel_core.checkpoint import ConfigReader, DecoderConfig, RawConfig
from fuel_core.errors import ConfigError, UnsupportedCheckpointError
from fuel_core.testing.hostile import keys_read


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("int", "7", "an integer"),
        ("int", True, "an integer"),
        ("int", 7.0, "an integer"),
        ("int", 0, "at least 1"),
        ("int", 1 << 80, "below 2^62"),
        ("int", [7], "an integer"),
        ("float", "1e-5", "a number"),
        ("float", False, "a number"),
        ("float", float("nan"), "a finite number"),
        ("float", float("inf"), "a finite number"),
        ("float", 10**400, "a finite number"),
        ("float", 0, "above 0"),
        ("bool", 1, "true or false"),
        ("bool", "true", "true or false"),
        ("str", 3, "a non-empty string"),
        ("str", "", "a non-empty string"),
        ("ids", [1, "2"], "an integer"),
        ("ids", -1, "at least 0"),
        ("list", {"a": 1}, "a list"),
    ],
)
def test_getter_refuses_another_type_in_one_line(method: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        getattr(reader(key=value), method)("key")
    text = str(error.value)
    assert expected in text
    assert "config.json" in text
    assert "'toy'" in text
    assert "\n" not in text


def test_getter_accepts_an_integer_for_a_number_and_keeps_it_exact() -> None:
    assert reader(rope_theta=1000000).float("rope_theta") == 1e6


def test_getter_names_the_missing_key_and_says_null_when_it_is_null() -> None:
    with pytest.raises(ConfigError, match=r"'head_count'.*found nothing"):
        reader().int("head_count")
    with pytest.raises(ConfigError, match=r"'head_count'.*found null"):
        reader(head_count=None).int("head_count")


def test_value_comes_from_file_then_family_then_getter() -> None:
    assert reader({"k": 5}, k=4).int("k", 6) == 4
    assert reader({"k": 5}).int("k", 6) == 5
    assert reader({"k": 5}, k=None).int("k", 6) == 5
    assert reader().int("k", 6) == 6


def test_optional_value_keeps_null_apart_from_absent() -> None:
    assert reader({"sliding_window": 512}, sliding_window=None).optional_int("sliding_window") is None
    assert reader({"sliding_window": 512}).optional_int("sliding_window") == 512
    assert reader().optional_int("sliding_window") is None


def test_key_published_under_another_name_is_read_and_named() -> None:
    raw = RawConfig.from_config({"n_embd": 96, "rotary_pct": "x", "n_head": None, "num_attention_heads": 4})
    renamed = raw.renamed({"n_embd": "hidden_size", "rotary_pct": "share", "n_head": "num_attention_heads", "n": "m"})
    assert renamed["hidden_size"] == 96
    assert renamed.source("hidden_size") == "config.json: n_embd"
    assert renamed["num_attention_heads"] == 4
    assert renamed.source("num_attention_heads") == "config.json"
    assert "m" not in renamed
    assert "hidden_size" not in raw
    with pytest.raises(ConfigError, match=r"config.json: rotary_pct: expected 'share' to be a number"):
        ConfigReader(renamed, {}, family="toy").float("share")


def test_contradiction_names_the_key_that_was_read_under_another_name() -> None:
    raw = RawConfig.from_config(
        {"rotary_emb_base": 5000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    renamed = raw.renamed({"rotary_emb_base": "rope_theta"})
    with pytest.raises(ConfigError, match=r"rope_theta and rope_theta \(config.json: rotary_emb_base\) to agree"):
        ConfigReader(renamed, {}, family="toy").rope()


def test_keys_that_are_read_after_a_renaming_are_watched_too() -> None:
    """Else the kit would give hostile values to none of them."""
    raw = RawConfig.from_config({"n_embd": 96, "vocab_size": 7})
    assert keys_read(lambda raw: raw.renamed({"n_embd": "hidden_size"})["vocab_size"], raw) == [
        "hidden_size",
        "n_embd",
        "vocab_size",
    ]


def test_key_published_under_two_names_must_agree() -> None:
    same = RawConfig.from_config({"n_embd": 96, "hidden_size": 96}).renamed({"n_embd": "hidden_size"})
    assert same.source("hidden_size") == "config.json"
    with pytest.raises(ConfigError, match=r"expected 'n_embd' and 'hidden_size' to agree, found 96 and 64; correct"):
        RawConfig.from_config({"n_embd": 96, "hidden_size": 64}).renamed({"n_embd": "hidden_size"})


def test_items_outside_the_choices_are_refused_with_their_place() -> None:
    assert reader(kinds=["a", "b"]).list("kinds", choices=("a", "b")) == ("a", "b")
    with pytest.raises(ConfigError, match=r"config.json: expected kinds\[1\] to be a or b, found 'c'.*toy"):
        reader(kinds=["a", "c"]).list("kinds", choices=("a", "b"))
    with pytest.raises(ConfigError, match=r"expected kinds\[0\] to be a or b, found \[\]"):
        reader(kinds=[[]]).list("kinds", choices=("a", "b"))


def test_string_outside_the_choices_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"one of gelu, silu, found 'gegelu'"):
        reader(hidden_act="gegelu").str("hidden_act", choices=("gelu", "silu"))


def test_ids_accept_one_integer_a_list_and_null() -> None:
    assert reader(eos_token_id=2).ids("eos_token_id") == (2,)
    assert reader(eos_token_id=[128001, 128008, 128009]).ids("eos_token_id") == (128001, 128008, 128009)
    assert reader(eos_token_id=None).ids("eos_token_id") == ()
    assert reader().ids("eos_token_id") == ()


def test_list_of_wrong_length_names_both_lengths() -> None:
    with pytest.raises(ConfigError, match="expected 7 items in 'layer_types', found 2"):
        reader(layer_types=["a", "b"]).list("layer_types", length=7)


def test_every_field_has_the_source_of_its_value() -> None:
    spec = resolve({**TINY, "head_dim": None, "torch_dtype": "bfloat16"}, {"tie_word_embeddings": True})
    assert spec.sources["hidden_size"] == "config.json"
    assert spec.sources["tie_word_embeddings"] == "family default"
    assert spec.sources["head_dim"] == "derived: hidden_size / num_attention_heads"
    assert spec.sources["dtype"] == "config.json: torch_dtype"
    assert spec.sources["hidden_act"] == "default"
    assert set(spec.sources) == set(spec.__dataclass_fields__) - {"sources"}


def test_spec_is_frozen_hashable_and_blind_to_sources() -> None:
    one = resolve({**TINY, "torch_dtype": "bfloat16"})
    other = resolve({**TINY, "dtype": "bfloat16"})
    assert one.sources != other.sources
    assert one == other
    assert hash(one) == hash(other)
    assert "config.json" not in repr(one)
    assert hash(one) != hash(resolve({**TINY, "dtype": "bfloat16", "vocab_size": 41}))
    with pytest.raises(FrozenInstanceError):
        one.vocab_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
def test_spec_is_copied_with_its_sources_and_stays_frozen(how: Any) -> None:
    spec = resolve(TINY)
    other = how(spec)
    assert other is not spec
    assert other == spec
    assert dict(other.sources) == dict(spec.sources) != {}
    with pytest.raises(TypeError):
        other.sources["hidden_size"] = "elsewhere"
    with pytest.raises(FrozenInstanceError):
        other.hidden_size = 1


def test_spec_of_a_family_extends_the_common_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class ToyConfig(DecoderConfig):
        softcap: float | None = None

    r = reader(softcap=30.0)
    spec = r.finish(ToyConfig, **r.common(), rope=r.rope(), softcap=r.optional_float("softcap"))
    assert spec.softcap == 30.0
    assert spec.sources["softcap"] == "config.json"
    assert hash(spec) != hash(r.finish(ToyConfig, **r.common(), rope=r.rope()))


# -- head width ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "heads", "head_dim"), [(5120, 32, 128), (1024, 16, 128), (2560, 32, 128), (3072, 16, 256), (64, 4, 32)]
)
def test_explicit_head_dim_wins_over_the_quotient(hidden: int, heads: int, head_dim: int) -> None:
    r = reader(hidden_size=hidden, num_attention_heads=heads, head_dim=head_dim)
    assert r.head_dim() == head_dim
    assert hidden // heads != head_dim


def test_head_dim_is_derived_when_absent_or_null_and_must_divide() -> None:
    assert reader(head_dim=...).head_dim() == 24
    assert reader(head_dim=None).head_dim() == 24
    with pytest.raises(ConfigError, match="hidden_size 96 to be a multiple of num_attention_heads 7"):
        reader(head_dim=..., num_attention_heads=7).head_dim()


def test_key_value_heads_default_to_the_heads_and_must_divide_them() -> None:
    assert reader(num_key_value_heads=...).common()["num_key_value_heads"] == 4
    with pytest.raises(ConfigError, match="multiple of num_key_value_heads, found 3"):
        reader(num_key_value_heads=3).common()


# -- dtype --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("word", ["bfloat16", "torch.bfloat16", "bf16"])
def test_dtype_is_read_in_both_spellings_at_both_levels(key: str, word: str) -> None:
    assert reader(**{key: word}).dtype() == "bfloat16"
    nested = RawConfig.from_config({"model_type": "outer", "text_config": {**TINY, key: word}})
    assert nested.dtype == "bfloat16"
    assert ConfigReader(nested).dtype() == "bfloat16"


def test_dtype_that_is_unknown_is_refused_and_absent_is_float32() -> None:
    with pytest.raises(ConfigError, match="float8"):
        reader(dtype="float8").dtype()
    r = reader()
    assert r.dtype() == "float32"


def test_dtype_null_in_the_nested_level_leaves_the_outer_one() -> None:
    raw = RawConfig.from_config({"torch_dtype": "bfloat16", "text_config": {**TINY, "torch_dtype": None}})
    assert raw.dtype == "bfloat16"


# -- nesting ------------------------------------------------------------------------------------------------------


def test_nested_key_wins_and_its_source_says_so() -> None:
    raw = RawConfig.from_config(
        {
            "model_type": "outer",
            "vocab_size": 1,
            "image_token_index": 10,
            "vision_config": {"hidden_size": 7},
            "text_config": {"model_type": "inner", "vocab_size": 40, "hidden_size": 96},
        }
    )
    assert raw["vocab_size"] == 40
    assert raw.source("vocab_size") == "config.json: text_config"
    assert raw["hidden_size"] == 96
    assert raw["image_token_index"] == 10
    assert raw.source("image_token_index") == "config.json"
    assert raw.model_type == "outer"
    assert raw.nested_model_type == "inner"


def test_nested_key_that_is_null_does_not_hide_the_outer_value() -> None:
    raw = RawConfig.from_config({"vocab_size": 40, "text_config": {"vocab_size": None, "sliding_window": None}})
    assert raw["vocab_size"] == 40
    assert "sliding_window" in raw


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, True, True), (True, None, True), (False, True, True), (True, False, True), (False, None, False)],
)
def test_tie_flag_counts_at_any_level(outer: bool | None, inner: bool | None, tied: bool) -> None:
    config: dict[str, Any] = {"model_type": "outer", "text_config": dict(TINY)}
    if outer is not None:
        config["tie_word_embeddings"] = outer
    if inner is not None:
        config["text_config"]["tie_word_embeddings"] = inner
    assert ConfigReader(RawConfig.from_config(config)).common()["tie_word_embeddings"] is tied


def test_nested_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="an object under 'text_config', found list"):
        RawConfig.from_config({"text_config": [1]})


# -- quantisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({}, "unnamed"),
    ],
)
def test_quantised_checkpoint_is_refused_by_name_and_finish_does_not_forget(block: object, name: str) -> None:
    r = reader(quantization_config=block)
    for refuse in (r.reject_quantized, r.common, lambda: r.finish(DecoderConfig)):
        with pytest.raises(UnsupportedCheckpointError, match=f"quantised with '{name}'"):
            refuse()


def test_quantisation_inside_the_nested_level_is_seen_and_null_is_none() -> None:
    nested = RawConfig.from_config({"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    assert nested.quantization == "fp8"
    assert reader(quantization_config=None).raw.quantization is None


def test_more_layers_than_any_model_has_are_refused_before_a_family_lists_them() -> None:
    """A family may make a tuple with an entry for each layer, which 10**9 layers would make last."""
    assert reader(num_hidden_layers=10_000).common()["num_hidden_layers"] == 10_000
    with pytest.raises(ConfigError, match=r"num_hidden_layers.* at most 10000, found 10001"):
        reader(num_hidden_layers=10_001).common()


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"_load_in_8bit": True}, "bitsandbytes"),
        ({"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq"),
        ({"bits": 4, "group_size": 128, "zero_point": True}, "awq"),
        ({"bits": 4, "group_size": 64}, "mlx"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ("fp8", "fp8"),
        ([], "unnamed"),
        (False, "unnamed"),
        ({"quant_method": 7}, "unnamed"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_quantisation_is_named_by_its_keys_where_it_gives_no_name(key: str, block: object, name: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"quantised with '{name}'") as error:
        reader(**{key: block}).common()
    assert f"(config.json: {key})" in str(error.value)


# -- ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [0, -1, 1 << 25, 1 << 70, "96", 96.0, True, [96], {}])
def test_size_that_no_model_has_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' to be an integer") as error:
        reader(**{key: value, "head_dim": 2}).common()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "num_hidden_layers", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, "2", 2.0, True, [2], {}])
def test_count_of_another_type_or_sign_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' to be an integer"):
        reader(**{key: value}).common()


def test_int_has_a_most_that_it_may_be() -> None:
    assert reader(num_experts=8).int("num_experts", maximum=8) == 8
    with pytest.raises(ConfigError, match=r"'num_experts' to be an integer of at most 8, found 9"):
        reader(num_experts=9).int("num_experts", maximum=8)


def test_list_of_another_length_than_there_are_layers_names_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"expected 2 items in 'layer_types' \(num_hidden_layers\), found 3"):
        reader(num_hidden_layers=2, layer_types=["a"] * 3).list("layer_types", length=2)


def test_heads_are_bounded_in_their_product() -> None:
    assert reader(head_dim=1 << 22).common()["head_dim"] == 1 << 22
    with pytest.raises(ConfigError, match=r"num_attention_heads times head_dim .*found 4 times 8388608"):
        reader(head_dim=1 << 23).common()


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf"), "30", True, [30.0]])
def test_cap_is_null_or_above_zero(value: object) -> None:
    assert reader(cap=None).optional_float("cap") is None
    assert reader(cap=30).optional_float("cap") == 30.0
    with pytest.raises(ConfigError, match="'cap' to be a"):
        reader(cap=value).optional_float("cap")


def test_keys_that_nobody_reads_are_tolerated() -> None:
    junk = {"auto_map": {"a": "b"}, "_name_or_path": "../x", "use_cache": None, "x": [{}, "\ud800", 10**300]}
    assert resolve({**TINY, **junk}) == resolve(TINY)


# -- two values for one fact --------------------------------------------------------------------------------------


def test_two_dtypes_are_refused_by_both_names_unless_they_are_one() -> None:
    assert reader(dtype="bfloat16", torch_dtype="torch.bfloat16").dtype() == "bfloat16"
    assert reader(dtype="bfloat16", torch_dtype=None).dtype() == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype and torch_dtype to agree, found 'bfloat16' and 'float32'"):
        reader(dtype="bfloat16", torch_dtype="float32").common()


def test_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as error:
        reader(hidden_size="9" * 100_000).common()
    assert len(str(error.value)) < 300
    with pytest.raises(ConfigError, match="found int too long to show"):
        reader(hidden_size=10**5000).common()
