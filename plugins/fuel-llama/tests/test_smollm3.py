"""SmolLM3 against transformers, and every item of "Differs from Llama in" of its model file.

Largest genuine error: 4.9e-6 (logits up to 3). Smallest errors under sabotage, over the checkpoints that have what was
broken: RoPE on every layer 0.59; schedule shifted by one layer 0.90; window one too wide 1.1; windows on the other
layers 1.9; schedule inverted 1.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import InferenceContext
from fuel_core.errors import ConfigError
from tiny_llama import PATHS, decode, new_cache, reference_logits, token_ids, worst
from tiny_variants import (
    SHARED,
    TOLERANCE,
    build_unloaded,
    error_of_run,
    load_family,
    reference_of,
    resolve,
    save_and_load,
    separation,
    write_gguf_of,
)
from transformers import SmolLM3Config as ReferenceConfig
from transformers import SmolLM3ForCausalLM

from fuel_llama.llama import LlamaAttention, LlamaBackbone
from fuel_llama.smollm3 import UnrotatedAttention

WINDOW = 6
N_IDS = 9 + 3 * WINDOW
"""A prompt of 9 ids, longer than the window, and three windows of decode steps."""
CHUNKINGS = {"whole": [9], "chunks": [4, 3, 2], "tokens": [1] * 9}
SLIDING, FULL = "sliding_attention", "full_attention"

SCHEDULE = [1, 0, 0, 1, 1]
"""No period, and different read backwards, inverted or shifted."""
BASE: Mapping[str, Any] = {"num_hidden_layers": 5, "no_rope_layers": SCHEDULE, "pad_token_id": 0}
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "scheduled": {},
    "biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "windowed": {"use_sliding_window": True, "sliding_window": WINDOW},
    "listed": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, FULL, FULL, SLIDING],
    },
    "interval": {"no_rope_layers": None, "no_rope_layer_interval": 3, "head_dim": 32},
    "published": {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4},
    "none": {"no_rope_layers": [0] * 5},
}
PLAIN = {"model_type": "smollm3", **SHARED, **BASE}

Pair = tuple[LlamaBackbone, Any]


def reference(**changes: Any) -> Any:
    return reference_of(ReferenceConfig, SmolLM3ForCausalLM, **{**BASE, **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A checkpoint by name: ours and the reference."""

    @cache
    def make(name: str) -> Pair:
        theirs = reference(**CHECKPOINTS[name])
        return save_and_load(theirs, tmp_path_factory.mktemp(name)), theirs

    return make


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize(("plan", "offset_path"), PATHS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers_at_every_step(
    checkpoint: Callable[[str], Pair], name: str, plan: str, offset_path: str, chunking: str
) -> None:
    chunks = CHUNKINGS[chunking]
    error, ctx = error_of_run(*checkpoint(name), N_IDS, chunks, plan, offset_path)
    assert error < TOLERANCE
    singles = N_IDS - sum(size for size in chunks if size > 1)
    fresh = sum(size > 1 for size in chunks)
    expected = (0, 0, fresh + singles) if plan == "off" else (1, singles - 1, fresh)
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.fresh_steps) == expected


# -- layers that do not rotate ---------------------------------------------------------------------------------------


def test_references_of_other_schedules_are_far_apart() -> None:
    """What the parity above would miss if the schedule did not matter."""
    right = reference()
    for other in ([1 - value for value in SCHEDULE], SCHEDULE[::-1], [1] * 5, [*SCHEDULE[1:], 1]):
        assert separation(right, reference(no_rope_layers=other), N_IDS) > 1000 * TOLERANCE


def test_one_means_that_the_layer_uses_rope() -> None:
    backbone = build_unloaded(resolve(PLAIN, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]))
    kinds = [type(layer.self_attn) for layer in backbone.model.layers]  # type: ignore[attr-defined]
    assert kinds == [LlamaAttention] * 3 + [UnrotatedAttention]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7])
