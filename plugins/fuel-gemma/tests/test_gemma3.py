"""Every item of "Differs from Llama in" of the model file of Gemma 3.

Its parity with transformers stands in test_against_transformers; here each part is moved on its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import InferenceContext, open_checkpoint
from fuel_core.errors import ConfigError, UnsupportedCheckpointError
from safetensors.torch import load_file, save_file
from tiny_gemma import (
    DENSE,
    GEMMA3,
    PATHS,
    SHARED,
    TWO_BASES,
    WINDOW,
    WINDOWED,
    build_unloaded,
    decode,
    error_of_run,
    fill,
    load,
    new_cache,
    reference_logits,
    reference_of,
    resolve,
    save_and_load,
    token_ids,
    worst,
)
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

TOLERANCE = 1e-5
DEEP_TOLERANCE = 1e-4
"""transformers multiplies float32 frequencies by float32 positions; genuine error at 120 positions: see the test."""
PLAIN: dict[str, Any] = {**SHARED, **GEMMA3, "model_type": "gemma3_text", "torch_dtype": "float32"}
FLAT: dict[str, Any] = {
    **PLAIN,
    "rope_parameters": ...,
    "rope_theta": 5000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


# -- normalised queries and keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_queries_and_keys_are_normalised_over_a_head_before_they_rotate(tmp_path: Path, name: str) -> None:
    """A weight of its own for every feature: normalising after the rotation would mix them up."""
    reference = reference_of("three_full")
    with torch.no_grad():
        parameter = reference.get_parameter(f"model.layers.1.self_attn.{name}.weight")
        parameter.copy_(torch.linspace(-0.9, 3.0, parameter.numel()))
    backbone = save_and_load(reference, tmp_path)
    assert backbone.model.layers[0].self_attn.q_norm.weight.shape == (32,)
    assert error_of_run(backbone, reference)[0] < TOLERANCE


# -- schedule ---------------------------------------------------------------------------------------------------------


def test_every_sixth_layer_is_dense_unless_the_config_says_otherwise() -> None:
    def dense(**changes: Any) -> list[int]:
        plan = build_unloaded(resolve(PLAIN, num_hidden_layers=13, **changes)).mask_plan
        return [layer for layer in range(13) if plan.window_for_layer(layer) is None]

    assert dense() == [5, 11]
    assert dense(sliding_window_pattern=4) == dense(_sliding_window_pattern=4) == [3, 7, 11]
    assert dense(sliding_window_pattern=5, _sliding_window_pattern=4) == [4, 9]
    kinds = [DENSE] + [WINDOWED] * 12
    assert dense(sliding_window_pattern=4, layer_types=kinds) == [0]
    assert build_unloaded(resolve(PLAIN)).mask_plan.windows == (WINDOW, None)


# -- two rotations ----------------------------------------------------------------------------------------------------


def test_each_kind_of_layer_has_its_own_base_and_the_scaling_is_of_the_dense_ones() -> None:
    plan = build_unloaded(resolve(FLAT)).rope_plan
    local, whole = plan.variants
    assert [plan.variant_for_layer(layer) for layer in range(7)] == [0, 0, 0, 0, 0, 1, 0]
    assert local.inv_freq[1] == pytest.approx(100.0 ** (-2 / 20))
    assert whole.inv_freq[1] == pytest.approx(5000.0 ** (-2 / 20) / 8.0)


def test_old_new_and_half_way_spellings_are_one_spec() -> None:
    nested = resolve(PLAIN)
    assert resolve(FLAT) == nested
    flat_block = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    assert resolve(FLAT, rope_scaling=..., rope_theta=..., rope_parameters=flat_block) == nested
    assert resolve(FLAT, rope_scaling={"type": "linear", "factor": 8.0}) == nested
    assert nested.rope.factor == 8.0
    assert (nested.rope_local.kind, nested.rope_local.factor) == ("default", None)


def test_a_block_without_a_base_has_that_of_the_reference_class() -> None:
    bare = {DENSE: {"rope_type": "default"}, WINDOWED: {"rope_type": "default"}}
    spec = resolve(PLAIN, rope_parameters=bare)
    assert (spec.rope.theta, spec.rope_local.theta) == (1e6, 1e4)
    assert resolve(PLAIN, rope_parameters=...).rope_local.theta == 1e4


@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
def test_scaled_layers_equal_transformers_at_position_100(
    tmp_path_factory: pytest.TempPathFactory, plan: str, offset_path: str
) -> None:
    reference = reference_of("three")
    backbone = save_and_load(reference, tmp_path_factory.mktemp("deep"))
    ids = token_ids(112)
    ctx = InferenceContext("cpu", plan=plan, offset_path=offset_path)
    rows = decode(backbone, ids, [100], new_cache(backbone, 112), ctx)
    assert worst(rows, reference_logits(reference, ids)) < DEEP_TOLERANCE
    unscaled = {**TWO_BASES, DENSE: {"rope_type": "default", "rope_theta": 5000.0}}
    everywhere = {**TWO_BASES, WINDOWED: {"rope_type": "linear", "rope_theta": 100.0, "factor": 8.0}}
    for wrong in (unscaled, everywhere):
        assert worst(rows, reference_logits(reference_of("three", rope_parameters=wrong), ids)) > 100 * DEEP_TOLERANCE


def test_other_bases_reach_a_held_plan(tmp_path: Path) -> None:
    backbone, ids = save_and_load(reference_of("three"), tmp_path), token_ids(16)
    ctx, cache = InferenceContext("cpu", plan="recorded"), new_cache(backbone)
    decode(backbone, ids, [3], cache, ctx)
    other = {
        DENSE: {"rope_type": "default", "rope_theta": 700.0},
        WINDOWED: {"rope_type": "default", "rope_theta": 50.0},
    }
    spec = resolve(PLAIN, rope_parameters=other)
    backbone.reconfigure(rope=spec.rope, rope_local=spec.rope_local)
    cache.truncate_to(0)
    rows = decode(backbone, ids, [3], cache, ctx)
    assert worst(rows, reference_logits(reference_of("three", rope_parameters=other), ids)) < TOLERANCE
    assert (ctx.stats.plans_built, ctx.stats.replans) == (1, {})


# -- caps -------------------------------------------------------------------------------------------------------------


def test_capped_scores_are_refused_and_capped_logits_are_read() -> None:
    assert resolve(PLAIN, attn_logit_softcapping=None) == resolve(PLAIN)
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping' to be null, found 50\.0.*gemma3"):
        resolve(PLAIN, attn_logit_softcapping=50.0)
    assert resolve(PLAIN, final_logit_softcapping=30.0).final_logit_softcapping == 30.0


# -- the text part of multimodal checkpoints --------------------------------------------------------------------------

VISION: Mapping[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A whole multimodal model as transformers saves it."""
    text = {**SHARED, **GEMMA3, "num_hidden_layers": 3, "layer_types": [WINDOWED, DENSE, WINDOWED]}
    config = Gemma3Config(
        text_config=text, vision_config=dict(VISION), mm_tokens_per_image=1, image_token_index=66, boi_token_index=65
    )
    config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config).eval()
    model.config.tie_word_embeddings = True
    fill(model)
    folder = tmp_path_factory.mktemp("multimodal")
    model.save_pretrained(folder)
    return model, folder


