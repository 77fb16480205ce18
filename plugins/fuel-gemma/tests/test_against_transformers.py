"""Logits against transformers on tiny random checkpoints: every step, both offset paths, with and without a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import InferenceContext, layers
from fuel_core.layers.packed_formats import pieces, shape_of
from tiny_gemma import (
    CHECKPOINTS,
    CHUNKINGS,
    CLASSES,
    DENSE,
    N_IDS,
    PATHS,
    TWO_BASES,
    WINDOW,
    WINDOWED,
    decode,
    error_of_run,
    load,
    new_cache,
    reference_logits,
    reference_of,
    save_and_load,
    separation,
    token_ids,
    worst,
)
from torch import Tensor

from fuel_gemma.gemma import GemmaBackbone

F32_TOLERANCE = 1e-5
"""Largest genuine error: 5.1e-6 (logits up to 3.8). What a wrong part costs is measured below: above 1e-2, each."""
BF16_TOLERANCE = 0.12
"""Against transformers in bfloat16, logits up to 3.8: genuine 4.9e-2; one norm without its 1: 1.5."""
KERNEL_TOLERANCE = 0.1
"""Packed weights against transformers on the numbers they store; the kernels read 16 bits. Genuine 1.2e-2; rows of one
matrix moved by one 1.8, scales of one 0.24.
"""

Pair = tuple[GemmaBackbone, Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A checkpoint by name: ours and the reference."""

    @cache
    def make(name: str) -> Pair:
        reference = reference_of(name)
        return save_and_load(reference, tmp_path_factory.mktemp(name)), reference

    return make


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers_at_every_step(
    checkpoint: Callable[[str], Pair], name: str, plan: str, offset_path: str, chunking: str
) -> None:
    chunks = CHUNKINGS[chunking]
    error, ctx = error_of_run(*checkpoint(name), chunks, plan, offset_path)
    assert error < F32_TOLERANCE
    singles = N_IDS - sum(size for size in chunks if size > 1)
    fresh = sum(size > 1 for size in chunks)
    expected = (0, 0, fresh + singles) if plan == "off" else (1, singles - 1, fresh)
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.fresh_steps) == expected
    assert ctx.stats.replans == {}


# -- the fixtures can see ---------------------------------------------------------------------------------------------

ONE_BASE = {kind: {"rope_type": "default", "rope_theta": 100.0} for kind in (DENSE, WINDOWED)}
DIFFERENCES = [
    ("one", {"hidden_act": "silu"}),
    ("two", {"sliding_window": WINDOW + 1}),
    ("two", {"layer_types": [DENSE, WINDOWED, DENSE]}),
    ("two", {"attn_logit_softcapping": None}),
    ("two", {"final_logit_softcapping": None}),
    ("two", {"query_pre_attn_scalar": 20}),
    ("three", {"sliding_window": WINDOW + 1}),
    ("three", {"layer_types": [WINDOWED] * 6 + [DENSE]}),
    ("three", {"query_pre_attn_scalar": 20}),
    ("three", {"rope_parameters": ONE_BASE}),
    ("three", {"rope_parameters": {**TWO_BASES, DENSE: {"rope_type": "default", "rope_theta": 5000.0}}}),
]


@pytest.mark.parametrize(("name", "change"), DIFFERENCES)
def test_a_wrong_part_is_far_outside_the_tolerance(name: str, change: dict[str, Any]) -> None:
    """Two references that differ in one part, at the lengths of the parity above, which would be blind if near."""
    assert separation(reference_of(name), reference_of(name, **change)) > 1000 * F32_TOLERANCE


def test_norm_weights_of_the_fixtures_are_no_neutral_ones(checkpoint: Callable[[str], Pair]) -> None:
    for name in CHECKPOINTS:
        for parameter, values in checkpoint(name)[0].named_parameters():
            if parameter.endswith(("norm.weight", ".bias")):
                assert float(values.abs().max()) > 0.2, parameter


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one_full", "two", "three_full"])
def test_bfloat16_stays_within_rounding_of_the_reference(name: str, tmp_path: Path) -> None:
    reference = reference_of(name).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    theirs = CLASSES[CHECKPOINTS[name][0]][1].from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    exact = reference_logits(theirs.eval(), token_ids(N_IDS))
    backbone = load(tmp_path)
    assert {p.dtype for p in backbone.parameters()} == {torch.bfloat16}
    for plan, offset_path in PATHS:
        ctx = InferenceContext("cpu", plan=plan, offset_path=offset_path)
        rows = decode(backbone, token_ids(N_IDS), [9], new_cache(backbone, dtype=torch.bfloat16), ctx)
        assert worst(rows, exact) < BF16_TOLERANCE


# -- packed weights ---------------------------------------------------------------------------------------------------

PACKABLE = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "intermediate_size": 160,
    "layer_types": [WINDOWED, DENSE, WINDOWED],
}


def _dequantised(module: layers.Linear | layers.Embedding) -> Tensor:
    n, k = shape_of(module)
    stored = {name: p for name, p in module.named_parameters() if name != "bias"}
    return torch.cat([module.weight_format.unpacked(stored, (n, k), a, b) for a, b in pieces(n, k)])


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_packed_weights_give_the_logits_of_the_numbers_they_store(tmp_path: Path, word: str) -> None:
    backbone = save_and_load(reference_of("three", **PACKABLE), tmp_path, weights=word)
    oracle = reference_of("three", **PACKABLE)
    with torch.no_grad():
        for name, module in backbone.named_modules():
            if isinstance(module, layers.Linear | layers.Embedding):
                assert module.packed_format == word
                oracle.get_parameter(f"{name}.weight").copy_(_dequantised(module))
    assert backbone.lm_head.weight is backbone.model.embed_tokens.weight
    for plan, offset_path in PATHS:
        error, ctx = error_of_run(backbone, oracle, [9], plan, offset_path)
        assert error < KERNEL_TOLERANCE
        assert ctx.stats.replans == {}
    moved = backbone.model.layers[0].mlp.down_proj
    field = {"int8": "weight", "int4": "weight_scale_and_zero"}[word]
    moved._parameters[field] = torch.nn.Parameter(getattr(moved, field).roll(1, 0), requires_grad=False)
    assert error_of_run(backbone, oracle)[0] > 2 * KERNEL_TOLERANCE


# -- what a step costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "norms"), [("one", 2), ("two", 4), ("three", 6)])
def test_a_norm_is_two_ops_of_a_held_step(checkpoint: Callable[[str], Pair], name: str, norms: int) -> None:
    """The gain is made at every step, so that an edit of the weight in place is followed; nothing else is added."""
    backbone, _ = checkpoint(name)
    ctx = InferenceContext("cpu", plan="recorded")
    decode(backbone, token_ids(6), [3], new_cache(backbone, 16), ctx)
    (session,) = ctx.sessions
    n_layers = backbone.config.num_hidden_layers
    ops = [op.removeprefix("aten.").split(".")[0] for op in session.ops]
    assert ops.count("rms_norm") == norms * n_layers + 1
    # Of a layer: one for each norm, two of rotations, two of the residual.
    assert ops.count("add") == (norms + 4) * n_layers + 1
