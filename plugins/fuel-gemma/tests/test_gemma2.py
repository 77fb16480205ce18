"""Every item of "Differs from Llama in" of the model file of Gemma 2.

Its parity with transformers stands in test_against_transformers; here each part is moved on its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import InferenceContext, forward_decode_step
from fuel_core.errors import ConfigError
from tiny_gemma import (
    DENSE,
    GEMMA2,
    N_IDS,
    PATHS,
    SHARED,
    WINDOW,
    WINDOWED,
    build_unloaded,
    decode,
    error_of_run,
    new_cache,
    reference_logits,
    reference_of,
    resolve,
    save_and_load,
    separation,
    token_ids,
    worst,
)

from fuel_gemma.gemma import GemmaRMSNorm

TOLERANCE = 1e-5
PLAIN: dict[str, Any] = {**SHARED, **GEMMA2, "model_type": "gemma2", "rope_theta": 10000.0, "torch_dtype": "float32"}


def test_a_block_has_four_norms_and_each_reaches_the_logits(tmp_path: Path) -> None:
    reference = reference_of("two")
    backbone = save_and_load(reference, tmp_path)
    (layer, *_) = backbone.model.layers
    names = [name for name, module in layer.named_children() if isinstance(module, GemmaRMSNorm)]
    assert len(names) == 4
    cache, ids = new_cache(backbone), token_ids(12)
    plain = decode(backbone, ids, [5], cache, InferenceContext("cpu"))
    for name in names:
        weight = layer.get_parameter(f"{name}.weight")
        kept = weight.clone()
        with torch.no_grad():
            weight.add_(0.5)
        cache.truncate_to(0)
        moved = decode(backbone, ids, [5], cache, InferenceContext("cpu"))
        weight.copy_(kept)
        assert max(float((a - b).abs().max()) for (_, a), (_, b) in zip(plain, moved, strict=True)) > 0.01, name


# -- windows ----------------------------------------------------------------------------------------------------------


def test_every_other_layer_has_a_window_the_first_included() -> None:
    plan = build_unloaded(resolve(PLAIN)).mask_plan
    assert [plan.window_for_layer(i) for i in range(3)] == [WINDOW, None, WINDOW]
    kinds = [DENSE, WINDOWED, WINDOWED]
    plan = build_unloaded(resolve(PLAIN, layer_types=kinds)).mask_plan
    assert [plan.window_for_layer(i) for i in range(3)] == [None, WINDOW, WINDOW]
    absent = resolve(PLAIN, sliding_window=...)
    assert (absent.sliding_window, absent.sources["sliding_window"]) == (4096, "family default")


@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
def test_window_of_four_sees_three_keys_back_and_not_the_fourth(tmp_path: Path, plan: str, offset_path: str) -> None:
    """A huge value at each position in turn moves the logits exactly where the window reaches."""
    ids = token_ids(10)
    last = len(ids) - 1
    changes = {"sliding_window": 4, "num_hidden_layers": 1, "layer_types": [WINDOWED]}
    reference = reference_of("two", **changes)
    backbone = save_and_load(reference, tmp_path)
    ctx, cache = InferenceContext("cpu", plan=plan, offset_path=offset_path), new_cache(backbone, 16)
    for token in ids[:last]:  # so that the step below is a rebind where there are plans
        forward_decode_step(backbone, [token], cache, ctx)
    quiet = forward_decode_step(backbone, ids[last:], cache, ctx)
    assert (quiet - reference_logits(reference, ids)[last]).abs().max() < TOLERANCE
    seen = []
    for position in range(last):
        cache.truncate_to(last)
        row = cache.layer(0)["v"][:, :, position]
        kept = row.clone()
        row += 1e4
        if not torch.equal(forward_decode_step(backbone, ids[last:], cache, ctx), quiet):
            seen.append(position)
        cache.layer(0)["v"][:, :, position] = kept
    assert seen == [last - 3, last - 2, last - 1]


def test_other_width_reaches_a_held_plan(tmp_path: Path) -> None:
    backbone = save_and_load(reference_of("two"), tmp_path)
    ids = token_ids(N_IDS)
    ctx, cache = InferenceContext("cpu", plan="recorded"), new_cache(backbone)
    for window in (WINDOW, 3, 11):
        backbone.reconfigure(sliding_window=window)
        cache.truncate_to(0)
        expected = reference_logits(reference_of("two", sliding_window=window), ids)
        assert worst(decode(backbone, ids, [1], cache, ctx), expected) < TOLERANCE
        assert ctx.stats.plans_built == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [WINDOWED, DENSE]}, r"expected 3 items in 'layer_types' .*, found 2"),
        ({"layer_types": [WINDOWED, DENSE, "chunked_attention"]}, r"layer_types\[2\].*found 'chunked_attention'"),
        ({"sliding_window": None}, r"sliding_window, since layer 0"),
    ],
)
def test_impossible_schedules_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(PLAIN, **changes)


# -- caps and scale ---------------------------------------------------------------------------------------------------

LOUD = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""The published caps, which bite on nothing below some tens."""