def test_absent_schedule_follows_the_interval_of_the_reference(interval: int) -> None:
    for absent in (..., None):
        spec = resolve(PLAIN, num_hidden_layers=9, no_rope_layers=absent, no_rope_layer_interval=interval)
        theirs = ReferenceConfig(num_hidden_layers=9, no_rope_layer_interval=interval).no_rope_layers
        assert spec.uses_rope == tuple(value == 1 for value in theirs)
        assert spec.sources["uses_rope"] == f"derived: no_rope_layer_interval {interval}"
    default = resolve(PLAIN, num_hidden_layers=9, no_rope_layers=...)
    assert default.uses_rope == tuple(value == 1 for value in ReferenceConfig(num_hidden_layers=9).no_rope_layers)


def test_published_schedule_and_its_interval_are_one_spec() -> None:
    listed = resolve(PLAIN, num_hidden_layers=36, no_rope_layers=[1, 1, 1, 0] * 9, layer_types=[FULL] * 36)
    assert [layer for layer, rotates in enumerate(listed.uses_rope) if not rotates] == list(range(3, 36, 4))
    assert listed == resolve(PLAIN, num_hidden_layers=36, no_rope_layers=..., no_rope_layer_interval=4)
    assert listed == resolve(PLAIN, num_hidden_layers=36, no_rope_layers=[1, 1, 1, 0] * 10)


def test_schedule_wins_over_the_interval() -> None:
    assert resolve(PLAIN, no_rope_layer_interval=2).uses_rope == (True, False, False, True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"each of the 5 layers in 'no_rope_layers', found 2"),
        ({"no_rope_layers": []}, r"each of the 5 layers in 'no_rope_layers', found 0"),
        ({"no_rope_layers": [1, 0, 3, 1, 1]}, r"no_rope_layers\[2\] to be 1 \(uses RoPE\) or 0, found 3"),
        ({"no_rope_layers": 4}, r"'no_rope_layers' to be a list, found 4"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, r"no_rope_layer_interval.*at least 1, found 0"),
        ({"layer_types": [FULL] * 4}, r"expected 5 items in 'layer_types' .*, found 4"),
        ({"layer_types": [FULL] * 4 + ["rolling"]}, r"layer_types\[4\].*'rolling'"),
        ({"layer_types": [FULL] * 4 + [SLIDING], "sliding_window": None}, r"sliding_window, since layer 4"),
    ],
)
def test_impossible_schedules_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(PLAIN, **changes)


def test_schedule_is_part_of_the_baked_config() -> None:
    left = build_unloaded(resolve(PLAIN))
    again, other = build_unloaded(resolve(PLAIN)), build_unloaded(resolve(PLAIN, no_rope_layers=[0, 1, 1, 1, 0]))
    assert left.structure_key() == again.structure_key()
    assert left.structure_key() != other.structure_key()
    components = zip(left.structure_key().components, other.structure_key().components, strict=True)
    assert [name for (name, value), (_, found) in components if value != found] == ["config.uses_rope"]
    with pytest.raises(ConfigError, match=r"'uses_rope' is baked"):
        left.reconfigure(uses_rope=(True,) * 5)


@pytest.mark.parametrize("offset_path", ["symbol", "device"])
def test_mixed_schedule_records_each_layer_structure_once(tmp_path: Path, offset_path: str) -> None:
    """Sizes that no other test has: recordings are shared by every model of a process."""
    sizes = {"hidden_size": 80 if offset_path == "symbol" else 72, "intermediate_size": 104, "head_dim": 20}
    backbone = save_and_load(reference(**sizes), tmp_path / "mixed")
    ids = token_ids(12)
    ctx, cache = InferenceContext("cpu", plan="recorded", offset_path=offset_path), new_cache(backbone)
    decode(backbone, ids, [4], cache, ctx)
    assert ctx.stats.recordings == 4  # embedding, a layer that rotates, one that does not, head
    (session,) = ctx.sessions
    recordings = [segment.recording for segment in session.plan.program.segments[1:-1]]
    assert [recordings.index(recording) for recording in recordings] == [0, 1, 1, 0, 0]
    rotating, still = recordings[:2]
    assert {"cos", "sin"} <= rotating.reads
    assert not {"cos", "sin"} & still.reads
    # Another schedule is another plan, made of the same recordings.
    other = save_and_load(reference(**sizes, no_rope_layers=[0, 1, 0, 1, 0]), tmp_path / "other")
    rows = decode(other, ids, [4], new_cache(other), ctx)
    assert worst(rows, reference_logits(reference(**sizes, no_rope_layers=[0, 1, 0, 1, 0]), ids)) < TOLERANCE
    assert (ctx.stats.plans_built, ctx.stats.recordings) == (2, 4)


