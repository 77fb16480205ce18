"""Writes tiny checkpoints for the tests: Hugging Face folders, GGUF files, and headers that lie.

Honest GGUF files come from the gguf package's own writer, so the reader is checked against another author's idea of
the format; lying ones are put together byte by byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from fuel_core.checkpoint import ConfigReader, DecoderConfig, RawConfig

TINY: dict[str, Any] = {
    "model_type": "toy",
    "vocab_size": 40,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""A config whose query width (128) is not its hidden width, with two query heads to a key head."""


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; a value of `...` removes the key."""
    return {k: v for k, v in {**base, **changes}.items() if v is not ...}


def reader(defaults: Mapping[str, Any] | None = None, **changes: Any) -> ConfigReader:
    return ConfigReader(RawConfig.from_config(changed(TINY, changes)), defaults, "toy")


def resolve(raw: RawConfig | Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> DecoderConfig:
    """What a plain family's resolve_config does."""
    r = ConfigReader(raw if isinstance(raw, RawConfig) else RawConfig.from_config(raw), defaults, "toy")
    return r.finish(DecoderConfig, **r.common(), rope=r.rope(), rms_norm_eps=r.float("rms_norm_eps"))


# -- a module with checkpoint names ------------------------------------------------------------------------------


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class _Attention(nn.Module):
    def __init__(self, c: DecoderConfig, bias: bool) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class _Block(nn.Module):
    def __init__(self, c: DecoderConfig, bias: bool) -> None:
        super().__init__()
        self.input_layernorm = _Norm(c.hidden_size)
        self.self_attn = _Attention(c, bias)
        self.post_attention_layernorm = _Norm(c.hidden_size)
        self.mlp = _Mlp(c)


class ToyDecoder(nn.Module):
    """Parameters of a small decoder under their checkpoint names; it computes nothing."""

    def __init__(self, config: DecoderConfig, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList([_Block(config, bias) for _ in range(config.num_hidden_layers)])
        self.model.norm = _Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def toy(config: DecoderConfig | Mapping[str, Any] = TINY, bias: bool = False) -> ToyDecoder:
    """A toy decoder on the meta device."""
    with torch.device("meta"):
        return ToyDecoder(config if isinstance(config, DecoderConfig) else resolve(config), bias)


def tensors_for(module: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random numbers for every parameter of `module`, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator).to(dtype)
        for name, p in module.named_parameters(remove_duplicate=False)
    }


# -- Hugging Face folders ----------------------------------------------------------------------------------------


def write_folder(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    index: bool = True,
    files: Mapping[str, object] | None = None,
) -> Path:
    """A folder with config.json, safetensors (in `shards` files, with an index if more than one) and other files.

    `files`: name -> text, bytes, or an object to write as JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY if config is None else config))
    if tensors:
        if shards == 1:
            save_file(dict(tensors), folder / "model.safetensors")
        else:
            names = sorted(tensors)
            weight_map = {}
            for i in range(shards):
                file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
                mine = names[i::shards]
                save_file({n: tensors[n] for n in mine}, folder / file)
                weight_map.update(dict.fromkeys(mine, file))
            if index:
                (folder / "model.safetensors.index.json").write_text(
                    json.dumps({"metadata": {}, "weight_map": weight_map})
                )
    for name, content in (files or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            content
            if isinstance(content, bytes)
            else (content if isinstance(content, str) else json.dumps(content)).encode()
        )
    return folder


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header; `length` is the header length it claims."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


# -- GGUF files --------------------------------------------------------------------------------------------------

_STEMS = {
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


def gguf_name(name: str) -> str:
    """Name inside a GGUF file of a tensor with the usual Hugging Face name."""
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{_STEMS[rest]}.{ending}"
    return f"{_STEMS[stem]}.{ending}"


def permute_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Row order of converted query and key projections: (half, pair) of every head becomes (pair, half)."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    architecture: str = "llama",
    config: Mapping[str, Any] = TINY,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    permute: bool | None = None,
    metadata: Mapping[str, Any] | None = None,
    raw_tensors: Mapping[str, np.ndarray] | None = None,
    split: Mapping[str, Any] | None = None,
    alignment: int | None = None,
) -> Path:
    """A GGUF file of the tensors (Hugging Face names), as a converter writes it.

    Matrices are stored as `stored` (or as `kinds` says for a name), vectors as float32. `permute`: reorder query and
    key rows (default: for architecture "llama"). `metadata`: more keys, or `...` to leave a key out. `raw_tensors` are
    stored as they are under their name in the file, and give no Hugging Face name. `split` are the writer's options for
    writing several files; the first is returned. `alignment` is declared in the first file alone, as the writer does.
    """
    keys: dict[str, Any] = {
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{architecture}.rope.freq_base": float(config["rope_theta"]),
        f"{architecture}.rope.dimension_count": config["head_dim"],
    }
    writer = gguf.GGUFWriter(path, architecture, **(split or {}))
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in changed(keys, metadata or {}).items():
        _put(writer, key, value)
    for name, tensor in (tensors or {}).items():
        if (architecture == "llama") if permute is None else permute:
            if ".q_proj." in name:
                tensor = permute_rows(tensor, config["num_attention_heads"])
            elif ".k_proj." in name:
                tensor = permute_rows(tensor, config["num_key_value_heads"])
        array = tensor.float().numpy()
        kind = (kinds or {}).get(name, stored) if array.ndim >= 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (raw_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split else path


def _put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_string(text: str | bytes, length: int | None = None) -> bytes:
    """A length-prefixed string; `length` is the length it claims."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def gguf_pair(key: str, kind: int, value: bytes) -> bytes:
    """One key-value pair: kind 4 is uint32, 8 a string, 9 an array."""
    return gguf_string(key) + struct.pack("<I", kind) + value


def gguf_entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    """One row of the tensor table; `n_dims` is the dimension count it claims."""
    return (
        gguf_string(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + b"".join(struct.pack("<Q", d) for d in dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_bytes(
    pairs: tuple[bytes, ...] = (),
    entries: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    magic: bytes = b"GGUF",
    alignment: int = 32,
) -> bytes:
    """A GGUF file from its parts; the counts are what it claims. An architecture key is added in front."""
    pairs = (gguf_pair("general.architecture", 8, gguf_string("llama")), *pairs)
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(entries) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head += b"".join(pairs) + b"".join(entries)
    return head + b"\0" * (-len(head) % alignment) + data
