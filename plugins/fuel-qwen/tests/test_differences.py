"""One test for each thing that the model files say differs from Llama, beyond what its config resolves to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import layers
from tiny_qwen import (
    CHECKPOINTS,
    MOE,
    build_unloaded,
    error_of,
    load,
    reference_logits,
    reference_model,
    resolve,
    save,
    token_ids,
)

from fuel_qwen import qwen2, qwen3, qwen3_moe

TOLERANCE = 1e-5
"""float32: calibrated in test_against_transformers."""


def biased(backbone: Any) -> set[str]:
    """Kinds of projection that have a bias."""
    return {
        name.rpartition(".")[2]
        for name, module in backbone.named_modules()
        if isinstance(module, layers.Linear) and module.bias is not None
    }


@pytest.mark.parametrize("module", [qwen2, qwen3, qwen3_moe])
def test_every_model_file_opens_with_its_differences(module: Any) -> None:
    paragraphs = (module.__doc__ or "").split("\n\n")
    assert paragraphs[1].startswith("Differs from Llama in:\n- ")
    assert len(re.findall(r"^- ", paragraphs[1], re.MULTILINE)) >= 2


@pytest.mark.parametrize("claimed", [False, True, ...])
def test_qwen2_has_biases_on_what_goes_in_whatever_the_config_says(claimed: Any) -> None:
    config = reference_model(**CHECKPOINTS["qwen2"]).config.to_dict()
    assert biased(build_unloaded(resolve(config, attention_bias=claimed))) == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_one_switch_is_all_biases_of_qwen3(name: str) -> None:
    config = reference_model(**CHECKPOINTS[name]).config.to_dict()
    assert biased(build_unloaded(resolve(config, attention_bias=False))) == set()
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert biased(build_unloaded(resolve(config, attention_bias=True))) == attention


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_queries_and_keys_are_normalised_in_dense_and_moe_alike(name: str, which: str, tmp_path: Path) -> None:
    """A gain of 3 must move the logits as it moves those of the reference; a norm left out would not notice it."""
    reference = reference_model(**CHECKPOINTS[name])
    before = reference_logits(reference, token_ids(24)).clone()
    backbone = load(save(reference, tmp_path))
    other = reference_model(**CHECKPOINTS[name])
    with torch.no_grad():
        for layer, theirs in zip(backbone.model.layers, other.model.layers, strict=True):
            getattr(layer.self_attn, which).weight.data.fill_(3.0)
            getattr(theirs.self_attn, which).weight.fill_(3.0)
    assert error_of(backbone, other) < 3 * TOLERANCE  # scores three times as large
    assert float((reference_logits(other, token_ids(24)) - before).abs().max()) > 1000 * TOLERANCE


def test_one_gain_of_a_head_serves_all_heads() -> None:
    attention = build_unloaded(resolve(reference_model(**CHECKPOINTS["qwen3"]).config.to_dict())).model.layers[0]
    assert attention.self_attn.q_norm.weight.shape == attention.self_attn.k_norm.weight.shape == (32,)


def test_experts_stand_where_the_schedule_says(tmp_path: Path) -> None:
    backbone = load(save(reference_model(**CHECKPOINTS["moe_mixed"]), tmp_path))
    sparse = [isinstance(layer.mlp, qwen3_moe.Qwen3MoeMLP) for layer in backbone.model.layers]
    assert sparse == [False, True, False, False]
    assert backbone.model.layers[0].mlp.up_proj.weight.shape == (136, 96)
    assert backbone.model.layers[1].mlp.experts.up_proj.weight.shape == (6, 64, 96)
    assert backbone.model.layers[1].mlp.gate.renormalize is False


def test_a_window_of_a_mixture_is_on_every_layer() -> None:
    config = {**reference_model(**MOE).config.to_dict(), "use_sliding_window": True, "sliding_window": 5}
    plan = build_unloaded(resolve(config, max_window_layers=2)).mask_plan
    assert plan.windows == (5,)


def test_a_checkpoint_that_lacks_an_expert_is_refused_by_its_name(tmp_path: Path) -> None:
    from fuel_core.errors import WeightsError
    from safetensors.torch import load_file, save_file

    folder = save(reference_model(**MOE), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.gate_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing: model\.layers\.1\.mlp\.experts\.3\.gate_proj"):
        load(folder)
