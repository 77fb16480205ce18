"""GGUF files: honest ones give the numbers, names and config of the model; lying ones are refused at once."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_writers import (
    TINY,
    gguf_bytes,
    gguf_entry,
    gguf_pair,
    gguf_string,
    permute_rows,
    resolve,
    tensors_for,
    toy,
    write_folder,
    write_gguf,
)

from fuel_core.checkpoint import ConfigReader, load_weights, open_checkpoint
from fuel_core.checkpoint.gguf_header import parse_header
from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedCheckpointError,
    WeightsError,
)

Q = gguf.GGMLQuantizationType


# -- config -------------------------------------------------------------------------------------------------------


def test_metadata_gives_the_spec_of_the_folder_it_was_converted_from(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert ck.format == "gguf"
    assert ck.model_type is None
    assert ck.gguf_architecture == "llama"
    spec = resolve(ck.raw)
    expected = resolve({**TINY, "model_type": "llama", "tie_word_embeddings": False})
    assert spec == expected
    assert spec.sources["num_hidden_layers"] == "gguf: llama.block_count"
    assert spec.sources["vocab_size"] == "gguf: rows of token_embd.weight"
    assert spec.sources["tie_word_embeddings"] == "gguf: output.weight present"
    assert spec.rms_norm_eps == 1e-5  # stored as float32 9.999999747378752e-06


@pytest.mark.parametrize("stored", ["blk.0.attn_q.bias", "blk.0.attn_qkv.bias"])
def test_biases_of_separate_and_of_fused_projections_are_seen(stored: str, tmp_path: Path) -> None:
    plain = open_checkpoint(write_gguf(tmp_path / "plain.gguf", tensors_for(toy())))
    assert plain.raw["attention_bias"] is False
    assert plain.raw.source("attention_bias") == "gguf: blk.0.attn_q.bias and blk.0.attn_qkv.bias absent"
    biased = write_gguf(tmp_path / "m.gguf", tensors_for(toy()), raw_tensors={stored: np.zeros(96, dtype=np.float32)})
    raw = open_checkpoint(biased).raw
    assert raw["attention_bias"] is True
    assert raw.source("attention_bias") == f"gguf: {stored} present"
    assert (plain.raw["fused_qkv"], plain.raw.source("fused_qkv")) == (False, "gguf: blk.0.attn_qkv.weight absent")


def test_head_width_is_the_key_length_else_the_quotient(tmp_path: Path) -> None:
    config = {**TINY, "hidden_size": 64}
    ck = open_checkpoint(write_gguf(tmp_path / "a.gguf", config=config))
    assert ConfigReader(ck.raw).head_dim() == 32
    missing = {"llama.attention.key_length": ..., "llama.attention.value_length": ...}
    ck = open_checkpoint(write_gguf(tmp_path / "b.gguf", config=config, metadata=missing))
    assert ConfigReader(ck.raw).head_dim() == 16


def test_value_heads_of_another_width_are_refused(tmp_path: Path) -> None:
    for key_length in (32, ...):
        keys = {"llama.attention.value_length": 16, "llama.attention.key_length": key_length}
        with pytest.raises(ConfigError, match="value_length to equal the key length"):
            open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=keys))


def test_absent_key_value_head_count_means_one_per_query_head(tmp_path: Path) -> None:
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": ...}))
    assert ConfigReader(ck.raw.with_values({"vocab_size": 40}, "test")).common()["num_key_value_heads"] == 4


def test_per_layer_list_of_one_value_is_that_value_and_others_are_refused(tmp_path: Path) -> None:
    key = "llama.attention.head_count_kv"
    ck = open_checkpoint(write_gguf(tmp_path / "a.gguf", metadata={key: [2, 2]}))
    assert ck.raw["num_key_value_heads"] == 2
    ck = open_checkpoint(write_gguf(tmp_path / "b.gguf", metadata={key: [2, 4]}))
    with pytest.raises(ConfigError, match=r"an integer, found \[2, 4\]"):
        ConfigReader(ck.raw).int("num_key_value_heads")


def test_absent_base_is_the_default_of_the_format(tmp_path: Path) -> None:
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.freq_base": ...}))
    assert ConfigReader(ck.raw).rope().theta == 10000.0
    assert ck.raw.source("rope_theta") == "gguf: default of rope.freq_base"


def test_partial_rotation_comes_from_the_dimension_count(tmp_path: Path) -> None:
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.dimension_count": 12}))
    assert ConfigReader(ck.raw).rope().rotary_width(32) == 12


@pytest.mark.parametrize(
    ("keys", "block"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_scaling_keys_mean_the_same_as_in_a_config(tmp_path: Path, keys: dict[str, Any], block: Any) -> None:
    metadata = {f"llama.rope.scaling.{k}": v for k, v in keys.items()}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert ConfigReader(ck.raw).rope() == resolve({**TINY, "rope_scaling": block}).rope


def test_yarn_magnitude_of_a_file_multiplies_the_formula(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5}
    metadata = {f"llama.rope.scaling.{k}": v for k, v in keys.items()}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert ConfigReader(ck.raw).rope().attention_factor == pytest.approx(0.5 * 1.138629, abs=1e-6)


def test_scaling_key_without_a_known_meaning_is_refused(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_log_multiplier": 0.1}
    metadata = {f"llama.rope.scaling.{k}": v for k, v in keys.items()}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    with pytest.raises(ConfigError, match="unknown RoPE key 'gguf:yarn_log_multiplier'"):
        ConfigReader(ck.raw).rope()


def test_frequency_divisors_belong_to_the_rotation_and_are_no_weight(tmp_path: Path) -> None:
    divisors = np.float32(1.0) / np.array([1.0, 0.303073, *[0.125] * 14], np.float32)
    tensors = tensors_for(toy())
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, raw_tensors={"rope_freqs.weight": divisors}))
    rope = ConfigReader(ck.raw).rope()
    assert rope.frequency_divisors == tuple(float(v) for v in divisors)
    assert rope.theta == 10000.0
    assert ck.tensor_names() == sorted(tensors)
    assert load_weights(toy(), ck).parameters == len(tensors)
    assert hash(rope) != hash(ConfigReader(open_checkpoint(write_gguf(tmp_path / "n.gguf")).raw).rope())


@pytest.mark.parametrize("bad", [[1.0] * 15, [1.0] * 15 + [0.0], [1.0] * 15 + [float("nan")]])
def test_impossible_frequency_divisors_are_refused(tmp_path: Path, bad: list[float]) -> None:
    raw = {"rope_freqs.weight": np.array(bad, np.float32)}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", raw_tensors=raw))
    with pytest.raises(ConfigError, match="frequency_divisors"):
        ConfigReader(ck.raw).rope()


def test_two_factor_lists_are_longrope(tmp_path: Path) -> None:
    lists = {"rope_factors_short.weight": np.ones(16, np.float32), "rope_factors_long.weight": np.full(16, 4.0, "f4")}
    metadata = {"llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.attn_factor": 1.25}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", raw_tensors=lists, metadata=metadata))
    rope = ConfigReader(ck.raw).rope()
    assert (rope.kind, rope.factor, rope.attention_factor) == ("longrope", 4.0, 1.25)
    assert (rope.short_factor, rope.long_factor) == ((1.0,) * 16, (4.0,) * 16)
    assert ck.tensor_names() == []


# -- tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_query_and_key_rows_are_put_back_only_where_the_converter_moved_them(tmp_path: Path, architecture: str) -> None:
    module = toy(bias=True)
    tensors = tensors_for(module)
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, architecture=architecture))
    load_weights(module, ck)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
    stored = "model.layers.1.self_attn.k_proj.weight"
    assert ck.is_mapped(stored) is (architecture != "llama")
    assert ck.is_mapped("model.layers.1.self_attn.v_proj.weight")


def test_fixture_can_tell_the_two_row_orders_and_the_two_head_counts_apart() -> None:
    key = tensors_for(toy())["model.layers.0.self_attn.k_proj.weight"]
    assert not torch.equal(permute_rows(key, 2), key)
    assert not torch.equal(permute_rows(key, 2), permute_rows(key, 4))


def test_absent_head_means_tied(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    del tensors["lm_head.weight"]
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    module = toy(resolve(ck.raw))
    assert load_weights(module, ck).tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize(("stored", "dtype"), [(Q.F32, "float32"), (Q.F16, "float16"), (Q.BF16, "bfloat16")])
def test_plain_types_stay_as_stored_and_norms_stay_float32(tmp_path: Path, stored: Q, dtype: str) -> None:
    module = toy(bias=True)
    tensors = tensors_for(module)
    wanted = getattr(torch, dtype)
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, stored=stored, permute=False, architecture="qwen2"))
    report = load_weights(module, ck)
    assert report.dtype == dtype
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else wanted), name
        assert torch.equal(parameter, tensors[name].to(parameter.dtype)), name
    assert ck.is_mapped("lm_head.weight")


# Largest error of one block of 32 numbers with the largest at 1: half a step of the format.
_STEP = {Q.Q8_0: 1 / 127, Q.Q4_0: 1 / 7, Q.Q4_1: 2 / 15, Q.Q5_0: 1 / 15, Q.Q5_1: 2 / 31}


@pytest.mark.parametrize("stored", list(_STEP), ids=lambda q: q.name)
def test_quantised_types_come_out_within_a_step_of_what_went_in(tmp_path: Path, stored: Q) -> None:
    module = toy()
    tensors = {n: torch.tanh(t) for n, t in tensors_for(module).items()}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, stored=stored))
    assert ck.tensor_info("lm_head.weight").dtype_name == stored.name
    report = load_weights(module, ck)
    assert (report.dtype, module.lm_head.weight.dtype) == ("float32", torch.float32)
    error = max(float((p - tensors[n]).abs().max()) for n, p in module.named_parameters() if p.dim() == 2)
    assert 0 < error <= _STEP[stored]


def test_one_quantised_matrix_makes_the_whole_model_float32(tmp_path: Path) -> None:
    module = toy()
    kinds = {"model.layers.0.mlp.up_proj.weight": Q.Q8_0}
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors_for(module), stored=Q.F16, kinds=kinds))
    assert load_weights(module, ck).dtype == "float32"
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_bias_flags_come_from_the_tensors(tmp_path: Path) -> None:
    for bias in (False, True):
        ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors_for(toy(bias=bias))))
        assert ConfigReader(ck.raw).bool("attention_bias") is bias
        assert ConfigReader(ck.raw).bool("mlp_bias") is False


def _random_blocks(stored: Q, rows: int, columns: int) -> np.ndarray[Any, Any]:
    block, size = gguf.GGML_QUANT_SIZES[stored]
    raw = np.random.default_rng(0).integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    # Half-precision scales must be finite: clear the top exponent bit of both halves wherever they may stand.
    blocks = raw.reshape(rows, -1, size)
    for at in (0, 2, size - 2):
        blocks[:, :, at + 1] &= 0x3B
    return raw


@pytest.mark.parametrize("stored", [Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda q: q.name)
def test_superblock_types_come_out_as_the_package_reads_whole_rows(tmp_path: Path, stored: Q) -> None:
    raw = _random_blocks(stored, 9, 512)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(raw, stored)
    assert np.isfinite(expected).all()
    tensor = open_checkpoint(path).tensor("lm_head.weight")
    assert tensor.shape == (9, 512)
    assert np.array_equal(tensor.numpy(), expected)


def test_chunks_of_dequantisation_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_for(toy())
    path = write_gguf(tmp_path / "m.gguf", tensors, stored=Q.Q8_0)
    whole = open_checkpoint(path).tensor("lm_head.weight")
    monkeypatch.setattr("fuel_core.checkpoint.gguf_file._CHUNK", 7 * 32)
    assert torch.equal(open_checkpoint(path).tensor("lm_head.weight"), whole)


def test_type_that_cannot_be_read_is_refused_by_name_but_can_be_inspected(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(gguf_entry("output.weight", (256, 2), Q.Q2_K),), data=bytes(84 * 2)))
    ck = open_checkpoint(path)
    assert ck.tensor_info("lm_head.weight") == ((2, 256), "Q2_K")
    with pytest.raises(UnsupportedCheckpointError, match=r"stored as Q2_K: expected one of BF16, F16.*Q4_K"):
        ck.tensor("lm_head.weight")
    with pytest.raises(UnsupportedCheckpointError, match="stored as Q2_K"):
        load_weights(toy(), ck)


def test_writing_to_a_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors_for(toy()))
    before = path.read_bytes()
    open_checkpoint(path).tensor("lm_head.weight").fill_(7.0)
    assert path.read_bytes() == before


def test_names_follow_the_architecture_and_the_family_overrides_them(tmp_path: Path) -> None:
    entries = {f"blk.0.{n}.weight": np.ones(4, "f4") for n in ("attn_norm", "post_attention_norm", "ffn_norm")}
    path = write_gguf(tmp_path / "m.gguf", architecture="gemma2", raw_tensors=entries)
    ck = open_checkpoint(path)
    assert ck.tensor_names() == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
    ]
    family = SimpleNamespace(
        gguf_names={
            "blk.{bid}.ffn_norm": "model.layers.{bid}.second",
            "blk.{bid}.attn_norm.weight": "model.layers.{bid}.first.gain",
            "blk.{bid}.post_attention_norm": None,
        }
    )
    assert ck.for_family(family).tensor_names() == ["model.layers.0.first.gain", "model.layers.0.second.weight"]
    assert len(ck.tensor_names()) == 3
    narrow = SimpleNamespace(
        gguf_names={"other": {"blk.{bid}.ffn_norm": "no"}, "gemma2": {"blk.{bid}.ffn_norm": "yes"}}
    )
    assert "yes.weight" in ck.for_family(narrow).tensor_names()
    clash = SimpleNamespace(gguf_names={"blk.{bid}.ffn_norm": "x", "blk.{bid}.attn_norm": "x"})
    with pytest.raises(WeightsError, match=r"both as 'x.weight'"):
        ck.for_family(clash)


def test_load_weights_uses_the_names_of_the_family(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module)
    path = write_gguf(tmp_path / "m.gguf", tensors)
    family = SimpleNamespace(gguf_names={"output_norm": "model.final_layernorm"}, tensor_names=None)
    with pytest.raises(WeightsError, match=r"unused tensors: model.final_layernorm.weight"):
        load_weights(toy(), open_checkpoint(path), family)
    family.tensor_names = {"model.final_layernorm.weight": "model.norm.weight"}
    load_weights(module, open_checkpoint(path), family)
    assert torch.equal(module.model.norm.weight, tensors["model.norm.weight"])


def test_tensor_without_a_known_name_keeps_its_own_and_is_not_lost(tmp_path: Path) -> None:
    ck = open_checkpoint(write_gguf(tmp_path / "m.gguf", raw_tensors={"blk.0.mystery.weight": np.ones(4, "f4")}))
    assert ck.tensor_names() == ["blk.0.mystery.weight"]


# -- folders ------------------------------------------------------------------------------------------------------


def test_folder_with_one_gguf_file_opens_it_and_with_several_asks(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "model-q8.gguf")
    assert open_checkpoint(tmp_path).path == one
    write_folder(tmp_path)
    assert open_checkpoint(tmp_path).format == "gguf"
    write_gguf(tmp_path / "model-q4.gguf")
    with pytest.raises(CheckpointNotFoundError, match=r"found 2 \(model-q4.gguf, model-q8.gguf\)"):
        open_checkpoint(tmp_path)


def test_file_is_recognised_by_its_magic_whatever_its_name(tmp_path: Path) -> None:
    assert open_checkpoint(write_gguf(tmp_path / "sha256-abc")).format == "gguf"


# -- lying headers ------------------------------------------------------------------------------------------------


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


_HUGE = 1 << 63
_LIES: dict[str, bytes] = {
    "empty": b"",
    "four bytes": b"GGUF",
    "other magic": gguf_bytes(magic=b"GGML"),
    "array length 2^63": gguf_bytes((gguf_pair("a", 9, _array(4, _HUGE)),)),
    "array length 2^63 of bytes": gguf_bytes((gguf_pair("a", 9, _array(0, _HUGE)),)),
    "string array length 2^63": gguf_bytes((gguf_pair("a", 9, _array(8, _HUGE)),)),
    "array one past the end": gguf_bytes((gguf_pair("a", 9, _array(0, 40, bytes(4))),)),
    "nested array length 2^63": gguf_bytes((gguf_pair("a", 9, _array(9, 1, _array(9, _HUGE))),)),
    "deeply nested array": gguf_bytes((gguf_pair("a", 9, _array(9, 1) * 60_000),)),
    "unknown item type": gguf_bytes((gguf_pair("a", 9, _array(13, 1, bytes(8))),)),
    "unknown value type": gguf_bytes((gguf_pair("a", 13, bytes(8)),)),
    "key count 2^63": gguf_bytes(n_pairs=_HUGE),
    "key count one too many": gguf_bytes(n_pairs=2),
    "tensor count 2^63": gguf_bytes(n_tensors=_HUGE),
    "tensor count one too many": gguf_bytes(n_tensors=1),
    "string 2^63": gguf_bytes((gguf_pair("a", 8, _u64(_HUGE)),)),
    "string past the end": gguf_bytes((gguf_pair("a", 8, gguf_string("x", 1000)),)),
    "string past the end in an array": gguf_bytes((gguf_pair("a", 9, _array(8, 1, gguf_string("x", 1000))),)),
    "key 2^64-1": gguf_bytes((_u64(2**64 - 1),)),
    "key not utf-8": gguf_bytes((gguf_string(b"\xff\xfe") + struct.pack("<II", 4, 1),)),
    "key twice": gguf_bytes((gguf_pair("a", 4, bytes(4)), gguf_pair("a", 4, bytes(4)))),
    "bool of 2": gguf_bytes((gguf_pair("a", 7, b"\x02"),)),
    "alignment 0": gguf_bytes((gguf_pair("general.alignment", 4, struct.pack("<I", 0)),)),
    "alignment 3": gguf_bytes((gguf_pair("general.alignment", 4, struct.pack("<I", 3)),)),
    "alignment 2^31": gguf_bytes((gguf_pair("general.alignment", 4, struct.pack("<I", 1 << 31)),)),
    "alignment a string": gguf_bytes((gguf_pair("general.alignment", 8, gguf_string("32")),)),
    "no dimensions": gguf_bytes(entries=(gguf_entry("t", ()),)),
    "five dimensions": gguf_bytes(entries=(gguf_entry("t", (1,) * 5),), data=bytes(32)),
    "dimension count 2^32-1": gguf_bytes(entries=(gguf_entry("t", (1,), n_dims=2**32 - 1),)),
    "dimension 0": gguf_bytes(entries=(gguf_entry("t", (0, 4)),)),
    "dimensions that overflow": gguf_bytes(entries=(gguf_entry("t", (1 << 32, 1 << 32)),), data=bytes(32)),
    "dimensions that overflow to a small size": gguf_bytes(entries=(gguf_entry("t", (1 << 62, 4, 1)),), data=bytes(64)),
    "unknown tensor type": gguf_bytes(entries=(gguf_entry("t", (8,), 4_000),), data=bytes(32)),
    "row no multiple of the block": gguf_bytes(entries=(gguf_entry("t", (33,), Q.Q8_0),), data=bytes(64)),
    "offset 2^63": gguf_bytes(entries=(gguf_entry("t", (8,), offset=_HUGE),), data=bytes(32)),
    "offset past the end": gguf_bytes(entries=(gguf_entry("t", (8,), offset=32),), data=bytes(32)),
    "offset not aligned": gguf_bytes(entries=(gguf_entry("t", (1,), offset=4),), data=bytes(32)),
    "data one byte short": gguf_bytes(entries=(gguf_entry("t", (8,)),), data=bytes(31)),
    "tensor twice": gguf_bytes(entries=(gguf_entry("t", (8,)), gguf_entry("t", (8,), offset=32)), data=bytes(64)),
    "tensors that overlap": gguf_bytes(
        entries=(gguf_entry("t", (16,)), gguf_entry("u", (8,), offset=32)), data=bytes(64)
    ),
    "no architecture": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    "architecture not a string": b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + gguf_pair("general.architecture", 4, bytes(4)),
}


# (type of the value, its bytes) in the file: every width and sign, what is no number, text, and lists.
_VALUES: dict[str, tuple[int, bytes]] = {
    "u8 0": (0, b"\0"),
    "i8 -1": (1, b"\xff"),
    "u16": (2, struct.pack("<H", 2**16 - 1)),
    "u32 0": (4, struct.pack("<I", 0)),
    "u32": (4, struct.pack("<I", 2**32 - 1)),
    "i32 -1": (5, struct.pack("<i", -1)),
    "f32 0": (6, struct.pack("<f", 0.0)),
    "f32 nan": (6, struct.pack("<f", float("nan"))),
    "f32 inf": (6, struct.pack("<f", float("inf"))),
    "f32 tiny": (6, struct.pack("<f", 1e-45)),
    "false": (7, b"\0"),
    "true": (7, b"\1"),
    "no text": (8, gguf_string("")),
    "a number as text": (8, gguf_string("7")),
    "text": (8, gguf_string("banana\n" * 1000)),
    "no items": (9, _array(4, 0)),
    "items": (9, _array(4, 3, struct.pack("<III", 1, 2, 3))),
    "equal items": (9, _array(4, 2, struct.pack("<II", 2, 2))),
    "texts": (9, _array(8, 2, gguf_string("7") * 2)),
    "lists": (9, _array(9, 1, _array(4, 1, bytes(4)))),
    "u64": (10, _u64(2**64 - 1)),
    "i64": (11, struct.pack("<q", -(2**63))),
    "f64": (12, struct.pack("<d", 1e308)),
}
_USED: dict[str, tuple[int, bytes]] = {
    "general.architecture": (8, gguf_string("llama")),
    **{
        f"llama.{key}": (4, struct.pack("<I", value))
        for key, value in {
            "context_length": 128,
            "embedding_length": 96,
            "block_count": 1,
            "feed_forward_length": 160,
            "attention.head_count": 3,
            "attention.head_count_kv": 1,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 5,
            "rope.dimension_count": 32,
            "rope.scaling.original_context_length": 32,
            "vocab_size": 4,
        }.items()
    },
    "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
    "llama.rope.freq_base": (6, struct.pack("<f", 1e4)),
    "llama.rope.scaling.type": (8, gguf_string("yarn")),
    "llama.rope.scaling.factor": (6, struct.pack("<f", 4.0)),
    "llama.rope.scaling.attn_factor": (6, struct.pack("<f", 1.0)),
    "llama.rope.scaling.yarn_beta_fast": (6, struct.pack("<f", 32.0)),
    "llama.rope.scale_linear": (6, struct.pack("<f", 2.0)),
    "tokenizer.ggml.model": (8, gguf_string("gpt2")),
    "tokenizer.ggml.pre": (8, gguf_string("qwen2")),
    "tokenizer.ggml.tokens": (9, _array(8, 4, b"".join(map(gguf_string, "abcd")))),
    "tokenizer.ggml.merges": (9, _array(8, 1, gguf_string("a b"))),
    "tokenizer.ggml.token_type": (9, _array(5, 4, struct.pack("<iiii", 1, 1, 1, 3))),
    "tokenizer.ggml.scores": (9, _array(6, 4, bytes(16))),
    "tokenizer.ggml.bos_token_id": (4, struct.pack("<I", 1)),
    "tokenizer.ggml.eos_token_id": (4, struct.pack("<I", 2)),
    "tokenizer.ggml.eot_token_id": (4, struct.pack("<I", 3)),
    "tokenizer.ggml.add_bos_token": (7, b"\1"),
    "tokenizer.chat_template": (8, gguf_string("{{ messages }}")),
    "split.count": (2, struct.pack("<H", 1)),
    "split.no": (2, struct.pack("<H", 0)),
    "general.alignment": (4, struct.pack("<I", 32)),
    "general.file_type": (4, struct.pack("<I", 0)),
}


@pytest.mark.parametrize("key", list(_USED))
def test_metadata_of_any_type_works_or_gives_our_errors(tmp_path: Path, key: str) -> None:
    """At every key that is read: what a key holds, the file says, and anything may stand there."""
    from fuzz_files import attempt, read_all

    path, data = tmp_path / "m.gguf", bytes(32)
    entry = gguf_entry("rope_freqs.weight", (8,))

    def content(changes: dict[str, tuple[int, bytes]], more: tuple[bytes, ...] = ()) -> bytes:
        pairs = tuple(gguf_pair(name, *value) for name, value in ({**_USED, **changes}).items())
        body = b"GGUF" + struct.pack("<IQQ", 3, len(more), len(pairs)) + b"".join((*pairs, *more))
        return body + bytes(-len(body) % 32) + data

    path.write_bytes(content({}))
    assert attempt(lambda: read_all(path)), "the file is honest to begin with"
    for value in _VALUES.values():
        for more in ((), (entry,)):
            path.write_bytes(content({key: value}, more))
            attempt(lambda: read_all(path))


@pytest.mark.parametrize("lie", list(_LIES))
def test_lying_header_is_corrupt(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_LIES[lie])
    with pytest.raises(CheckpointCorruptError, match=r"m\.gguf") as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        ("key count 2^63", r"at most \d+ keys in the \d+ bytes left, found 9223372036854775808"),
        ("tensor count 2^63", r"at most \d+ tensors in the \d+ bytes left, found 9223372036854775808"),
        ("array length 2^63", r"at most \d+ items of 'a' in the \d+ bytes left, found 9223372036854775808"),
        ("string 2^63", r"the value of 'a' to fit in the \d+ bytes left, found 9223372036854775808 bytes"),
    ],
)
def test_refusal_compares_the_claim_with_the_bytes_left(lie: str, expected: str) -> None:
    with pytest.raises(CheckpointCorruptError, match=expected):
        parse_header(_LIES[lie], "m.gguf")


def test_lies_stand_in_files_that_are_honest_otherwise() -> None:
    header = parse_header(gguf_bytes(entries=(gguf_entry("t", (8,)),), data=bytes(32)), "honest")
    assert header.tensors["t"].shape == (8,)


def test_refusal_reads_nothing_for_a_claim_the_bytes_cannot_hold() -> None:
    """The claimed length is never turned into a read or a loop: only the honest bytes before it are touched."""

    class Counting(bytes):
        touched = 0

        def __getitem__(self, index: Any) -> Any:
            value = super().__getitem__(index)
            Counting.touched += len(value) if isinstance(value, bytes) else 1
            return value

    for lie in ("array length 2^63", "string 2^63", "string array length 2^63", "key count 2^63", "tensor count 2^63"):
        Counting.touched = 0
        with pytest.raises(CheckpointCorruptError):
            parse_header(Counting(_LIES[lie]), "m.gguf")
        assert Counting.touched < len(_LIES[lie])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(version=4), "version 4"),
        (gguf_bytes(version=3 << 24), "a big-endian file"),
    ],
)
def test_valid_form_that_is_not_read_is_refused_by_name(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedCheckpointError, match=f"found {found}"):
        open_checkpoint(path)


def test_file_cut_anywhere_is_refused_or_reads_the_same(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {"model.norm.weight": torch.ones(96)}).read_bytes()
    full = parse_header(whole, "m.gguf")
    last = full.tensors["output_norm.weight"]
    for size in range(len(whole)):
        try:
            header = parse_header(whole[:size], "m.gguf")
        except CheckpointCorruptError:
            continue
        assert size >= last.offset + last.nbytes
        assert header == full


def test_file_with_one_bit_flipped_never_raises_anything_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {"model.norm.weight": torch.ones(96)}).read_bytes()
    end = parse_header(whole, "m.gguf").tensors["output_norm.weight"].offset
    for at in range(end):
        for bit in (0, 3, 7):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            try:
                parse_header(bytes(flipped), "m.gguf")
            except (CheckpointCorruptError, UnsupportedCheckpointError):
                continue
