"""Whose plan a plan is: models of one geometry and other weights are two models, and a model is one with itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuel_core import InferenceContext, KvCache, explain, forward_decode_step
from tiny_llama import load, new_cache, reference_model, save
from torch import Tensor

from fuel_llama.llama import LlamaBackbone

Copier = Callable[[LlamaBackbone], LlamaBackbone]
COPIERS: dict[str, Copier] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model(head_dim=16), tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model(seed=1, head_dim=16), tmp_path_factory.mktemp("second"))


def last_logits(model: LlamaBackbone, cache: KvCache, ctx: InferenceContext) -> Tensor:
    """Ids 3, 4, 5 one by one on an emptied cache."""
    cache.truncate_to(0)
    for token_id in (3, 4, 5):
        logits = forward_decode_step(model, [token_id], cache, ctx)
    return logits


def test_same_geometry_different_weights_do_not_share_a_plan(folder: Path, other_folder: Path) -> None:
    first, second = load(folder), load(other_folder)
    assert first.config == second.config
    (difference,) = explain(first.decode_shape_key(), second.decode_shape_key())
    assert difference.component == "instance"
    # What may be shared is what names recordings and code.
    assert first.structure_key() == second.structure_key()

    # One cache and one context, so that nothing but the model can tell the two plans apart.
    cache, ctx = new_cache(first), InferenceContext("cpu", plan="recorded")
    fresh = InferenceContext("cpu", plan="off")
    expected = [last_logits(model, new_cache(first), fresh) for model in (first, second)]
    for model, logits in [(first, expected[0]), (second, expected[1]), (first, expected[0])]:
        assert (last_logits(model, cache, ctx) - logits).abs().max() < 1e-5
    assert (expected[0] - expected[1]).abs().max() > 0.1
    assert ctx.stats.plans_built == 2
    assert ctx.stats.replans == {"instance": 1}
    # Coming back to the first model rebuilt nothing, and the second plan was no second recording.
    assert len(ctx.sessions) == 2
    assert ctx.stats.recordings <= 3


def test_a_model_equals_itself(folder: Path) -> None:
    model = load(folder)
    assert model.decode_shape_key() == model.decode_shape_key()
    assert explain(model.decode_shape_key(), model.decode_shape_key()) == ()
    cache, ctx = new_cache(model), InferenceContext("cpu", plan="recorded")
    for _ in range(3):
        last_logits(model, cache, ctx)
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 8, {})


def test_the_same_file_loaded_twice_is_two_models(folder: Path) -> None:
    first, second = load(folder), load(folder)
    assert [d.component for d in explain(first.decode_shape_key(), second.decode_shape_key())] == ["instance"]


@pytest.mark.parametrize("how", COPIERS)
def test_copies_are_other_models(folder: Path, how: str) -> None:
    model = load(folder)
    before = model.decode_shape_key()
    cache, ctx = new_cache(model), InferenceContext("cpu", plan="recorded")
    expected = last_logits(model, cache, ctx)
    twin = COPIERS[how](model)
    assert twin.instance_id != model.instance_id
    assert "instance" in [d.component for d in explain(before, twin.decode_shape_key())]
    assert model.decode_shape_key() == before

    if how != "copy":  # a shallow copy shares its modules, and with them the weights
        with torch.no_grad():
            twin.lm_head.weight.mul_(-1.0)
        assert (last_logits(twin, cache, ctx) + expected).abs().max() < 1e-5
    else:
        assert (last_logits(twin, cache, ctx) - expected).abs().max() < 1e-5
    assert ctx.stats.plans_built == 2
    assert (last_logits(model, cache, ctx) - expected).abs().max() < 1e-5
    assert ctx.stats.plans_built == 2


@pytest.mark.parametrize(
    ("changes", "component"),
    [
        ({"num_key_value_heads": 4}, "config.num_key_value_heads"),
        ({"head_dim": 24}, "config.head_dim"),
        ({"hidden_size": 64}, "config.hidden_size"),
        ({"intermediate_size": 96}, "config.intermediate_size"),
        ({"num_hidden_layers": 2}, "config.num_hidden_layers"),
        ({"vocab_size": 71}, "config.vocab_size"),
        ({"rms_norm_eps": 1e-6}, "config.rms_norm_eps"),
        ({"attention_bias": True}, "config.attention_bias"),
        ({"mlp_bias": True}, "config.mlp_bias"),
        ({"tie_word_embeddings": True}, "config.tie_word_embeddings"),
    ],
)
def test_every_baked_field_tells_two_geometries_apart(
    folder: Path, tmp_path: Path, changes: dict[str, object], component: str
) -> None:
    other = load(save(reference_model(**{"head_dim": 16, **changes}), tmp_path))
    named = [d.component for d in explain(load(folder).structure_key(), other.structure_key())]
    assert component in named


def test_rope_is_bound_and_stays_out_of_the_key(folder: Path) -> None:
    """Other frequencies reach a held plan without a rebuild, and change what it says."""
    model = load(folder)
    key = model.decode_shape_key()
    cache, ctx = new_cache(model), InferenceContext("cpu", plan="recorded")
    before = last_logits(model, cache, ctx)
    rope = type(model.config.rope)(kind="default", theta=20.0)
    model.reconfigure(rope=rope)
    assert model.decode_shape_key() == key
    after = last_logits(model, cache, ctx)
    fresh = last_logits(model, new_cache(model), InferenceContext("cpu", plan="off"))
    assert (after - fresh).abs().max() < 1e-5
    assert (after - before).abs().max() > 1e-2
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 5, {})
