"""GGUF files as the converter writes them: gains stored whole, and what the format does not say supplied here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from fuel_core import RawConfig, open_checkpoint
from fuel_core.testing.hostile import complaints
from tiny_gemma import (
    CHECKPOINTS,
    DENSE,
    GEMMA2,
    GEMMA3,
    PATHS,
    TWO_BASES,
    WINDOWED,
    build_unloaded,
    error_of_run,
    load,
    reference_of,
    save_and_load,
    write_gguf,
)

from fuel_gemma.family import FAMILY
from fuel_gemma.gemma import GemmaRMSNorm

TOLERANCE = 1e-5
# What the files cannot say is as the family supplies it: a scalar of head_dim, and a local base of 10000.
AS_WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("gemma", {}),
    "two": ("gemma2", {"query_pre_attn_scalar": 20}),
    "three": (
        "gemma3",
        {
            "query_pre_attn_scalar": 20,
            "rope_parameters": {**TWO_BASES, WINDOWED: {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_file_and_folder_are_one_model(name: str, tmp_path: Path) -> None:
    """Norm weights differ by exactly the 1 that the file holds already; everything else is equal bit for bit."""
    architecture, changes = AS_WRITTEN[name]
    reference = reference_of(name, **changes)
    folder = save_and_load(reference, tmp_path / "folder")
    backbone = load(write_gguf(tmp_path / "m.gguf", reference, architecture))
    found = dict(folder.named_parameters())
    for parameter, values in backbone.named_parameters():
        stored = found.pop(parameter)
        assert torch.equal(values, stored + 1.0 if parameter.endswith("norm.weight") else stored), parameter
    assert not found
    for plan, offset_path in PATHS:
        assert error_of_run(backbone, reference, [9], plan, offset_path)[0] < TOLERANCE


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_norm_weight_of_zero_in_a_folder_is_one_in_a_file(name: str, tmp_path: Path) -> None:
    architecture, changes = AS_WRITTEN[name]
    reference = reference_of(name, **changes)
    with torch.no_grad():
        for parameter, values in reference.named_parameters():
            if parameter.endswith("norm.weight"):
                values.zero_()
    folder = save_and_load(reference, tmp_path / "folder")
    backbone = load(write_gguf(tmp_path / "m.gguf", reference, architecture))
    norms = [n for n, _ in backbone.named_parameters() if n.endswith("norm.weight")]
    for model, value in ((folder, 0.0), (backbone, 1.0)):
        assert all(torch.equal(p, torch.full_like(p, value)) for n, p in model.named_parameters() if n in norms)
        assert error_of_run(model, reference)[0] < TOLERANCE
    assert (folder.config.gain_offset, backbone.config.gain_offset) == (1.0, 0.0)


def test_edit_of_a_gain_in_place_is_followed(tmp_path: Path) -> None:
    reference = reference_of("one")
    backbone = load(write_gguf(tmp_path / "m.gguf", reference, "gemma"))
    with torch.no_grad():
        for model in (backbone, reference):
            model.get_parameter("model.norm.weight").mul_(0.0).add_(0.7 if model is reference else 1.7)
    assert error_of_run(backbone, reference)[0] < TOLERANCE


def spec_of(tmp_path: Path, architecture: str, name: str, more: dict[str, Any], **changes: Any) -> Any:
    path = write_gguf(tmp_path / "m.gguf", reference_of(name, **changes), architecture, more)
    with open_checkpoint(path) as checkpoint:
        return FAMILY.resolve_config(checkpoint.raw)


def test_gemma2_file_without_window_and_caps_has_those_of_the_releases(tmp_path: Path) -> None:
    gone = {"attention.sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = spec_of(tmp_path, "gemma2", "two", gone)
    assert (spec.sliding_window, spec.attn_logit_softcapping, spec.final_logit_softcapping) == (4096, 50.0, 30.0)
    assert spec.layer_types == (WINDOWED, DENSE, WINDOWED)
    kept = spec_of(tmp_path, "gemma2", "two", {})
    assert (kept.sliding_window, kept.attn_logit_softcapping) == (GEMMA2["sliding_window"], 2.0)


def test_gemma3_file_has_the_schedule_and_the_bases_of_the_releases(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma3", "three", {})
    assert [i for i, kind in enumerate(spec.layer_types) if kind == DENSE] == [5]
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 5000.0)
    assert (spec.rope_local.kind, spec.rope_local.theta) == ("default", 10000.0)
    assert spec.attn_logit_softcapping is spec.final_logit_softcapping is None
    assert spec_of(tmp_path, "gemma3", "three", {"rope.freq_base": None}).rope.theta == 1e6
    assert spec_of(tmp_path, "gemma3", "three", {"rope.freq_base_swa": 77.0}).rope_local.theta == 77.0
    assert spec_of(tmp_path, "gemma3", "three", {"final_logit_softcapping": 30.0}).final_logit_softcapping == 30.0


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        ({"attention.sliding_window_pattern": 3}, [2, 5]),
        ({"attention.sliding_window_pattern": [True, False, True, True, True, False, False]}, [1, 5, 6]),
        ({"attention.sliding_window_pattern": [True] * 7}, []),
        ({"attention.sliding_window": None}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_gemma3_file_may_state_its_schedule(tmp_path: Path, pattern: dict[str, Any], dense: list[int]) -> None:
    spec = spec_of(tmp_path, "gemma3", "three", pattern)
    assert [i for i, kind in enumerate(spec.layer_types) if kind == DENSE] == dense
    plan = build_unloaded(spec).mask_plan
    assert [i for i in range(7) if plan.window_for_layer(i) is None] == dense


@pytest.mark.parametrize(
    ("architecture", "keys", "scalar"),
    [
        ("gemma2", (26, 2304, 8, 256), 256.0),
        ("gemma2", (42, 3584, 16, 256), 256.0),
        ("gemma2", (46, 4608, 32, 128), 144.0),
        ("gemma3", (18, 640, 4, 256), 256.0),
        ("gemma3", (34, 2560, 8, 256), 256.0),
        ("gemma3", (48, 3840, 16, 256), 256.0),
        ("gemma3", (62, 5376, 32, 128), 168.0),
    ],
)
def test_scale_of_queries_follows_from_the_release(
    architecture: str, keys: tuple[int, int, int, int], scalar: float
) -> None:
    layers, hidden, heads, width = keys
    values = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": width,
        "intermediate_size": 64,
        "vocab_size": 256,
        "sliding_window": 512,
    }
    raw = RawConfig(values, {}, format="gguf", gguf_architecture=architecture)
    assert FAMILY.resolve_config(raw).query_pre_attn_scalar == scalar
    stated = raw.with_values({"gguf:attention.scale": 0.25}, "gguf: attention.scale")
    assert FAMILY.resolve_config(stated).query_pre_attn_scalar == 16.0


def test_a_head_without_a_width_is_the_share_of_hidden_size(tmp_path: Path) -> None:
    gone = {"attention.key_length": None, "attention.value_length": None}
    assert spec_of(tmp_path, "gemma", "one", gone).head_dim == 96 // 4


def test_quantised_file_scales_by_the_unrounded_root_and_keeps_its_widths(tmp_path: Path) -> None:
    reference = reference_of("one", head_dim=32, intermediate_size=160)
    kind = gguf.GGMLQuantizationType.Q8_0
    backbone = load(write_gguf(tmp_path / "m.gguf", reference, "gemma", stored=kind))
    assert backbone.config.embed_scale == float(torch.tensor(96**0.5))
    assert backbone.model.layers[0].mlp.up_proj.packed_format == "int8"
    assert backbone.model.norm.weight.dtype == torch.float32
    assert error_of_run(backbone, reference)[0] < 0.2  # rounding to eight bits: 0.105
    for module in backbone.modules():
        if isinstance(module, GemmaRMSNorm):
            module.offset = 1.0
    assert error_of_run(backbone, reference)[0] > 0.4


def test_every_generation_is_written_and_read() -> None:
    assert {architecture for architecture, _ in AS_WRITTEN.values()} == set(FAMILY.gguf_architectures)
    assert {kind for kind, _ in CHECKPOINTS.values()} == set(FAMILY.model_types) - {"gemma3"}
    assert GEMMA3["num_hidden_layers"] > 6


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_metadata_that_cannot_be_gives_our_errors_alone(tmp_path: Path, name: str) -> None:
    """Another type, not finite, huge, zero: at every key that is read of a file."""
    architecture, changes = AS_WRITTEN[name]
    reference = reference_of(name, **changes)
    with open_checkpoint(
        write_gguf(tmp_path / "m.gguf", reference, architecture, {"attention.scale": 0.125})
    ) as checkpoint:
        assert list(complaints(FAMILY, checkpoint.raw, named=False)) == []
