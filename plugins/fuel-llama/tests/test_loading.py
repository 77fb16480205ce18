"""What a checkpoint may look like on disk without the logits noticing, and what is refused before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fuel_core import InferenceContext, errors, open_checkpoint
from safetensors.torch import load_file, save_file
from tiny_files import old_spelling, read_config, with_config, with_tensors, write_gguf
from tiny_llama import (
    CHECKPOINTS,
    DEFAULT_ROPE,
    ROPES,
    decode,
    exact_frequencies,
    load,
    new_cache,
    reference_logits,
    reference_model,
    save,
    token_ids,
    worst,
)
from torch import Tensor
from transformers import LlamaForCausalLM

from fuel_llama.llama import FAMILY, LlamaBackbone

TOLERANCE = 1e-5
"""float32: calibrated in test_against_transformers."""

IDS = token_ids(20, seed=3)
LLAMA3_PUBLISHED: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def logits_of(backbone: LlamaBackbone, ids: list[int] | None = None, prompt: int = 12) -> Tensor:
    """``[steps, vocab]``: a prompt, then single tokens through a held plan."""
    ids = IDS if ids is None else ids
    dtype = backbone.lm_head.weight.dtype
    rows = decode(
        backbone, ids, [prompt], new_cache(backbone, len(ids), dtype), InferenceContext("cpu", plan="recorded")
    )
    return torch.stack([logits for _, logits in rows])


def assert_same_model(left: LlamaBackbone, right: LlamaBackbone, ids: list[int] | None = None) -> None:
    """Equal parameters bit for bit, and equal logits.

    The logits not bit for bit: weights lie where the file has them, and on what boundary a row starts decides which
    kernel multiplies by it. Between a folder and its shards that was 9.5e-7, between a folder and a GGUF file 1.1e-6.
    """
    parameters = dict(right.named_parameters())
    assert all(torch.equal(p, parameters.pop(name)) for name, p in left.named_parameters())
    assert not parameters
    assert (logits_of(left, ids) - logits_of(right, ids)).abs().max() < TOLERANCE


def error_against(reference: LlamaForCausalLM, backbone: LlamaBackbone) -> float:
    rows = list(zip(range(11, len(IDS)), logits_of(backbone), strict=True))
    return worst(rows, reference_logits(reference, IDS))


@pytest.fixture(scope="module")
def biased() -> LlamaForCausalLM:
    """Two query heads to a key head, q width (128) apart from hidden (96), every bias there is."""
    return reference_model(**CHECKPOINTS["wide_heads"])


@pytest.fixture(scope="module")
def folder(biased: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(biased, tmp_path_factory.mktemp("biased"))


@pytest.fixture(scope="module")
def tied() -> LlamaForCausalLM:
    return reference_model(**CHECKPOINTS["mlp_biased"])


@pytest.fixture(scope="module")
def tied_folder(tied: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tied, tmp_path_factory.mktemp("tied"))


# -- Hugging Face folders ---------------------------------------------------------------------------------------------


def test_shards_give_the_logits_of_one_file(biased: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    sharded = save(biased, tmp_path, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert_same_model(load(sharded), load(folder))
    assert error_against(biased, load(sharded)) < TOLERANCE


def test_missing_shard_is_named_before_anything_is_loaded(biased: LlamaForCausalLM, tmp_path: Path) -> None:
    save(biased, tmp_path, max_shard_size="200KB")
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(errors.CheckpointNotFoundError, match=rf"{second.name}.*[Ii]ncomplete download"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_tied_checkpoint_without_a_head_uses_the_embedding(
    tied: LlamaForCausalLM, tied_folder: Path, tmp_path: Path, nested: bool
) -> None:
    assert "lm_head.weight" not in open_checkpoint(tied_folder).tensor_names()
    config = read_config(tied_folder)
    if nested:
        config = {"model_type": config.pop("model_type"), "text_config": config}
    backbone = load(with_config(tied_folder, tmp_path / "copy", config))
    assert backbone.lm_head.weight is backbone.model.embed_tokens.weight
    assert not any(p.is_meta for p in backbone.parameters())
    assert error_against(tied, backbone) < TOLERANCE


def test_untied_checkpoint_without_a_head_is_refused(folder: Path, tmp_path: Path) -> None:
    headless = with_tensors(folder, tmp_path / "copy", lambda name, t: None if name == "lm_head.weight" else t)
    with pytest.raises(errors.WeightsError, match=r"lm_head\.weight"):
        load(headless)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.2.mlp.down_proj.bias"])
def test_missing_bias_and_unexpected_bias_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    without = with_tensors(folder, tmp_path / "without", lambda n, t: None if n == name else t)
    with pytest.raises(errors.WeightsError, match="without a tensor: " + name.replace(".", r"\.")):
        load(without)
    switch = "attention_bias" if "self_attn" in name else "mlp_bias"
    unsaid = with_config(folder, tmp_path / "unsaid", {**read_config(folder), switch: False})
    with pytest.raises(errors.WeightsError, match=r"unused tensors: .*\.bias"):
        load(unsaid)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_explicit_head_width_wins_over_hidden_over_heads(tmp_path: Path, kv_heads: int) -> None:
    reference = reference_model(hidden_size=64, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=32)
    backbone = load(save(reference, tmp_path))
    assert backbone.config.head_dim == 32
    assert backbone.config.sources["head_dim"] == "config.json"
    assert error_against(reference, backbone) < TOLERANCE


def test_head_width_left_out_is_hidden_over_heads(tmp_path: Path) -> None:
    reference = reference_model(**CHECKPOINTS["grouped"])
    saved = save(reference, tmp_path / "saved")
    config = read_config(saved)
    del config["head_dim"]
    backbone = load(with_config(saved, tmp_path / "copy", config))
    assert backbone.config.head_dim == 24
    assert error_against(reference, backbone) < TOLERANCE


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "nested", "neither"])
def test_weights_keep_the_dtype_the_checkpoint_has(folder: Path, tmp_path: Path, key: str, stored: torch.dtype) -> None:
    word = str(stored).removeprefix("torch.")
    saved = with_tensors(folder, tmp_path / "saved", lambda _, t: t.to(stored))
    config = {k: v for k, v in read_config(folder).items() if k not in ("dtype", "torch_dtype")}
    if key == "nested":
        config = {"model_type": config.pop("model_type"), "text_config": {**config, "torch_dtype": word}}
    elif key != "neither":
        config[key] = word
    backbone = load(with_config(saved, tmp_path / "copy", config))
    assert {p.dtype for p in backbone.parameters()} == {stored}
    assert backbone.config.dtype == word


def test_declared_dtype_wins_over_the_stored_one(folder: Path, tmp_path: Path) -> None:
    declared = with_config(folder, tmp_path / "copy", {**read_config(folder), "dtype": "bfloat16"})
    assert {p.dtype for p in load(declared).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(declared, weights="f32").parameters()} == {torch.float32}


def test_mixed_file_keeps_float32_norms(folder: Path, tmp_path: Path) -> None:
    mixed = with_tensors(
        folder, tmp_path / "mixed", lambda n, t: t if n.endswith("norm.weight") else t.to(torch.bfloat16)
    )
    config = {**read_config(folder), "dtype": "bfloat16"}
    backbone = load(with_config(mixed, tmp_path / "copy", config))
    found = {name.endswith("norm.weight"): p.dtype for name, p in backbone.named_parameters()}
    assert found == {True: torch.float32, False: torch.bfloat16}
    assert logits_of(backbone).isfinite().all()


def test_stored_frequencies_are_no_weights(folder: Path, tmp_path: Path) -> None:
    """Releases of 2023 store each layer's inverse frequencies; wrong ones must not matter."""
    old = with_tensors(folder, tmp_path / "old", lambda _, t: t)
    file = old / "model.safetensors"
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((16,), 7.0) for i in range(4)}
    save_file({**load_file(file), **extra}, file)
    assert_same_model(load(old), load(folder))