# -- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": WINDOW},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": WINDOW},
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [SLIDING] * 2 + [FULL] * 3},
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ],
)
def test_windowed_layers_are_those_of_the_reference(changes: dict[str, Any]) -> None:
    theirs = ReferenceConfig(**{**SHARED, **BASE, **changes})
    spec = resolve(PLAIN, **changes)
    assert spec.layer_types == tuple(theirs.layer_types)
    plan = build_unloaded(spec).mask_plan
    expected = [WINDOW if kind == SLIDING else None for kind in theirs.layer_types]
    assert [plan.window_for_layer(layer) for layer in range(5)] == expected


def test_listed_layers_are_windowed_with_the_switch_off_as_the_references_mask_is(tmp_path: Path) -> None:
    changes = {"use_sliding_window": False, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2 + [FULL]}
    theirs = reference(**changes)
    assert separation(theirs, reference(), N_IDS) > 1000 * TOLERANCE
    error, _ = error_of_run(save_and_load(theirs, tmp_path), theirs, N_IDS, [9], "recorded", "symbol")
    assert error < TOLERANCE


def test_width_that_no_layer_uses_is_no_part_of_the_spec() -> None:
    assert resolve(PLAIN, use_sliding_window=False, sliding_window=WINDOW) == resolve(PLAIN)


@pytest.mark.parametrize("offset_path", ["symbol", "device"])
def test_other_width_reaches_a_held_plan(checkpoint: Callable[[str], Pair], tmp_path: Path, offset_path: str) -> None:
    backbone = save_and_load(checkpoint("windowed")[1], tmp_path)
    ids = token_ids(N_IDS, seed=5)
    ctx, cache = InferenceContext("cpu", plan="recorded", offset_path=offset_path), new_cache(backbone)
    for window in (WINDOW, 3, 11):
        backbone.reconfigure(sliding_window=window)
        cache.truncate_to(0)
        expected = reference(use_sliding_window=True, sliding_window=window)
        assert worst(decode(backbone, ids, [1], cache, ctx), reference_logits(expected, ids)) < TOLERANCE
    assert ctx.stats.plans_built == 1


# -- other defaults --------------------------------------------------------------------------------------------------


def test_head_shares_the_embedding_unless_the_config_says_otherwise() -> None:
    absent = {key: value for key, value in PLAIN.items() if key not in ("tie_word_embeddings", "rope_parameters")}
    spec = resolve(absent, rms_norm_eps=..., max_position_embeddings=...)
    theirs = ReferenceConfig()
    assert spec.tie_word_embeddings is theirs.tie_word_embeddings is True
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"] == 2e6
    assert (spec.rms_norm_eps, spec.max_position_embeddings) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert spec.sources["tie_word_embeddings"] == "family default"
    assert build_unloaded(spec).tied_weights() == (("lm_head.weight", "model.embed_tokens.weight"),)  # type: ignore[attr-defined]
    assert resolve(absent, tie_word_embeddings=False).tie_word_embeddings is False


# -- GGUF ------------------------------------------------------------------------------------------------------------


def test_gguf_file_means_every_fourth_layer_and_is_the_same_model(tmp_path: Path) -> None:
    theirs = reference(no_rope_layers=None, num_hidden_layers=6, tie_word_embeddings=True)
    folder_model = save_and_load(theirs, tmp_path / "folder")
    backbone = load_family(write_gguf_of(tmp_path / "m.gguf", theirs, "smollm3", {}))
    assert backbone.config.uses_rope == (True, True, True, False, True, True)  # type: ignore[attr-defined]
    found = dict(folder_model.named_parameters())
    assert all(torch.equal(p, found[n]) for n, p in backbone.named_parameters())
    error, _ = error_of_run(backbone, theirs, N_IDS, [9], "recorded", "symbol")
    assert error < TOLERANCE
    unpermuted = load_family(write_gguf_of(tmp_path / "u.gguf", theirs, "smollm3", {}, permute=False))
    assert error_of_run(unpermuted, theirs, N_IDS, [9], "recorded", "symbol")[0] > 1000 * TOLERANCE