def _enlarged(model: Any) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".q_proj." in name or ".k_proj." in name:
                parameter.mul_(30.0)
    return model


@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
def test_scores_above_fifty_are_capped_before_the_mask(tmp_path: Path, plan: str, offset_path: str) -> None:
    """With weights of the usual size the cap cannot be seen; queries and keys are thirty times as large here.

    Genuine 1.9e-3: scores of some hundreds, whose last bits the softmax turns into weights. Without the cap: above 0.1.
    """
    reference = _enlarged(reference_of("two", **LOUD))
    error, _ = error_of_run(save_and_load(reference, tmp_path), reference, [9], plan, offset_path)
    assert error < 1e-2


def test_capless_reference_is_far_from_a_capped_one() -> None:
    bare = {**LOUD, "attn_logit_softcapping": None}
    assert separation(_enlarged(reference_of("two", **LOUD)), _enlarged(reference_of("two", **bare))) > 0.1


def test_logits_are_capped_by_their_own_number() -> None:
    backbone = build_unloaded(resolve(PLAIN, final_logit_softcapping=30.0)).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()
        backbone.lm_head.weight = torch.nn.Parameter(torch.full((67, 96), 45.0 / 96), requires_grad=False)
    capped = backbone.decode_final_norm_and_head(torch.ones(1, 1, 96))
    assert float(capped[0, 0, 0]) == pytest.approx(27.1544, abs=2e-3)


def test_a_null_cap_emits_no_op(tmp_path: Path) -> None:
    for name, tanhs in (("two", 4), ("two_full", 0)):
        backbone = save_and_load(reference_of(name), tmp_path / name)
        ctx = InferenceContext("cpu", plan="recorded", offset_path="device")
        decode(backbone, token_ids(6), [3], new_cache(backbone, 16), ctx)
        (session,) = ctx.sessions
        assert sum("tanh" in op for op in session.ops) == tanhs


def test_null_and_absent_caps_differ() -> None:
    absent = resolve(PLAIN, attn_logit_softcapping=..., final_logit_softcapping=...)
    assert (absent.attn_logit_softcapping, absent.final_logit_softcapping) == (50.0, 30.0)
    null = resolve(PLAIN, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (null.attn_logit_softcapping, null.final_logit_softcapping) == (None, None)
    assert build_unloaded(null).structure_key() != build_unloaded(absent).structure_key()


def test_queries_are_scaled_by_the_scalar_and_not_by_head_dim() -> None:
    backbone = build_unloaded(resolve(PLAIN, head_dim=16))
    assert backbone.model.layers[0].self_attn.scale == pytest.approx(24**-0.5)  # type: ignore[union-attr,index]
    assert resolve(PLAIN, query_pre_attn_scalar=...).query_pre_attn_scalar == 256