# -- spellings of the rotary embedding -------------------------------------------------------------------------------


def _spellings(folder: Path) -> dict[str, dict[str, Any]]:
    new = read_config(folder)
    rope = new["rope_parameters"]
    beside = {**new, "rope_theta": rope["rope_theta"]}
    beside["rope_parameters"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "rope_type": old_spelling(folder, "rope_type"),
        "type": old_spelling(folder, "type"),
        "theta beside rope_parameters": beside,
        "nested per layer type": {**new, "rope_parameters": {"full_attention": rope}},
    }


@pytest.mark.parametrize("kind", ROPES)
def test_every_spelling_of_a_rope_gives_the_same_logits(tmp_path: Path, kind: str) -> None:
    rope = {**ROPES[kind], "rope_theta": 5000.0}
    saved = save(reference_model(head_dim=16, rope_parameters=rope), tmp_path / "new")
    ids = token_ids(210, seed=4)
    expected = logits_of(load(saved), ids, 202)
    for name, config in _spellings(saved).items():
        backbone = load(with_config(saved, tmp_path / name, config))
        assert (logits_of(backbone, ids, 202) - expected).abs().max() < TOLERANCE, name
    unscaled = {**read_config(saved), "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    other = logits_of(load(with_config(saved, tmp_path / "other", unscaled)), ids, 202)
    assert (other - expected).abs().max() > 1000 * TOLERANCE


def test_checkpoint_without_a_base_takes_the_family_default(tmp_path: Path) -> None:
    reference = reference_model(head_dim=16)
    saved = save(reference, tmp_path / "saved")
    config = old_spelling(saved)
    del config["rope_theta"]
    backbone = load(with_config(saved, tmp_path / "copy", config))
    assert backbone.config.rope.theta == 10000.0
    assert "family default" in backbone.config.sources["rope"]
    assert error_against(reference, backbone) < TOLERANCE


def test_llama3_scaling_multiplies_frequencies_as_published(tmp_path: Path) -> None:
    backbone = load(save(reference_model(head_dim=16, rope_parameters=LLAMA3_PUBLISHED), tmp_path))
    plain, _ = exact_frequencies(DEFAULT_ROPE, 16)
    (variant,) = backbone.rope_plan.variants
    np.testing.assert_allclose(np.array(variant.inv_freq) / plain, [1.0, 0.303073, *[0.125] * 6], rtol=1e-5)


@pytest.mark.parametrize("word", ["banana", "longrope", "dynamic"])
def test_rope_kind_the_family_does_not_have_is_refused_by_name(folder: Path, tmp_path: Path, word: str) -> None:
    config = old_spelling(folder)
    config["rope_scaling"] = {
        "rope_type": word,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    with pytest.raises(errors.ConfigError, match=word):
        load(with_config(folder, tmp_path / "copy", config))


# -- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grouped", "full_heads", "wide_heads", "mlp_biased"])
def test_gguf_gives_the_logits_of_the_folder(tmp_path: Path, name: str) -> None:
    reference = reference_model(**CHECKPOINTS[name])
    backbone = load(write_gguf(tmp_path / "model.gguf", reference))
    assert_same_model(backbone, load(save(reference, tmp_path / "folder")))
    assert error_against(reference, backbone) < TOLERANCE


def test_gguf_rows_left_in_folder_order_would_show(biased: LlamaForCausalLM, tmp_path: Path) -> None:
    """What makes the test above one: a file that is not permuted is read into another model."""
    unpermuted = load(write_gguf(tmp_path / "model.gguf", biased, permute=False))
    assert error_against(biased, unpermuted) > 1000 * TOLERANCE


@pytest.mark.parametrize("stored", ["F16", "BF16", "Q8_0"])
def test_gguf_types_give_the_logits_of_the_numbers_they_store(tmp_path: Path, stored: str) -> None:
    # Rows of whole blocks of 32, which Q8_0 needs.
    biased = reference_model(**CHECKPOINTS["wide_heads"], intermediate_size=160)
    kind = gguf.GGMLQuantizationType[stored]
    path = write_gguf(tmp_path / "model.gguf", biased, stored=kind)
    rounded = LlamaForCausalLM(biased.config).eval()
    rounded.load_state_dict(biased.state_dict())
    rounded.model.rotary_emb = biased.model.rotary_emb
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.dim() > 1:
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    assert error_against(rounded, load(path, weights="f32")) < TOLERANCE
    assert error_against(biased, load(path, weights="f32")) > 10 * TOLERANCE


def test_gguf_frequency_divisors_stand_for_the_scaling(tmp_path: Path) -> None:
    scaled = reference_model(head_dim=16, rope_parameters=LLAMA3_PUBLISHED)
    plain, _ = exact_frequencies(DEFAULT_ROPE, 16)
    frequencies, _ = exact_frequencies(LLAMA3_PUBLISHED, 16)
    divisors = (plain / frequencies).astype(np.float32)
    assert divisors[1] == pytest.approx(1 / 0.303073, rel=1e-5)
    backbone = load(write_gguf(tmp_path / "model.gguf", scaled, vectors={"rope_freqs.weight": divisors}))
    assert "rope_freqs.weight" not in open_checkpoint(tmp_path / "model.gguf").tensor_names()
    ids = token_ids(210, seed=4)
    found = logits_of(backbone, ids, 202)
    expected = reference_logits(scaled, ids)[201:]
    assert (found - expected).abs().max() < TOLERANCE
    without = load(write_gguf(tmp_path / "without.gguf", scaled))
    assert (logits_of(without, ids, 202) - expected).abs().max() > 1000 * TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_gguf_scaling_keys_give_the_logits_of_the_folder(tmp_path: Path, kind: str) -> None:
    reference = reference_model(head_dim=16, rope_parameters=ROPES[kind])
    metadata: dict[str, Any] = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": float(ROPES[kind]["factor"]),
    }
    if kind == "yarn":
        metadata["llama.rope.scaling.original_context_length"] = 32
    backbone = load(write_gguf(tmp_path / "model.gguf", reference, metadata=metadata))
    assert_same_model(backbone, load(save(reference, tmp_path / "folder")), token_ids(210, seed=4))


def test_gguf_key_length_wins_over_embedding_over_heads(tmp_path: Path) -> None:
    reference = reference_model(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    backbone = load(write_gguf(tmp_path / "model.gguf", reference))
    assert backbone.config.head_dim == 32
    assert backbone.config.sources["head_dim"] == "gguf: llama.attention.key_length"
    assert error_against(reference, backbone) < TOLERANCE
    absent = dict.fromkeys(("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"))
    narrow = write_gguf(tmp_path / "narrow.gguf", reference, metadata=absent)
    assert FAMILY.resolve_config(open_checkpoint(narrow).raw).head_dim == 16
    uneven = write_gguf(tmp_path / "uneven.gguf", reference, metadata={"llama.attention.value_length": 16})
    with pytest.raises(errors.ConfigError, match="value_length"):
        open_checkpoint(uneven)


def test_gguf_without_a_head_is_tied(tied: LlamaForCausalLM, tmp_path: Path) -> None:
    backbone = load(write_gguf(tmp_path / "model.gguf", tied))
    assert backbone.config.tie_word_embeddings
    assert backbone.lm_head.weight is backbone.model.embed_tokens.weight
    assert error_against(tied, backbone) < TOLERANCE
    untied = reference_model(head_dim=16)
    assert not load(write_gguf(tmp_path / "untied.gguf", untied)).config.tie_word_embeddings


def test_gguf_stops_at_the_end_of_the_text_and_of_the_turn(biased: LlamaForCausalLM, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "<|endoftext|>", "a", "b", "<|im_end|>", *(f"t{i}" for i in range(61))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 3, *[1] * 61],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }
    source = open_checkpoint(write_gguf(tmp_path / "model.gguf", biased, metadata=metadata)).tokenizer_files()
    assert {i for ids in source.stop_ids.values() for i in ids} == {2, 5}


def test_folder_and_file_resolve_to_one_spec(biased: LlamaForCausalLM, folder: Path, tmp_path: Path) -> None:
    """Every field but the words a GGUF file has no room for."""
    ours = load(folder).config
    theirs = load(write_gguf(tmp_path / "model.gguf", biased)).config
    differing = {name for name in ours.__dataclass_fields__ if getattr(ours, name) != getattr(theirs, name)}
    assert differing <= {"sources", "rms_norm_eps"}
    assert math.isclose(ours.rms_norm_eps, theirs.rms_norm_eps, rel_tol=1e-6)
