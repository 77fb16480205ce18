"""load_weights: every parameter once, every tensor once, in the dtype that was declared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_writers import TINY, resolve, tensors_for, toy, write_folder
from torch import nn

from fuel_core.checkpoint import load_weights, open_checkpoint
from fuel_core.errors import BackendUnavailableError, ConfigError, UnsupportedCheckpointError, WeightsError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {**TINY, "tie_word_embeddings": True}


def load(folder: Path, module: nn.Module, family: object = None, weights: str = "auto") -> Any:
    return load_weights(module, open_checkpoint(folder), family, weights)


def test_every_parameter_is_set_to_its_tensor(tmp_path: Path) -> None:
    module = toy(bias=True)
    tensors = tensors_for(module)
    report = load(write_folder(tmp_path, tensors=tensors, shards=2), module)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
        assert not parameter.requires_grad
    assert report.parameters == len(tensors)
    assert report.parameter_bytes == sum(t.nbytes for t in tensors.values())
    assert (report.weights, report.dtype, report.tied, report.skipped) == ("f32", "float32", (), ())


def test_matching_dtype_uses_the_mapping_and_another_one_does_not(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module, torch.bfloat16)
    ck = open_checkpoint(write_folder(tmp_path, {**TINY, "dtype": "bfloat16"}, tensors))
    report = load_weights(module, ck)
    assert report.mapped_bytes == report.parameter_bytes
    assert module.lm_head.weight.data_ptr() == ck.tensor(HEAD).data_ptr()
    assert load_weights(toy(), ck, weights="f32").mapped_bytes == 0


# -- dtype --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {}])
@pytest.mark.parametrize("nested", [False, True])
def test_auto_is_the_declared_dtype_in_either_spelling_else_the_stored_one(
    tmp_path: Path, declared: dict[str, str], nested: bool
) -> None:
    module = toy()
    stored = torch.float32 if declared else torch.float16
    config = {**TINY, **declared}
    folder = write_folder(tmp_path, {"text_config": config} if nested else config, tensors_for(module, stored))
    report = load(folder, module)
    wanted = torch.bfloat16 if declared else torch.float16
    assert {p.dtype for p in module.parameters()} == {wanted}
    assert report.dtype == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("f32", torch.float32), ("float32", torch.float32), ("bf16", torch.bfloat16), ("float16", torch.float16)],
)
def test_weights_word_overrides_the_declared_dtype(tmp_path: Path, word: str, dtype: torch.dtype) -> None:
    module = toy()
    folder = write_folder(tmp_path, {**TINY, "dtype": "bfloat16"}, tensors_for(module, torch.bfloat16))
    load(folder, module, weights=word)
    assert {p.dtype for p in module.parameters()} == {dtype}


@pytest.mark.parametrize("word", ["int3", "fp8", ""])
def test_format_that_is_not_there_lists_what_is(tmp_path: Path, word: str) -> None:
    folder = write_folder(tmp_path, tensors=tensors_for(toy()))
    with pytest.raises(UnsupportedCheckpointError, match="expected one of auto, f32, bf16, f16, int8, int4"):
        load(folder, toy(), weights=word)


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_packed_formats_are_refused_off_the_cpu_before_a_tensor_is_read(tmp_path: Path, word: str) -> None:
    ck = open_checkpoint(write_folder(tmp_path, tensors=tensors_for(toy())))
    with pytest.raises(BackendUnavailableError, match=f"weights='{word}' on device 'cuda': expected 'cpu'"):
        load_weights(toy(), ck, weights=word, device="cuda")


def test_declared_dtype_that_is_unknown_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {**TINY, "dtype": "float8_e4m3fn"}, tensors_for(toy()))
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        load(folder, toy())


def test_mixed_file_keeps_float32_norms_but_not_biases_of_projections(tmp_path: Path) -> None:
    module = toy(bias=True)
    tensors = {
        n: t if t.dim() == 1 else t.bfloat16() for n, t in tensors_for(module).items()
    }  # vectors in float32, matrices in bfloat16
    load(write_folder(tmp_path, {**TINY, "dtype": "bfloat16"}, tensors), module)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


def test_file_in_float32_throughout_is_cast_throughout(tmp_path: Path) -> None:
    module = toy()
    load(write_folder(tmp_path, {**TINY, "dtype": "bfloat16"}, tensors_for(module)), module)
    assert module.model.norm.weight.dtype == torch.bfloat16


def test_tensors_of_a_stored_type_nobody_declared_are_refused_by_name(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedCheckpointError, match=r"quantised with 'fp8' \(tensors: .*up_proj.weight\)"):
        load(write_folder(tmp_path, tensors=tensors), module)
    tensors[name] = torch.zeros(160, 96, dtype=torch.complex64)
    with pytest.raises(UnsupportedCheckpointError, match=r"up_proj.weight' is stored as C64"):
        load(write_folder(tmp_path, tensors=tensors), module)


def test_quantised_checkpoint_is_refused_before_its_tensors_are_looked_at(tmp_path: Path) -> None:
    config = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    folder = write_folder(tmp_path, config, {**tensors_for(toy()), "x.weight_scale_inv": torch.zeros(1)})
    with pytest.raises(UnsupportedCheckpointError, match="quantised with 'fp8'"):
        load(folder, toy())


# -- one to one ---------------------------------------------------------------------------------------------------


def test_missing_tensor_is_listed_and_nothing_is_set(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(WeightsError, match=r"1 parameters without a tensor: model.layers.1.self_attn.k_proj.weight"):
        load(write_folder(tmp_path, tensors=tensors), module)
    assert all(p.is_meta for p in module.parameters())


def test_unused_tensors_are_listed_up_to_ten_and_counted(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module) | {f"extra.{i:02d}": torch.zeros(1) for i in range(13)}
    with pytest.raises(WeightsError, match=r"13 unused tensors: extra.00, .*extra.09, ... \(3 more\)") as error:
        load(write_folder(tmp_path, tensors=tensors), module)
    assert "extra.10" not in str(error.value)


def test_scale_tensor_without_a_quantisation_config_is_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_for(toy()) | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(1)}
    with pytest.raises(UnsupportedCheckpointError, match=r"'fp8' \(tensors: .*0.mlp.up_proj.weight_scale_inv\)"):
        load(write_folder(tmp_path, tensors=tensors), toy())


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    tensors["model.norm.weight"] = torch.zeros(97)
    with pytest.raises(WeightsError, match=r"1 wrong shapes: model.norm.weight \[97\] for \[96\]"):
        load(write_folder(tmp_path, tensors=tensors), toy())


def test_shape_that_would_broadcast_is_wrong_too(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    tensors["model.norm.weight"] = torch.zeros(1)
    with pytest.raises(WeightsError, match="1 wrong shapes"):
        load(write_folder(tmp_path, tensors=tensors), toy())


def test_config_without_weights_says_what_to_download(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="found only a config"):
        load(write_folder(tmp_path), toy())


def test_stored_rotary_buffers_are_skipped_by_name(tmp_path: Path) -> None:
    module = toy()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write_folder(tmp_path, tensors=tensors_for(module) | {name: torch.zeros(16)})
    assert load(folder, module).skipped == (name,)


def test_family_renames_and_skips(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module)
    stored = {f"language_model.{n}": t for n, t in tensors.items()} | {"vision.patch": torch.zeros(1)}
    folder = write_folder(tmp_path, tensors=stored)

    def names(name: str) -> str | None:
        return name.removeprefix("language_model.") if name.startswith("language_model.") else None

    report = load(folder, module, SimpleNamespace(tensor_names=names, gguf_names=None))
    assert report.skipped == ("vision.patch",)
    assert torch.equal(module.model.norm.weight, tensors["model.norm.weight"])


def test_family_mapping_keeps_the_names_it_lacks(tmp_path: Path) -> None:
    module = toy()
    tensors = tensors_for(module)
    tensors["model.final.weight"] = tensors.pop("model.norm.weight")
    family = SimpleNamespace(tensor_names={"model.final.weight": "model.norm.weight", "junk": None})
    report = load(write_folder(tmp_path, tensors=tensors | {"junk": torch.zeros(1)}), module, family)
    assert torch.equal(module.model.norm.weight, tensors["model.final.weight"])
    assert report.skipped == ("junk",)


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    tensors = tensors_for(toy()) | {"copy": torch.zeros(96)}
    family = SimpleNamespace(tensor_names={"copy": "model.norm.weight"})
    with pytest.raises(WeightsError, match=r"one tensor for parameter 'model.norm.weight'"):
        load(write_folder(tmp_path, tensors=tensors), toy(), family)


# -- ties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["outer", "nested"])
def test_tied_head_is_the_embedding_whichever_level_says_so(tmp_path: Path, level: str) -> None:
    config = {"tie_word_embeddings": True, "text_config": TINY} if level == "outer" else {"text_config": TIED}
    tensors = tensors_for(toy())
    del tensors[HEAD]
    folder = write_folder(tmp_path, config, tensors)
    module = toy(resolve(open_checkpoint(folder).raw.with_values({"model_type": "toy"}, "test")))
    report = load(folder, module)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.equal(module.lm_head.weight, tensors[EMBEDDING])
    assert report.tied == ((HEAD, EMBEDDING),)
    assert report.parameter_bytes == sum(t.nbytes for t in tensors.values())


def test_untied_checkpoint_without_a_head_is_an_error(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    del tensors[HEAD]
    with pytest.raises(WeightsError, match=r"lm_head.weight \(the config does not tie it"):
        load(write_folder(tmp_path, tensors=tensors), toy())


def test_tied_checkpoint_may_store_the_head_if_it_is_the_same(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    tensors[HEAD] = tensors[EMBEDDING].clone()
    module = toy(TIED)
    load(write_folder(tmp_path, TIED, tensors), module)
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_tied_checkpoint_with_another_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'lm_head.weight' to equal 'model.embed_tokens.weight'"):
        load(write_folder(tmp_path, TIED, tensors_for(toy())), toy(TIED))


def test_tied_checkpoint_may_store_only_the_head(tmp_path: Path) -> None:
    tensors = tensors_for(toy())
    del tensors[EMBEDDING]
    module = toy(TIED)
    load(write_folder(tmp_path, TIED, tensors), module)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.equal(module.model.embed_tokens.weight, tensors[HEAD])


def test_module_that_names_its_own_ties_is_followed(tmp_path: Path) -> None:
    module = toy()
    module.tied_weights = lambda: [("model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight")]
    tensors = tensors_for(module)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    load(write_folder(tmp_path, tensors=tensors), module)
    assert module.model.layers[1].mlp.up_proj.weight is module.model.layers[0].mlp.up_proj.weight
    module.tied_weights = lambda: [("no.such", HEAD)]
    with pytest.raises(WeightsError, match=r"found no\.such"):
        load(tmp_path, module)


def test_parameter_shared_at_build_time_stays_one(tmp_path: Path) -> None:
    module = toy()
    module.lm_head.weight = module.model.embed_tokens.weight
    tensors = tensors_for(module)
    del tensors[HEAD]
    load(write_folder(tmp_path, tensors=tensors), module)
    assert module.lm_head.weight is module.model.embed_tokens.weight


# -- buffers ------------------------------------------------------------------------------------------------------


class _WithBuffers(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(3, dtype=torch.int64), persistent=persistent)


def test_persistent_buffer_is_set_with_its_own_dtype(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = _WithBuffers(persistent=True)
    folder = write_folder(tmp_path, tensors={"weight": torch.ones(4), "table": torch.tensor([5, 6, 7])})
    load(folder, module, weights="bf16")
    assert module.table.tolist() == [5, 6, 7]
    assert module.weight.dtype == torch.bfloat16
    with torch.device("meta"):
        module = _WithBuffers(persistent=True)
    with pytest.raises(WeightsError, match="without a tensor: table"):
        load(write_folder(tmp_path, tensors={"weight": torch.ones(4)}), module)


def test_buffer_left_without_storage_is_an_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = _WithBuffers(persistent=False)
    with pytest.raises(WeightsError, match="1 still on the meta device: table"):
        load(write_folder(tmp_path, tensors={"weight": torch.ones(4)}), module)


def test_loading_again_replaces_what_was_loaded(tmp_path: Path) -> None:
    module = toy()
    for seed in (0, 1):
        tensors = tensors_for(module, seed=seed)
        load(write_folder(tmp_path / str(seed), tensors=tensors), module)
        assert torch.equal(module.lm_head.weight, tensors[HEAD])


def test_report_is_plain_data(tmp_path: Path) -> None:
    module = toy()
    report = load(write_folder(tmp_path, tensors=tensors_for(module)), module)
    assert json.loads(json.dumps(vars(report)))["parameters"] == report.parameters
