"""Published configs of every release this family serves: each builds its whole spec, or is refused by name.

`published_configs.json` holds their keys (without those that say nothing about the decoder), their parameter count, and
what the releases are known to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fuel_core import errors, open_checkpoint
from fuel_core.cli import main
from fuel_core.discovery import families, family_for
from tiny_qwen import build_unloaded, resolve

from fuel_qwen.family import FAMILY

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text("utf-8")
)
BUILT = [name for name, entry in PUBLISHED.items() if "expected" in entry]
REFUSED = [name for name, entry in PUBLISHED.items() if "refused" in entry]
WINDOWED, DENSE = "sliding_attention", "full_attention"


def folder_of(config: Mapping[str, Any], folder: Path) -> Path:
    """A folder that holds this config.json and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def newer_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as transformers 5 saves it: RoPE in one block, ``dtype``, the other word for the number of experts."""
    new = dict(config)
    scaling = dict(new.pop("rope_scaling", None) or {"rope_type": "default"})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    new["dtype"] = new.pop("torch_dtype")
    if "num_experts" in new:
        new["num_local_experts"] = new.pop("num_experts")
    return new


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
    assert family.name == "qwen"
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        assert getattr(spec, key) == config[key]
    assert (spec.rms_norm_eps, spec.dtype) == (config["rms_norm_eps"], config["torch_dtype"])
    backbone = build_unloaded(spec)
    assert backbone.decode_family() == expected["family"]
    assert (spec.head_dim, spec.num_key_value_heads) == (expected["head_dim"], expected["num_key_value_heads"])
    assert (spec.rope.kind, spec.rope.theta) == (expected["rope"], expected["theta"])
    assert list(backbone.mask_plan.windows) == expected["windows"]
    assert sum(getattr(spec, "sparse_layers", ())) == expected["sparse_layers"]
    tied = {name for name, _ in backbone.tied_weights()}
    count = sum(parameter.numel() for key, parameter in backbone.named_parameters() if key not in tied)
    assert count == PUBLISHED[name]["parameters"]
    assert all(parameter.is_meta for parameter in backbone.parameters())


@pytest.mark.parametrize("name", BUILT)
def test_old_and_new_spelling_are_one_spec(name: str) -> None:
    config = PUBLISHED[name]["config"]
    assert resolve(newer_spelling(config)) == resolve(config)


def test_head_dim_of_the_config_wins_over_hidden_over_heads() -> None:
    """1024 / 16 is 64 and 2560 / 32 is 80; both releases have heads of 128, and so has a config that does not say."""
    for name in ("qwen3-0.6b", "qwen3-4b"):
        config = PUBLISHED[name]["config"]
        assert (resolve(config).head_dim, resolve(config, head_dim=...).head_dim) == (128, 128)
    assert resolve(PUBLISHED["qwen2-0.5b-instruct"]["config"]).head_dim == 64


def test_a_yarn_edit_by_hand_keeps_the_base() -> None:
    plain = resolve(PUBLISHED["qwen2.5-7b-instruct"]["config"])
    edited = resolve(PUBLISHED["qwen2.5-7b-instruct.yarn-user-edit"]["config"])
    assert (edited.rope.kind, edited.rope.factor, edited.rope.theta) == ("yarn", 4.0, plain.rope.theta)


# -- windows: two gates, and a list that wins ----


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"use_sliding_window": False}, []),
        ({"use_sliding_window": ...}, []),
        ({"use_sliding_window": True, "sliding_window": None}, []),
        ({"use_sliding_window": True}, [2, 3]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [0, 1, 2, 3]),
        ({"use_sliding_window": True, "max_window_layers": 70}, []),
        ({"use_sliding_window": True, "max_window_layers": ...}, []),
        ({"use_sliding_window": True, "layer_types": [WINDOWED, DENSE, DENSE, WINDOWED]}, [0, 3]),
        ({"use_sliding_window": False, "layer_types": [DENSE] * 4}, []),
    ],
)
@pytest.mark.parametrize("name", ["qwen2-7b-instruct", "qwen3-4b"])
def test_layers_slide_from_max_window_layers_on_and_only_with_the_switch(
    name: str, changes: dict[str, Any], windowed: list[int]
) -> None:
    config = {**PUBLISHED[name]["config"], "num_hidden_layers": 4, "sliding_window": 4, "max_window_layers": 2}
    spec = resolve(config, **changes)
    assert [layer for layer, kind in enumerate(spec.layer_types) if kind == WINDOWED] == windowed
    assert spec.sliding_window == (4 if windowed else None)
    plan = build_unloaded(spec).mask_plan
    assert [layer for layer in range(4) if plan.window_for_layer(layer) is not None] == windowed


@pytest.mark.parametrize("name", ["qwen2-7b-instruct", "qwen3-4b", "qwen3-30b-a3b"])
def test_a_switch_without_a_width_means_the_width_of_the_reference(name: str) -> None:
    config = {**PUBLISHED[name]["config"], "use_sliding_window": True, "max_window_layers": 0}
    assert resolve(config, sliding_window=...).sliding_window == 4096
    assert resolve(config, sliding_window=None).sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": False, "layer_types": [WINDOWED] * 4}, "use_sliding_window false"),
        ({"sliding_window": None, "layer_types": [WINDOWED] * 4}, "no sliding_window"),
        ({"layer_types": [DENSE] * 3}, "expected 4 items"),
        ({"layer_types": [DENSE] * 3 + ["banana"]}, r"layer_types\[3\].*'banana'"),
        ({"use_sliding_window": "yes"}, "true or false"),
        ({"hidden_act": "gelu"}, "silu"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    config = {**PUBLISHED["qwen3-4b"]["config"], "num_hidden_layers": 4}
    with pytest.raises(errors.ConfigError, match=message):
        resolve({**config, "use_sliding_window": True, "sliding_window": 4}, **changes)


# -- experts ----


def test_sparse_layers_are_every_step_th_and_none_of_those_listed() -> None:
    config = {**PUBLISHED["qwen3-30b-a3b"]["config"], "num_hidden_layers": 6}
    assert resolve(config).sparse_layers == (True,) * 6
    spec = resolve(config, decoder_sparse_step=2, mlp_only_layers=[3])
    assert spec.sparse_layers == (False, True, False, False, False, True)
    assert resolve(config, num_experts=0).sparse_layers == (False,) * 6
    assert resolve(config, mlp_only_layers=None).sparse_layers == (True,) * 6


def test_weights_are_renormalised_only_where_a_config_says_so() -> None:
    config = PUBLISHED["qwen3-30b-a3b"]["config"]
    assert resolve(config).norm_topk_prob is True
    assert resolve(config, norm_topk_prob=...).norm_topk_prob is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, "at most 128.*found 129"),
        ({"num_experts": ...}, "'num_experts'"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size"),
    ],
)
def test_impossible_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        resolve(PUBLISHED["qwen3-30b-a3b"]["config"], **changes)


# -- refused by name ----


@pytest.mark.parametrize("name", REFUSED)
def test_quantised_release_is_refused_by_the_name_of_its_method(name: str) -> None:
    with pytest.raises(errors.UnsupportedCheckpointError, match=PUBLISHED[name]["refused"]):
        resolve(PUBLISHED[name]["config"])


@pytest.mark.parametrize("name", ["qwen2.5-7b-instruct", "qwen3-4b", "qwen3-30b-a3b"])
def test_unknown_rope_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"unknown RoPE type 'banana'"):
        resolve(PUBLISHED[name]["config"], rope_scaling={"rope_type": "banana", "factor": 2.0})


@pytest.mark.parametrize("model_type", ["qwen", "qwen2_moe", "qwen3_next", "Qwen2", "qwen2_vl", "qwen3moe"])
def test_model_type_is_matched_exactly(model_type: str, tmp_path: Path) -> None:
    config = {**PUBLISHED["qwen2-0.5b-instruct"]["config"], "model_type": model_type}
    with (
        open_checkpoint(folder_of(config, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=rf"'{model_type}'.*qwen"),
    ):
        family_for(checkpoint)


def test_another_family_s_checkpoint_is_answered_by_naming_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with this package alone beside the core: the model_type, and how families are installed."""
    monkeypatch.setenv("FUEL_FAMILIES", "qwen")
    config = {**PUBLISHED["qwen2-0.5b-instruct"]["config"], "model_type": "zebra"}
    with (
        open_checkpoint(folder_of(config, tmp_path)) as checkpoint,
        pytest.raises(errors.FamilyNotFoundError, match=r"'zebra'.*Families are separate packages"),
    ):
        family_for(checkpoint)


def test_metadata_names_what_the_family_serves() -> None:
    (record,) = [record for record in families() if record.distribution == "fuel-qwen"]
    assert record.name == FAMILY.name
    assert set(record.model_types) == set(FAMILY.model_types)
    assert set(record.gguf_architectures) == set(FAMILY.gguf_architectures)


@pytest.mark.parametrize("name", ["qwen2.5-3b-base", "qwen3-30b-a3b"])
def test_inspect_reads_a_folder_that_holds_only_a_config(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = PUBLISHED[name]
    assert main(["inspect", str(folder_of(entry["config"], tmp_path / name)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["has_weights"], report["family"]) == (False, "qwen")
    assert report["parameters"]["count"] == entry["parameters"]


def test_inspect_refuses_a_quantised_release_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(PUBLISHED["qwen2.5-72b-instruct-awq"]["config"], tmp_path / "awq")
    assert main(["inspect", str(folder)]) == 2
    shown = capsys.readouterr()
    assert "'awq'" in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
