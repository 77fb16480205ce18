"""Every item of "Differs from Llama in" of the model file of Gemma 1, which the later generations share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuel_core import InferenceContext
from fuel_core.errors import ConfigError
from safetensors.torch import load_file
from tiny_gemma import (
    SHARED,
    build_unloaded,
    decode,
    error_of_run,
    expected_logits,
    load,
    new_cache,
    reference_of,
    resolve,
    save_and_load,
    token_ids,
    worst,
)

from fuel_gemma import gemma
from fuel_gemma.gemma import GemmaMLP, GemmaRMSNorm

TOLERANCE = 1e-5
PLAIN: dict[str, Any] = {**SHARED, "model_type": "gemma", "rope_theta": 10000.0, "torch_dtype": "float32"}
ROOTS = (9.8125, 25.25, 34.0, 45.25, 50.5, 55.5, 59.75, 68.0, 73.5)
GENERATIONS = ["gemma", "gemma2", "gemma3_text"]


# -- embeddings are scaled --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "scale"),
    list(zip((96, 640, 1152, 2048, 2560, 3072, 3584, 4608, 5376), ROOTS, strict=True)),
)
def test_scale_is_the_root_as_bfloat16_holds_it(hidden: int, scale: float) -> None:
    assert gemma.embed_scale(hidden, "bfloat16") == scale
    assert gemma.embed_scale(hidden, "float32") == float(torch.tensor(hidden**0.5))
    assert gemma.embed_scale(hidden, "float16") == float(torch.tensor(hidden**0.5).half())


@pytest.mark.parametrize("kind", GENERATIONS)
def test_scale_follows_the_declared_dtype_whatever_the_weights_are(kind: str, tmp_path: Path) -> None:
    name = {"gemma": "one", "gemma2": "two", "gemma3_text": "three"}[kind]
    reference_of(name).to(torch.bfloat16).save_pretrained(tmp_path)
    for weights in ("auto", "f32"):
        backbone = load(tmp_path, weights)
        assert backbone.decode_dims().embed_scale == backbone.config.embed_scale == 9.8125
    # The same weights in float32, and the reference with the scale of its declared dtype.
    theirs = reference_of(name)
    rounded = {key: value.float() for key, value in load_file(tmp_path / "model.safetensors").items()}
    theirs.load_state_dict(rounded, strict=False)
    theirs.tie_weights()
    theirs.model.embed_tokens.embed_scale.fill_(9.8125)
    assert error_of_run(backbone, theirs)[0] < TOLERANCE
    theirs.model.embed_tokens.embed_scale.fill_(96**0.5)
    expected_logits.cache_clear()
    assert error_of_run(backbone, theirs)[0] > 10 * TOLERANCE


def test_scale_says_where_it_comes_from() -> None:
    spec = resolve(PLAIN, torch_dtype="bfloat16")
    assert (spec.embed_scale, spec.sources["embed_scale"]) == (9.8125, "derived: sqrt(hidden_size) in bfloat16")


# -- the gain is 1 + weight -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_multiplies_in_float32_and_rounds_once(dtype: torch.dtype) -> None:
    norm = GemmaRMSNorm(96, resolve(PLAIN))
    generator = torch.Generator().manual_seed(0)
    norm.weight = torch.nn.Parameter((torch.randn(96, generator=generator) / 3).to(dtype), requires_grad=False)
    x = torch.randn(4, 96, generator=generator).to(dtype)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * (1.0 + norm.weight.double())
    # One rounding to the dtype; rounding the normalised value first would be wrong in a third of the numbers.
    different = (norm(x) != exact.to(dtype)).float().mean()
    assert norm(x).dtype == dtype
    assert different < (1.0 if dtype == torch.float32 else 0.01)
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)


def test_edit_of_a_norm_in_place_reaches_a_held_plan(tmp_path: Path) -> None:
    reference = reference_of("one")
    backbone, ids = save_and_load(reference, tmp_path), token_ids(14)
    ctx, cache = InferenceContext("cpu", plan="recorded"), new_cache(backbone)
    before = decode(backbone, ids, [4], cache, ctx)
    for model in (backbone, reference):
        with torch.no_grad():
            model.get_parameter("model.layers.1.input_layernorm.weight").mul_(-1.5).add_(0.25)
    cache.truncate_to(0)
    after = decode(backbone, ids, [4], cache, ctx)
    expected_logits.cache_clear()
    expected = expected_logits(reference, tuple(ids))
    assert worst(after, expected) < TOLERANCE
    assert worst(before, expected) > 1000 * TOLERANCE
    assert (ctx.stats.plans_built, ctx.stats.replans) == (1, {})


# -- tanh GELU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATIONS)
@pytest.mark.parametrize(
    ("words", "at_one"),
    [
        ({"hidden_act": "gelu"}, 0.841192),
        ({"hidden_act": "gelu_pytorch_tanh"}, 0.841192),
        ({}, 0.841192),
        ({"hidden_act": "gelu", "hidden_activation": None}, 0.841192),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, 0.841192),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu"}, 0.841345),
    ],
)
def test_gelu_is_the_tanh_form_unless_hidden_activation_says_otherwise(
    kind: str, words: dict[str, Any], at_one: float
) -> None:
    spec = resolve({**PLAIN, "model_type": kind, **words})
    with torch.device("cpu"):
        mlp = GemmaMLP(spec)
    assert float(F.gelu(torch.ones(()), approximate=mlp.form)) == pytest.approx(at_one, abs=5e-7)


def test_another_activation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hidden_activation.*gelu_pytorch_tanh.*found 'silu'"):
        resolve(PLAIN, hidden_activation="silu")


# -- head_dim and the head --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATIONS)
def test_head_dim_is_256_unless_stated(kind: str) -> None:
    spec = resolve({**PLAIN, "model_type": kind}, head_dim=...)
    assert (spec.head_dim, spec.sources["head_dim"]) == (256, "family default")
    assert resolve({**PLAIN, "model_type": kind}).head_dim == 20


@pytest.mark.parametrize("kind", GENERATIONS)
def test_head_is_the_embedding_unless_stated(kind: str) -> None:
    config = {**PLAIN, "model_type": kind}
    assert resolve(config).tie_word_embeddings
    assert build_unloaded(resolve(config)).tied_weights() == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert not resolve(config, tie_word_embeddings=False).tie_word_embeddings


def test_tied_checkpoint_shares_one_parameter_and_leaves_nothing_unset(tmp_path: Path) -> None:
    reference = reference_of("one")
    reference.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"tie_word_embeddings": true,', ""))
    backbone = load(tmp_path)
    assert backbone.lm_head.weight is backbone.model.embed_tokens.weight
    assert error_of_run(backbone, reference)[0] < TOLERANCE


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATIONS)
def test_encoders_and_unknown_rotations_are_refused_by_name(kind: str) -> None:
    config = {**PLAIN, "model_type": kind}
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        resolve(config, use_bidirectional_attention=True)
    assert resolve(config, use_bidirectional_attention=False) == resolve(config)
    with pytest.raises(ConfigError, match=r"unknown RoPE type 'banana'"):
        resolve(config, rope_scaling={"rope_type": "banana", "factor": 2.0})
