"""Tiny olmo2 checkpoints for this suite, written and judged by transformers, and how to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from fuel_core import (
    DecodeBackbone,
    InferenceContext,
    KvCache,
    RawConfig,
    forward_decode_step,
    load_weights,
    open_checkpoint,
)
from fuel_core.testing import transformers_oracle
from safetensors.torch import load_file
from torch import Tensor

from fuel_olmo.conformance import SHARED
from fuel_olmo.family import FAMILY

PATHS = [(plan, offset) for plan in ("off", "recorded") for offset in ("symbol", "device")]
"""D1 and D2 on both offset paths."""

THETA = 10000.0
BASE = {**SHARED, "num_hidden_layers": 3, "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 16.0, "original_max_position_embeddings": 32}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# Every switch of the config stands both ways somewhere; groups of one, two and four query heads.
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {**BASE, "head_dim": 24},
    "grouped": {**BASE, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "biased": {**BASE, "num_key_value_heads": 1, "attention_bias": True, "head_dim": 32},
    "yarn": {**BASE, "num_key_value_heads": 2, "rope_parameters": YARN},
    "linear": {**BASE, "rope_parameters": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}},
    "banded": {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, **BANDS}},
}


def make(config: Mapping[str, Any], folder: Path, weights: str = "auto") -> tuple[DecodeBackbone, Any]:
    """Our model of a config, and transformers' logits ``[T, V]`` for token ids."""
    truth = transformers_oracle().prepare("tiny", config, folder, FAMILY, 0)
    return load_family(folder, weights), truth


def load_family(path: Path, weights: str = "auto") -> DecodeBackbone:
    with open_checkpoint(path) as checkpoint:
        backbone = build_unloaded(FAMILY.resolve_config(checkpoint.raw))
        load_weights(backbone, checkpoint, FAMILY, weights=weights)
    return backbone


def build_unloaded(spec: Any) -> DecodeBackbone:
    with torch.device("meta"):
        return FAMILY.build(spec)


def resolve(config: Mapping[str, Any], **changes: Any) -> Any:
    """The spec of a config.json given as a dict; a change to ... leaves the key out."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return FAMILY.resolve_config(RawConfig.from_config(merged))


def token_ids(count: int) -> list[int]:
    """Ids that do not repeat in a pattern."""
    return [(17 * n * n + 5 * n + 3) % 67 for n in range(count)]


def error_of_run(
    backbone: DecodeBackbone,
    truth: Any,
    chunks: Sequence[int],
    plan: str,
    offset_path: str,
    dtype: torch.dtype = torch.float32,
    count: int = 24,
) -> tuple[float, InferenceContext]:
    """Largest difference of any logit at any step, and the context that ran: ids in chunks, the rest one by one."""
    ids, fed, error = token_ids(count), 0, 0.0
    expected: Tensor = truth(ids)
    ctx = InferenceContext("cpu", plan=plan, offset_path=offset_path)
    cache = KvCache.with_capacity(backbone.layer_state_specs(), max_seq_len=count + 3, dtype=dtype, device="cpu")
    for size in [*chunks, *[1] * (count - sum(chunks))]:
        logits = forward_decode_step(backbone, ids[fed : fed + size], cache, ctx)
        fed += size
        error = max(error, float((logits - expected[fed - 1]).abs().max()))
    return error, ctx


_IN_GGUF = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(path: Path, folder: Path, config: Mapping[str, Any], **more: Any) -> Path:
    """The GGUF file of a folder that ``make`` wrote, as a converter writes it. more: metadata, ``.`` spelt ``__``."""
    rope = config["rope_parameters"]
    metadata: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention__head_count": config["num_attention_heads"],
        "attention__head_count_kv": config["num_key_value_heads"],
        "attention__key_length": config["head_dim"],
        "attention__value_length": config["head_dim"],
        "attention__layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope__freq_base": rope["rope_theta"],
        "rope__dimension_count": config["head_dim"],
        **more,
    }
    writer = gguf.GGUFWriter(path, "olmo2")
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(f"olmo2.{key.replace('__', '.')}", value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, ending = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        writer.add_tensor(f"{prefix}{_IN_GGUF[stem]}.{ending}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
