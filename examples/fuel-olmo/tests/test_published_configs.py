"""Configs of the releases this family serves: each builds its whole spec, and neighbours are refused by name.

`published_configs.json` holds the keys that say something about the decoder, and the parameter count that follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fuel_core import RawConfig, errors, open_checkpoint
from fuel_core.cli import main
from fuel_core.discovery import families, family_for
from tiny_olmo import build_unloaded, resolve

from fuel_olmo.family import FAMILY

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text("utf-8")
)
SEVEN = PUBLISHED["OLMo-2-1124-7B"]["config"]


def folder_of(config: Mapping[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_builds_its_whole_spec(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name]["config"]
    with open_checkpoint(folder_of(config, tmp_path)) as checkpoint:
        family = family_for(checkpoint)
        spec = family.resolve_config(checkpoint.raw)
    assert family.name == "olmo"
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"):
        assert getattr(spec, key) == config[key]
    assert (spec.rope.kind, spec.rope.theta, spec.head_dim) == ("default", 500000.0, 128)
    backbone = build_unloaded(spec)
    assert sum(p.numel() for p in backbone.parameters()) == PUBLISHED[name]["parameters"]
    assert all(p.is_meta for p in backbone.parameters())
    assert backbone.model.layers[0].self_attn.k_norm.weight.shape == (config["num_key_value_heads"] * 128,)


def test_config_saved_again_by_a_newer_library_is_the_same_spec() -> None:
    newer = {key: value for key, value in SEVEN.items() if not key.startswith("rope_")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert resolve(newer) == resolve(SEVEN)


@pytest.mark.parametrize("model_type", ["olmo", "olmo3", "olmoe", "Olmo2", "olmo_hybrid"])
def test_model_type_is_matched_exactly(model_type: str, tmp_path: Path) -> None:
    with (
        open_checkpoint(folder_of({**SEVEN, "model_type": model_type}, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=rf"'{model_type}'"),
    ):
        family_for(checkpoint)


def test_quantised_checkpoint_is_refused() -> None:
    with pytest.raises(errors.UnsupportedCheckpointError, match="awq"):
        FAMILY.resolve_config(RawConfig.from_config({**SEVEN, "quantization_config": {"quant_method": "awq"}}))


def test_metadata_names_what_the_family_serves() -> None:
    (record,) = [record for record in families() if record.distribution == "fuel-olmo"]
    assert record.name == FAMILY.name
    assert set(record.model_types) == set(FAMILY.model_types)
    assert set(record.gguf_architectures) == set(FAMILY.gguf_architectures)


def test_inspect_reads_a_folder_that_holds_only_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder_of(SEVEN, tmp_path)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["has_weights"], report["family"]) == (False, "olmo")
    assert report["parameters"]["count"] == PUBLISHED["OLMo-2-1124-7B"]["parameters"]
