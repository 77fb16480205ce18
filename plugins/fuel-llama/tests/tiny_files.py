"""Writes the tiny checkpoints of this suite in other shapes: edited folders, and GGUF files as a converter does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

_IN_FILE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def with_config(folder: Path, target: Path, config: Mapping[str, Any]) -> Path:
    """The same checkpoint with another config.json."""
    shutil.copytree(folder, target)
    (target / "config.json").write_text(json.dumps(config))
    return target


def with_tensors(folder: Path, target: Path, change: Any) -> Path:
    """The same checkpoint with ``change(name, tensor)`` for every tensor; None leaves it out."""
    shutil.copytree(folder, target)
    file = target / "model.safetensors"
    changed = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}, file)
    return target


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in the order the converter stores them: (half, pair) becomes (pair, half)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    permute: bool = True,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    vectors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """A GGUF file of ``model`` through the gguf package's writer.

    Matrices are stored as ``stored``, vectors as float32; a tied head is left out. ``metadata``: more keys, or None to
    leave one out. ``vectors``: tensors that are no weights, under their name in the file.
    """
    c = model.config
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    keys: dict[str, Any] = {
        "llama.context_length": c.max_position_embeddings,
        "llama.embedding_length": c.hidden_size,
        "llama.block_count": c.num_hidden_layers,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_attention_heads,
        "llama.attention.head_count_kv": c.num_key_value_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.attention.value_length": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "llama.rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": c.head_dim,
        "llama.vocab_size": c.vocab_size,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        kind = stem.rpartition(".")[2]
        if permute and kind in heads:
            tensor = permuted(tensor, heads[kind])
        array = tensor.float().contiguous().numpy()
        as_type = stored if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{prefix}{_IN_FILE[stem]}.{ending}", gguf.quants.quantize(array, as_type), raw_dtype=as_type)
    for name, vector in (vectors or {}).items():
        writer.add_tensor(name, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def old_spelling(folder: Path, type_key: str = "rope_type") -> dict[str, Any]:
    """The folder's config.json as releases before transformers 5 wrote it: a base beside a ``rope_scaling`` block."""
    config = read_config(folder)
    rope = dict(config.pop("rope_parameters"))
    kind = rope.pop("rope_type")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    return config
