"""GGUF files: the logits of the folder, what the format has no room for, and what it says about tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from fuel_core import open_checkpoint
from fuel_core.checkpoint.gguf_file import GgufCheckpoint
from fuel_core.testing.hostile import complaints
from fuel_core.text import load_tokenizer
from tiny_qwen import CHECKPOINTS, MOE, error_of, load, reference_model, save, write_gguf

from fuel_qwen.family import FAMILY

TOLERANCE = 1e-5
"""float32: calibrated in test_against_transformers."""


@pytest.mark.parametrize("name", ["qwen2", "qwen2_full_heads", "qwen3", "moe"])
def test_gguf_gives_the_logits_and_the_spec_of_the_folder(name: str, tmp_path: Path) -> None:
    reference = reference_model(**CHECKPOINTS[name])
    backbone, folder = load(write_gguf(tmp_path / "model.gguf", reference)), load(save(reference, tmp_path / "folder"))
    assert error_of(backbone, reference) < TOLERANCE
    parameters = dict(folder.named_parameters())
    assert all(torch.equal(p, parameters.pop(name)) for name, p in backbone.named_parameters())
    assert not parameters
    ours, theirs = folder.config, backbone.config
    differing = {
        f.name for f in dataclasses.fields(ours) if f.compare and getattr(ours, f.name) != getattr(theirs, f.name)
    }
    # A float32 in the file, a decimal in the config; and the architecture's name is another word for one of them.
    assert differing <= {"rms_norm_eps", "model_type"}


def test_experts_of_a_gguf_file_are_weighed_by_renormalised_weights(tmp_path: Path) -> None:
    """The format has no key for it; the config's own default, false, is another model."""
    reference = reference_model(**MOE)
    path = write_gguf(tmp_path / "model.gguf", reference)
    backbone = load(path)
    assert backbone.config.norm_topk_prob is True
    assert "GGUF" in backbone.config.sources["norm_topk_prob"]
    assert error_of(backbone, reference) < TOLERANCE
    assert error_of(backbone, reference_model(**{**MOE, "norm_topk_prob": False})) > 1000 * TOLERANCE


def test_rows_are_not_reordered(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", reference_model(**CHECKPOINTS["qwen2"]))) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        assert checkpoint.is_mapped("model.layers.0.self_attn.q_proj.weight")


def test_head_width_is_the_key_length_and_without_one_hidden_over_heads(tmp_path: Path) -> None:
    reference = reference_model(**{**CHECKPOINTS["qwen3"], "head_dim": 32})
    assert load(write_gguf(tmp_path / "model.gguf", reference)).config.head_dim == 32
    absent: dict[str, Any] = {"qwen3.attention.key_length": None, "qwen3.attention.value_length": None}
    narrow = write_gguf(tmp_path / "narrow.gguf", reference, metadata=absent)
    assert FAMILY.resolve_config(open_checkpoint(narrow).raw).head_dim == 24


@pytest.mark.parametrize(("kind", "word"), [("Q4_1", "int4"), ("Q8_0", "int8")])
def test_quantised_experts_keep_their_width(kind: str, word: str, tmp_path: Path) -> None:
    reference = reference_model(**{**MOE, "intermediate_size": 160, "head_dim": 32})
    path = write_gguf(tmp_path / "model.gguf", reference, stored=gguf.GGMLQuantizationType[kind])
    backbone, plain = load(path), load(path, weights="f32")
    mlp = backbone.model.layers[0].mlp
    assert mlp.experts.up_proj.packed_format == word
    assert mlp.gate.weight.dtype == torch.float32
    # The same numbers but for the rounding of scales: int4 2e-3, int8 4e-3 of the weights.
    assert plain.model.layers[0].mlp.experts.up_proj.weight.shape == (6, 64, 96)
    from test_formats import dequantised_experts

    found = dequantised_experts(mlp.experts.up_proj)
    expected = plain.model.layers[0].mlp.experts.up_proj.weight
    assert float((found - expected).norm() / expected.norm()) < 0.015


TOKENS = ["!", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", ",", *(f"t{i}" for i in range(59))]


def _vocabulary(**more: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, *[1] * (len(TOKENS) - 4)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({}, 6),
        ({"bos_token_id": 7}, 6),
        ({"bos_token_id": 7, "add_bos_token": False}, 6),
        ({"bos_token_id": 7, "add_bos_token": True}, 7),
    ],
)
def test_a_bos_is_put_in_front_only_where_the_file_says_so(more: dict[str, Any], first: int, tmp_path: Path) -> None:
    """These vocabularies have none: token 11, a comma in the released one, is a default of other formats."""
    reference = reference_model(**CHECKPOINTS["qwen2"])
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", reference, metadata=_vocabulary(**more))) as checkpoint:
        assert load_tokenizer(checkpoint.tokenizer_files()).encode("ab")[0] == first


def test_generation_stops_at_the_end_of_a_turn_and_of_the_text(tmp_path: Path) -> None:
    reference = reference_model(**CHECKPOINTS["qwen2"])
    metadata = _vocabulary(eos_token_id=1, eot_token_id=3)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", reference, metadata=metadata)) as checkpoint:
        assert {1, 3} <= set(load_tokenizer(checkpoint.tokenizer_files()).stop_token_ids)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "moe"])
def test_metadata_that_cannot_be_gives_our_errors_alone(tmp_path: Path, name: str) -> None:
    """Another type, not finite, huge, zero: at every key that is read of a file."""
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", reference_model(**CHECKPOINTS[name]))) as checkpoint:
        assert list(complaints(FAMILY, checkpoint.raw, named=False)) == []
