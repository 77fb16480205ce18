"""outline_weights: the parameters that loading would make, from headers alone, compared with what loading makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_writers import TINY, ToyDecoder, resolve, tensors_for, write_folder, write_gguf
from gguf import GGMLQuantizationType as Q
from torch import Tensor, nn
from toy_backbone import ToyBackbone, ToyConfig
from toy_moe import MoeToy

from fuel_core import layers
from fuel_core.checkpoint import open_checkpoint
from fuel_core.checkpoint.weights import LoadReport, load_weights, outline_weights
from fuel_core.layers.packed_formats import TensorRows
from fuel_core.layers.weight_formats import FORMATS

DOWN = "model.layers.1.mlp.down_proj.weight"


def _decoder(tied: bool = False, width: int = 160) -> ToyDecoder:
    """The decoder of the checkpoint tests, of layers that take every format."""
    with torch.device("meta"):
        module = ToyDecoder(resolve({**TINY, "tie_word_embeddings": tied, "intermediate_size": width}), bias=True)
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    made = layers.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                    setattr(parent, name, made)
                elif isinstance(child, nn.Embedding):
                    setattr(parent, name, layers.Embedding(child.num_embeddings, child.embedding_dim))
    return module


def _meta(backbone: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return backbone()


def _look(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    }


def _compared(path: Path, build: Callable[[], nn.Module], weights: str) -> tuple[nn.Module, LoadReport]:
    """Outline and load one checkpoint, and hold one against the other; returns what was loaded."""
    outlined, loaded = build(), build()
    with open_checkpoint(path) as checkpoint:
        report = load_weights(loaded, checkpoint, None, weights)
        found = outline_weights(outlined, checkpoint, None, weights)
    assert all(tensor.is_meta for tensor in outlined.parameters())
    assert _look(outlined) == _look(loaded)
    assert found == replace(report, seconds=0.0, errors={})
    real = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in loaded.parameters()}
    # A tensor of a mapped file is a view of all of it.
    if not report.mapped_bytes:
        assert found.parameter_bytes == sum(real.values())
    return loaded, report


@pytest.mark.parametrize("weights", ["auto", "f32", "bf16", "f16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["of_float32", "of_bfloat16"])
@pytest.mark.parametrize("model", [ToyBackbone, MoeToy])
def test_a_folder_is_outlined_as_it_is_loaded(
    model: type[ToyBackbone], dtype: torch.dtype, weights: str, tmp_path: Path
) -> None:
    tensors = tensors_for(model(ToyConfig()), dtype)
    config = {**TINY, "dtype": str(dtype).removeprefix("torch.")}
    write_folder(tmp_path, config, {**tensors, "norm.weight": tensors["norm.weight"].float()})
    loaded, _ = _compared(tmp_path, lambda: _meta(lambda: model(ToyConfig())), weights)
    outlined = _meta(lambda: model(ToyConfig()))
    with open_checkpoint(tmp_path) as checkpoint:
        outline_weights(outlined, checkpoint, None, weights)
    assert isinstance(outlined, ToyBackbone)
    assert isinstance(loaded, ToyBackbone)
    assert outlined.structure_key() == loaded.structure_key()


@pytest.mark.parametrize("weights", ["auto", "f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True], ids=["own_head", "tied_head"])
@pytest.mark.parametrize("stored", [Q.Q4_1, Q.Q8_0, Q.BF16, Q.F32], ids=lambda q: q.name)
def test_a_gguf_file_is_outlined_as_it_is_loaded(stored: Q, tied: bool, weights: str, tmp_path: Path) -> None:
    tensors = tensors_for(_decoder())
    if tied:
        del tensors["lm_head.weight"]
    kinds: Mapping[str, Q] = {"model.embed_tokens.weight": Q.Q8_0, "model.layers.0.mlp.down_proj.weight": Q.F16}
    path = write_gguf(tmp_path / "m.gguf", tensors, stored=stored, kinds=kinds)
    loaded, report = _compared(path, lambda: _decoder(tied), weights)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied  # type: ignore[union-attr]
    assert report.tied == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())


def test_what_auto_measured_is_taken_from_who_knows_it(tmp_path: Path) -> None:
    tensors = tensors_for(_decoder(width=512))
    # One number far above the others of its row: int8 loses the others, and auto keeps bfloat16 instead.
    tensors[DOWN][:, 0] = 40.0
    path = write_gguf(tmp_path / "m.gguf", tensors, stored=Q.Q8_0, config={**TINY, "intermediate_size": 512})
    loaded, outlined, blind = (_decoder(width=512) for _ in range(3))
    with open_checkpoint(path) as checkpoint:
        report = load_weights(loaded, checkpoint)
        found = outline_weights(outlined, checkpoint, known=report.formats)
        outline_weights(blind, checkpoint)
    assert _look(outlined) == _look(loaded)
    assert found == replace(report, seconds=0.0, errors={})
    assert report.formats[DOWN] == "bf16"
    assert _look(blind) != _look(loaded)


@pytest.mark.parametrize("weights", ["auto", "f32", "bf16", "int8", "int4"])
def test_a_config_alone_is_outlined_as_a_folder_of_its_dtype_would_be(weights: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {**TINY, "dtype": "bfloat16"}, tensors_for(_decoder(), torch.bfloat16))
    with open_checkpoint(tmp_path) as checkpoint:
        declared, stored = _decoder(), _decoder()
        found = outline_weights(declared, None, None, weights, dtype="bfloat16")
        expected = outline_weights(stored, checkpoint, None, weights)
    assert _look(declared) == _look(stored)
    assert found == replace(expected, mapped_bytes=0)


@pytest.mark.parametrize("word", FORMATS)
@pytest.mark.parametrize("shape", [(40, 96), (67, 64), (128, 160)], ids=str)
def test_what_a_format_says_it_needs_is_what_packing_makes(word: str, shape: tuple[int, int]) -> None:
    packed: Mapping[str, Tensor] = FORMATS[word].pack(TensorRows(torch.randn(*shape)))
    empty = FORMATS[word].empty(*shape, device="meta")
    assert {n: (t.shape, t.dtype) for n, t in packed.items()} == {n: (t.shape, t.dtype) for n, t in empty.items()}
    assert all(t.is_meta for t in empty.values())
