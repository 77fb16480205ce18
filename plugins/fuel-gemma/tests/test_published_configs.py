"""Published configs of every release this family serves: each builds its whole spec.

`published_configs.json` holds their keys (without those that say nothing about the decoder), the parameter count that
follows from the published sizes (of the text decoder alone), and what the releases are known to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fuel_core import errors
from fuel_core.checkpoint import open_checkpoint
from fuel_core.cli import main
from fuel_core.discovery import families, family_for
from tiny_gemma import build_unloaded, resolve

from fuel_gemma.family import FAMILY

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text("utf-8")
)


def folder_of(config: Mapping[str, Any], folder: Path) -> Path:
    """A folder that holds this config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_builds_its_whole_spec(name: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]["config"], PUBLISHED[name]["expected"]
    with open_checkpoint(folder_of(config, tmp_path / name)) as checkpoint:
        assert not checkpoint.has_weights
        family = family_for(checkpoint)
        spec = family.resolve_config(checkpoint.raw)
    assert family.name == "gemma"
    for key, value in config.get("text_config", config).items():
        if key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
            assert getattr(spec, key) == value
    assert spec.dtype == config.get("torch_dtype", config.get("dtype", "float32"))
    assert (spec.hidden_act, spec.rms_norm_eps, spec.tie_word_embeddings) == ("gelu_pytorch_tanh", 1e-6, True)
    for key in ("head_dim", "num_attention_heads", "num_key_value_heads", "embed_scale"):
        assert getattr(spec, key) == expected[key], key
    backbone = build_unloaded(spec)
    assert backbone.decode_family() == expected["family"]
    plan, layers = backbone.mask_plan, range(spec.num_hidden_layers)
    assert [i for i in layers if plan.window_for_layer(i) is None] == expected["dense_layers"]
    assert spec.rope.theta == expected["theta"]
    if "window" in expected:
        assert {plan.window_for_layer(i) for i in layers} == {expected["window"], None}
        assert spec.query_pre_attn_scalar == expected["query_pre_attn_scalar"]
        assert [spec.attn_logit_softcapping, spec.final_logit_softcapping] == expected["caps"]
        attention = backbone.model.layers[0].self_attn  # type: ignore[union-attr,index]
        assert attention.scale == expected["query_pre_attn_scalar"] ** -0.5
    if "theta_local" in expected:
        assert (spec.rope_local.theta, spec.rope_local.factor) == (expected["theta_local"], None)
        assert spec.rope.factor == expected["factor"]
        assert [i for i in layers if backbone.rope_plan.variant_for_layer(i)] == expected["dense_layers"]
    tied = {parameter for parameter, _ in backbone.tied_weights()}
    count = sum(parameter.numel() for key, parameter in backbone.named_parameters() if key not in tied)
    assert count == PUBLISHED[name]["parameters"]
    assert all(parameter.is_meta for parameter in backbone.parameters())


def test_old_and_new_spelling_are_one_spec() -> None:
    assert resolve(PUBLISHED["gemma-3-1b-it.v5"]["config"]) == resolve(PUBLISHED["gemma-3-1b-it"]["config"])


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith(("gemma-2b", "gemma-7b", "gemma-2-"))])
def test_flat_configs_in_the_new_spelling_are_the_same_spec(name: str) -> None:
    old = PUBLISHED[name]["config"]
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": old["rope_theta"]}, "dtype": old["torch_dtype"]}
    assert resolve(new) == resolve(old)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma3n", "gemma3n_text", "Gemma", "gemma2b", "gemma3_vision"])
def test_model_type_is_matched_exactly(model_type: str, tmp_path: Path) -> None:
    config = {**PUBLISHED["gemma-2b"]["config"], "model_type": model_type}
    with (
        open_checkpoint(folder_of(config, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=rf"'{model_type}'.*gemma"),
    ):
        family_for(checkpoint)


def test_quantised_release_is_refused_by_the_name_of_its_method() -> None:
    with pytest.raises(errors.UnsupportedCheckpointError, match="gptq"):
        resolve({**PUBLISHED["gemma-2b"]["config"], "quantization_config": {"quant_method": "gptq"}})


def test_checkpoint_of_another_family_is_answered_by_its_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this family alone, another's checkpoint names what is missing and how families are installed."""
    monkeypatch.setenv("FUEL_FAMILIES", "gemma")
    with (
        open_checkpoint(folder_of({"model_type": "okapi"}, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=r"'okapi'.*gemma3_text.*docs/families.md"),
    ):
        family_for(checkpoint)


def test_metadata_names_what_the_family_serves() -> None:
    (record,) = [record for record in families() if record.distribution == "fuel-gemma"]
    assert record.name == FAMILY.name
    assert set(record.model_types) == set(FAMILY.model_types)
    assert set(record.gguf_architectures) == set(FAMILY.gguf_architectures)


@pytest.mark.parametrize("name", ["gemma-2-27b-it", "gemma-3-27b-it.sparse"])
def test_inspect_reads_a_folder_that_holds_only_a_config(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = PUBLISHED[name]
    assert main(["inspect", str(folder_of(entry["config"], tmp_path / name)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["has_weights"], report["family"]) == (False, "gemma")
    assert report["parameters"]["count"] == entry["parameters"]
    assert {layer["window"] for layer in report["layers"]} == {entry["expected"]["window"], None}
    assert report["config"]["embed_scale"]["value"] == entry["expected"]["embed_scale"]
