"""Published configs of every release this family serves: each builds its whole spec, or is refused by name.

`published_configs.json` holds their keys (without those that say nothing about the decoder), the parameter count their
publishers state, and what the releases are known to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fuel_core import DecodeBackbone, errors
from fuel_core.checkpoint import RawConfig, open_checkpoint
from fuel_core.cli import main
from fuel_core.discovery import families, family_for
from tiny_phi import build_unloaded, resolve

from fuel_phi.family import FAMILY

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text("utf-8")
)
BUILT = [name for name, entry in PUBLISHED.items() if "expected" in entry]
REFUSED = [name for name, entry in PUBLISHED.items() if "refused" in entry]
LONGROPE = [name for name in BUILT if PUBLISHED[name]["expected"]["rope"] == "longrope"]


def folder_of(config: Mapping[str, Any], folder: Path) -> Path:
    """A folder that holds this config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def newer_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as transformers 5 saves it: RoPE in one block, ``dtype``."""
    new = dict(config)
    scaling = dict(new.pop("rope_scaling", None) or {"rope_type": "default"})
    kind = scaling.pop("type", None) or scaling["rope_type"]
    share = {"partial_rotary_factor": new.pop("partial_rotary_factor")} if "partial_rotary_factor" in new else {}
    new["rope_parameters"] = {**scaling, **share, "rope_type": kind, "rope_theta": new.pop("rope_theta", 10000.0)}
    new["dtype"] = new.pop("torch_dtype")
    return new


def test_every_published_config_is_built_or_refused() -> None:
    assert set(BUILT) | set(REFUSED) == set(PUBLISHED)
    assert not set(BUILT) & set(REFUSED)


@pytest.mark.parametrize("name", BUILT)
def test_published_config_builds_its_whole_spec(name: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]["config"], PUBLISHED[name]["expected"]
    with open_checkpoint(folder_of(config, tmp_path / name)) as checkpoint:
        family = family_for(checkpoint)
        spec = family.resolve_config(checkpoint.raw)
    assert family.name == "phi"
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        assert getattr(spec, key) == config[key]
    assert spec.dtype == config.get("torch_dtype", config.get("dtype"))
    backbone = build_unloaded(spec)
    assert backbone.decode_family() == expected["family"]
    assert (spec.head_dim, spec.num_key_value_heads) == (expected["head_dim"], expected["num_key_value_heads"])
    assert (spec.rope.kind, spec.rope.theta) == (expected["rope"], expected["theta"])
    assert backbone.mask_plan.windows == (expected["window"],)
    (variant,) = backbone.rope_plan.variants
    assert (variant.width, backbone.decode_dims().rope_width) == (expected["rotated"], expected["rotated"])
    assert variant.scale == pytest.approx(expected["scale"], abs=1e-6)
    assert (None if variant.longer is None else variant.longer.original) == expected["original"]
    tied = {name for name, _ in backbone.tied_weights()}
    assert bool(tied) == config["tie_word_embeddings"]
    count = sum(parameter.numel() for key, parameter in backbone.named_parameters() if key not in tied)
    assert count == PUBLISHED[name]["parameters"]
    assert all(parameter.is_meta for parameter in backbone.parameters())


@pytest.mark.parametrize("name", [name for name in BUILT if not name.endswith(".v5")])
def test_old_and_new_spelling_are_one_spec(name: str) -> None:
    config = PUBLISHED[name]["config"]
    newer = newer_spelling(config)
    assert newer != config
    assert resolve(newer) == resolve(config)


def test_release_saved_again_by_a_newer_library_is_the_same_spec() -> None:
    assert resolve(PUBLISHED["phi-4-mini-instruct.v5"]["config"]) == resolve(PUBLISHED["phi-4-mini-instruct"]["config"])


@pytest.mark.parametrize(("old", "new"), [("phi-2.old-revision", "phi-2"), ("phi-1_5.old-revision", "phi-1_5")])
def test_keys_of_the_first_revisions_are_one_spec_with_todays(old: str, new: str) -> None:
    """Their words are read; their model_type is refused all the same, since their tensors are laid out otherwise."""
    assert resolve(PUBLISHED[old]["config"], model_type="phi") == resolve(PUBLISHED[new]["config"])
    with pytest.raises(errors.ConfigError, match="hidden_size"):
        resolve(PUBLISHED[old]["config"], model_type="phi", n_embd=...)


@pytest.mark.parametrize("name", LONGROPE)
def test_both_lists_count_the_rotated_pairs_and_differ(name: str) -> None:
    spec = resolve(PUBLISHED[name]["config"])
    (variant,) = build_unloaded(spec).rope_plan.variants
    short, long = (variant.frequencies(variant.regime(length)) for length in (4096, 4097))
    assert len(short) == len(long) == len(spec.rope.short_factor) == spec.rope.rotary_width(spec.head_dim) // 2 == 48
    plain = [spec.rope.theta ** (-2 * i / variant.width) for i in range(48)]
    for frequencies, factors in ((short, spec.rope.short_factor), (long, spec.rope.long_factor)):
        assert frequencies == pytest.approx([f / factor for f, factor in zip(plain, factors, strict=True)], rel=1e-12)
    assert short != long


def test_list_of_another_length_is_refused() -> None:
    config = PUBLISHED["phi-4-mini-instruct"]["config"]
    wrong = {**config["rope_scaling"], "short_factor": [1.0] * 64}
    with pytest.raises(errors.ConfigError, match=r"48 numbers in 'short_factor'.*96 rotated.*found 64"):
        resolve(config, rope_scaling=wrong)


def test_explicit_magnitude_replaces_the_formula() -> None:
    config = PUBLISHED["phi-3.5-mini-instruct"]["config"]
    given = resolve(config, rope_scaling={**config["rope_scaling"], "attention_factor": 1.5})
    assert build_unloaded(given).rope_plan.variants[0].scale == 1.5
    # The ratio of the two lengths, unless the file has a factor of its own.
    given = resolve(config, rope_scaling={**config["rope_scaling"], "factor": 4.0})
    assert build_unloaded(given).rope_plan.variants[0].scale == pytest.approx(1.080123, abs=1e-6)


def test_word_of_the_first_long_release_means_two_lists_here() -> None:
    config = PUBLISHED["phi-3.5-mini-instruct"]["config"]
    assert resolve(config, rope_scaling={**config["rope_scaling"], "type": "yarn"}) == resolve(config)
    with pytest.raises(errors.ConfigError, match=r"'yarn'.*expected one of default, longrope"):
        resolve(config, rope_scaling={"type": "yarn", "factor": 4.0})


@pytest.mark.parametrize("name", ["phi-2", "phi-3-mini-4k-instruct"])
def test_unknown_rope_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"unknown RoPE type 'banana'"):
        resolve(PUBLISHED[name]["config"], rope_scaling={"type": "banana", "factor": 2.0})


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_looks_like_this_family_is_refused_by_name(name: str, tmp_path: Path) -> None:
    entry = PUBLISHED[name]
    assert entry["config"]["model_type"] == entry["refused"]
    folder = folder_of(entry["config"], tmp_path)
    for code in ("configuration_phi.py", "modeling_phi.py", "configuration_phi3_small.py", "modeling_phi3_small.py"):
        (folder / code).write_text("raise SystemExit('this ran')\n")
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=rf"'{entry['refused']}'.*phi"),
    ):
        family_for(checkpoint)
    # Asked directly, the family says why.
    with pytest.raises(
        errors.UnsupportedCheckpointError, match=rf"expected model_type phi or phi3.*'{entry['refused']}'"
    ):
        FAMILY.resolve_config(RawConfig.from_config(entry["config"]))


@pytest.mark.parametrize("model_type", ["phi3small", "phi-msft", "phi3_v", "phimoe", "Phi3", "phi4", "ph", "phi4mm"])
def test_model_type_is_matched_exactly(model_type: str, tmp_path: Path) -> None:
    config = {**PUBLISHED["phi-4"]["config"], "model_type": model_type}
    with (
        open_checkpoint(folder_of(config, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=rf"'{model_type}'.*phi"),
    ):
        family_for(checkpoint)


def test_another_familys_checkpoint_is_answered_by_its_name_and_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUEL_FAMILIES", "phi")
    folder = folder_of({**PUBLISHED["phi-4"]["config"], "model_type": "zebra"}, tmp_path)
    assert main(["inspect", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "'zebra'" in message
    assert "install" in message
    assert "Traceback" not in message


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    config = PUBLISHED["phi-4-mini-instruct"]["config"]
    assert "auto_map" in config
    folder = folder_of(config, tmp_path)
    (folder / "modeling_phi3.py").write_text("raise SystemExit('this ran')\n")
    (folder / "configuration_phi3.py").write_text("raise SystemExit('this ran')\n")
    with open_checkpoint(folder) as checkpoint:
        assert family_for(checkpoint).resolve_config(checkpoint.raw) == resolve(config)


def test_metadata_names_what_the_family_serves() -> None:
    (record,) = [record for record in families() if record.distribution == "fuel-phi"]
    assert record.name == FAMILY.name
    assert set(record.model_types) == set(FAMILY.model_types)
    assert set(record.gguf_architectures) == set(FAMILY.gguf_architectures)


@pytest.mark.parametrize("name", ["phi-2", "phi-4-mini-instruct"])
def test_inspect_reads_a_folder_that_holds_only_a_config(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = PUBLISHED[name]
    assert main(["inspect", str(folder_of(entry["config"], tmp_path / name)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["has_weights"], report["family"]) == (False, "phi")
    assert report["parameters"]["count"] == entry["parameters"]
    assert report["rope_variants"][0].get("other_frequencies_beyond") == entry["expected"]["original"]


def test_a_share_of_a_config_that_states_none_is_that_of_the_reference_class() -> None:
    spec = resolve(PUBLISHED["phi-1"]["config"], partial_rotary_factor=...)
    assert spec == resolve(PUBLISHED["phi-1"]["config"])
    backbone: DecodeBackbone = build_unloaded(resolve(PUBLISHED["phi-2"]["config"], partial_rotary_factor=...))
    assert backbone.decode_dims().rope_width == 40
