"""Packed weights: logits against transformers on the very numbers that are stored, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import InferenceContext, layers
from fuel_core.layers.packed_formats import pieces, shape_of
from tiny_qwen import (
    CHECKPOINTS,
    MOE,
    PATHS,
    decode,
    load,
    new_cache,
    reference_logits,
    reference_model,
    save,
    token_ids,
    worst,
)
from torch import Tensor

from fuel_qwen.qwen2 import Qwen2Backbone

IDS = token_ids(24, seed=3)
# Rows of whole groups of 32 everywhere, so that int4 can hold every matrix.
WIDE = {"intermediate_size": 160}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {**CHECKPOINTS["qwen2_full_heads"], **WIDE},
    "qwen3": {**CHECKPOINTS["qwen3_biased"], **WIDE, "head_dim": 32},
    "moe": {**MOE, **WIDE, "head_dim": 32},
}
KERNEL_TOLERANCE = 0.1
"""Logits up to 2; kernels round what they read. Genuine: 2.8e-2 (int8), 1.4e-2 (int4); with experts 8.8e-3 and 9.0e-3.
Rows or scales of a neighbour in every down_proj: int8 1.8 and more, int4 0.18 and more, with experts 0.48.
"""


def dequantised(module: layers.Linear | layers.Embedding) -> Tensor:
    """float32 ``[out, in]``"""
    n, k = shape_of(module)
    stored = {name: p for name, p in module.named_parameters() if name != "bias"}
    return torch.cat([module.weight_format.unpacked(stored, (n, k), a, b) for a, b in pieces(n, k)])


def dequantised_experts(module: layers.ExpertLinear) -> Tensor:
    """float32 ``[E, out, in]``"""
    shape, stored = (module.out_features, module.in_features), dict(module.named_parameters())
    return torch.stack(
        [
            module.weight_format.unpacked({name: p[e] for name, p in stored.items()}, shape, 0, shape[0])
            for e in range(module.n_experts)
        ]
    )


def oracle_of(backbone: Qwen2Backbone, config: dict[str, Any]) -> Any:
    """transformers on the numbers that ``backbone`` stores."""
    reference = reference_model(**config)
    with torch.no_grad():
        for name, module in backbone.named_modules():
            if isinstance(module, layers.Linear | layers.Embedding):
                reference.get_parameter(f"{name}.weight").copy_(dequantised(module))
            elif isinstance(module, layers.Experts):
                both = [dequantised_experts(part) for part in (module.gate_proj, module.up_proj)]
                reference.get_parameter(f"{name}.gate_up_proj").copy_(torch.cat(both, dim=1))
                reference.get_parameter(f"{name}.down_proj").copy_(dequantised_experts(module.down_proj))
    return reference


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_gives_the_logits_of_transformers_on_the_stored_numbers(
    name: str, word: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    backbone = load(save(reference_model(**config), tmp_path), weights=word)
    formats = {m.packed_format for m in backbone.modules() if hasattr(m, "packed_format")}
    assert formats == {word}
    expected = reference_logits(oracle_of(backbone, config), IDS)
    original = reference_logits(reference_model(**config), IDS)
    assert float((expected - original).abs().max()) > 1e-3, "the format changes the numbers"
    for plan, offset in PATHS:
        ctx = InferenceContext("cpu", plan=plan, offset_path=offset)
        rows = decode(backbone, IDS, [9], new_cache(backbone, 32), ctx)
        assert worst(rows, expected) < KERNEL_TOLERANCE
        if plan != "off":
            assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 14, {})


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tolerance_sees_the_scales_or_rows_of_a_neighbour(name: str, word: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    backbone = load(save(reference_model(**config), tmp_path), weights=word)
    expected = reference_logits(oracle_of(backbone, config), IDS)
    kind = {"int8": "weight", "int4": "weight_scale_and_zero"}[word]
    for layer in backbone.model.layers:
        module = layer.mlp.experts.down_proj if name == "moe" else layer.mlp.down_proj
        stored, axis = getattr(module, kind), 1 if name == "moe" else 0
        module._parameters[kind] = torch.nn.Parameter(stored.roll(1, axis).contiguous(), requires_grad=False)
    rows = decode(backbone, IDS, [9], new_cache(backbone, 32), InferenceContext("cpu"))
    assert worst(rows, expected) > 1.5 * KERNEL_TOLERANCE


@pytest.mark.parametrize("save_original_format", [True, False])
def test_both_layouts_of_experts_that_transformers_writes_are_one_model(
    save_original_format: bool, tmp_path: Path
) -> None:
    reference = reference_model(**MOE)
    folder = save(reference, tmp_path, save_original_format=save_original_format)
    from fuel_core import open_checkpoint

    names = open_checkpoint(folder).tensor_names()
    assert any("experts.3." in name for name in names) == save_original_format
    experts = load(folder).model.layers[1].mlp.experts
    theirs = reference.model.layers[1].mlp.experts
    assert torch.equal(torch.cat((experts.gate_proj.weight, experts.up_proj.weight), dim=1), theirs.gate_up_proj)
    assert torch.equal(experts.down_proj.weight, theirs.down_proj)