def test_multimodal_checkpoint_gives_its_text_decoder_in_both_layouts(
    multimodal: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = multimodal
    stored = load_file(folder / "model.safetensors")
    plain = {
        name.removeprefix("model.").removeprefix("language_model.").removeprefix("model."): t
        for name, t in stored.items()
    }
    text = {n: t for n, t in plain.items() if n.startswith(("embed_tokens", "layers", "norm"))}
    rest = {n: t for n, t in plain.items() if n not in text}
    assert any(name.startswith("vision_tower.") for name in rest)
    assert any(name.startswith("multi_modal_projector.") for name in rest)
    layouts = {
        "older": {f"language_model.model.{n}": t for n, t in text.items()} | rest,
        "newer": {f"model.language_model.{n}": t for n, t in text.items()} | {f"model.{n}": t for n, t in rest.items()},
    }
    for name, tensors in layouts.items():
        target = tmp_path / name
        shutil.copytree(folder, target)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        backbone = load(target)
        assert error_of_run(backbone, model)[0] < TOLERANCE, name
        with open_checkpoint(target) as checkpoint:
            assert checkpoint.model_type == "gemma3"
    more = {**layouts["newer"], "model.audio_tower.weight": torch.ones(2, 2)}
    save_file(more, tmp_path / "newer" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"unused tensors: model\.audio_tower\.weight"):
        load(tmp_path / "newer")


def test_nested_tie_flag_is_read_and_another_decoder_is_refused(multimodal: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = multimodal
    target = tmp_path / "m"
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    for said in (None, True):
        config["text_config"].pop("tie_word_embeddings", None)
        if said is not None:
            config["text_config"]["tie_word_embeddings"] = said
        (target / "config.json").write_text(json.dumps(config))
        backbone = load(target)
        assert backbone.lm_head.weight is backbone.model.embed_tokens.weight
        assert error_of_run(backbone, model)[0] < TOLERANCE
    config["text_config"]["model_type"] = "gemma3n_text"
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpointError, match=r"gemma3_text, found model_type 'gemma3n_text'"):
        load(target)


def test_sparse_config_is_filled_in_by_the_reference_class() -> None:
    spec = resolve({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}})
    theirs = Gemma3Config(text_config={"model_type": "gemma3_text", "hidden_size": 2560}).text_config
    for key in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "sliding_window", "query_pre_attn_scalar"),
        *("tie_word_embeddings", "final_logit_softcapping", "attention_bias"),
    ):
        assert getattr(spec, key) == getattr(theirs, key), key
    assert list(spec.layer_types) == theirs.layer_types
    assert spec.sources["vocab_size"] == "family default"
