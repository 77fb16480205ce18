"""Published configs of every release this family serves: each builds its whole spec, or is refused by name.

`published_configs.json` holds their keys (without those that say nothing about the decoder), the parameter count their
publishers state, and what the releases are known to be; `ministral-3` counts its text decoder alone.
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
from tiny_variants import build_unloaded, resolve

from fuel_llama.family import FAMILY

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text("utf-8")
)
BUILT = [name for name, entry in PUBLISHED.items() if "expected" in entry]
REFUSED = [name for name, entry in PUBLISHED.items() if "refused" in entry]


def folder_of(config: Mapping[str, Any], folder: Path) -> Path:
    """A folder that holds this config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def newer_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config as transformers 5 saves it: RoPE in one block, ``dtype``."""
    new = dict(config)
    scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
    theta = new.pop("rope_theta", 10000.0)
    new["rope_parameters"] = {**scaling, "rope_theta": theta}
    new["dtype"] = new.pop("torch_dtype")
    return new


def older_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 in the older words, nested ones included."""
    old = {key: older_spelling(value) if key == "text_config" else value for key, value in config.items()}
    if "rope_parameters" in old:
        block = dict(old.pop("rope_parameters"))
        old["rope_theta"] = block.pop("rope_theta")
        kind = block.pop("rope_type")
        old["rope_scaling"] = {**block, "type": kind}
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    return old


def test_every_published_config_is_built_or_refused() -> None:
    assert set(BUILT) | set(REFUSED) == set(PUBLISHED)
    assert not set(BUILT) & set(REFUSED)


@pytest.mark.parametrize("name", BUILT)
def test_published_config_builds_its_whole_spec(name: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]["config"], PUBLISHED[name]["expected"]
    with open_checkpoint(folder_of(config, tmp_path / name)) as checkpoint:
        assert not checkpoint.has_weights
        family = family_for(checkpoint)
        spec = family.resolve_config(checkpoint.raw)
    assert family.name == "llama"
    decoder = config.get("text_config", config)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        assert getattr(spec, key) == decoder[key]
    assert spec.rms_norm_eps == decoder["rms_norm_eps"]
    assert spec.dtype == config.get("torch_dtype", config.get("dtype"))
    backbone = build_unloaded(spec)
    assert backbone.decode_family() == expected["family"]
    assert (spec.head_dim, spec.num_key_value_heads) == (expected["head_dim"], expected["num_key_value_heads"])
    assert (spec.rope.kind, spec.rope.theta) == (expected["rope"], expected["theta"])
    assert backbone.mask_plan.windows == (expected["window"],)
    unrotated = [layer for layer, rotates in enumerate(getattr(spec, "uses_rope", ())) if not rotates]
    assert unrotated == expected["layers_without_rope"]
    tied = {name for name, _ in backbone.tied_weights()}
    count = sum(parameter.numel() for key, parameter in backbone.named_parameters() if key not in tied)
    assert count == PUBLISHED[name]["parameters"]
    assert all(parameter.is_meta for parameter in backbone.parameters())


@pytest.mark.parametrize("name", BUILT)
def test_old_and_new_spelling_are_one_spec(name: str) -> None:
    config = PUBLISHED[name]["config"]
    other = older_spelling(config) if name.endswith(".v5") else newer_spelling(config)
    assert other != config
    assert resolve(other) == resolve(config)


def test_theta_inside_the_new_block_is_read() -> None:
    """A re-saved model that lost its base would run with the default of the family."""
    config = newer_spelling(PUBLISHED["codellama-7b"]["config"])
    assert resolve(config).rope.theta == 1e6
    config["rope_parameters"]["rope_theta"] = 123.0
    assert resolve(config).rope.theta == 123.0


@pytest.mark.parametrize("name", REFUSED)
def test_quantised_release_is_refused_by_the_name_of_its_method(name: str) -> None:
    with pytest.raises(errors.UnsupportedCheckpointError, match=PUBLISHED[name]["refused"]):
        resolve(PUBLISHED[name]["config"])


def test_same_release_without_its_quantisation_is_built() -> None:
    config = {**PUBLISHED["devstral-small-2-24b.v5-fp8"]["config"], "quantization_config": None}
    spec = resolve(config)
    assert (spec.head_dim, spec.hidden_size, spec.rope.factor, spec.tie_word_embeddings) == (128, 5120, 48.0, False)
    assert (spec.llama_4_scaling_beta, spec.original_max_position_embeddings, spec.rope.theta) == (0.1, 8192, 1e8)


@pytest.mark.parametrize("name", ["llama-3.1-8b-instruct", "mistral-7b-v0.1", "smollm3-3b", "ministral-3-3b-2512.v5"])
def test_unknown_rope_type_is_refused_by_name(name: str) -> None:
    config = dict(PUBLISHED[name]["config"])
    block = {"rope_type": "banana", "factor": 2.0, "rope_theta": 1e4}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "rope_parameters": block}
    else:
        config["rope_scaling"] = block
    with pytest.raises(errors.ConfigError, match=r"unknown RoPE type 'banana'.*llama3"):
        resolve(config)


@pytest.mark.parametrize(
    "model_type", ["mistral-7b", "mistral4", "Mistral", "mistra", "smollm", "smollm33", "llama4", "ministral3_text"]
)
def test_model_type_is_matched_exactly(model_type: str, tmp_path: Path) -> None:
    config = {**PUBLISHED["mistral-7b-v0.1"]["config"], "model_type": model_type}
    with (
        open_checkpoint(folder_of(config, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=rf"'{model_type}'.*llama"),
    ):
        family_for(checkpoint)


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    config = {
        **PUBLISHED["mistral-7b-v0.1"]["config"],
        "auto_map": {"AutoModelForCausalLM": "modeling_mistral.MistralForCausalLM"},
    }
    folder = folder_of(config, tmp_path)
    (folder / "modeling_mistral.py").write_text("raise SystemExit('this ran')\n")
    with open_checkpoint(folder) as checkpoint:
        assert family_for(checkpoint).resolve_config(checkpoint.raw) == resolve(PUBLISHED["mistral-7b-v0.1"]["config"])


def test_metadata_names_what_the_family_serves() -> None:
    (record,) = [record for record in families() if record.distribution == "fuel-llama"]
    assert record.name == FAMILY.name
    assert set(record.model_types) == set(FAMILY.model_types)
    assert set(record.gguf_architectures) == set(FAMILY.gguf_architectures)


# -- fuel inspect ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "smollm3-3b", "ministral-3-3b-2512.v5", "yi-1.5-34b"])
def test_inspect_reads_a_folder_that_holds_only_a_config(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = PUBLISHED[name]
    assert main(["inspect", str(folder_of(entry["config"], tmp_path / name)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["has_weights"], report["family"]) == (False, "llama")
    assert report["parameters"]["count"] == entry["parameters"]
    assert {layer["window"] for layer in report["layers"]} == {entry["expected"]["window"]}
    assert report["config"]["head_dim"]["value"] == entry["expected"]["head_dim"]


def test_inspect_says_that_there_are_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder_of(PUBLISHED["mistral-7b-v0.1"]["config"], tmp_path / "v01"))]) == 0
    shown = capsys.readouterr()
    assert "no weights" in shown.err
    assert "4096" in shown.out


def test_inspect_refuses_a_quantised_release_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(PUBLISHED["devstral-small-2-24b.v5-fp8"]["config"], tmp_path / "fp8")
    assert main(["inspect", str(folder)]) == 2
    shown = capsys.readouterr()
    assert "'fp8'" in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
