"""Tiny checkpoints of the architectures beside llama: any transformers class, with the weights of `tiny_llama`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from fuel_core import DecodeBackbone, InferenceContext, RawConfig, load_weights, open_checkpoint
from tiny_files import permuted
from tiny_llama import BASE, decode, new_cache, reference_logits, token_ids, weights_for, worst
from torch import Tensor
from transformers import PreTrainedModel

from fuel_llama.family import FAMILY
from fuel_llama.llama import LlamaBackbone, LlamaConfig

TOLERANCE = 1e-5
"""float32, calibrated in test_against_transformers; the largest genuine error of these suites stands beside each."""

# What no architecture here but llama has a switch for.
SHARED = {key: value for key, value in BASE.items() if key not in ("attention_bias", "mlp_bias")}


def reference_of(config_class: Any, model_class: Any, seed: int = 0, **changes: Any) -> Any:
    """The transformers model of a config, in float32 with eager attention."""
    config = config_class(**{**SHARED, **changes})
    config._attn_implementation = "eager"
    model = model_class(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in weights_for(shapes, seed, tied=bool(config.tie_word_embeddings)).items():
            model.get_parameter(name).copy_(values)
    return model.eval()


def save_and_load(model: PreTrainedModel, folder: Path, **how: Any) -> LlamaBackbone:
    """The folder transformers writes, read by the core through the family that the package registers."""
    model.save_pretrained(folder, **how)
    return load_family(folder)


def load_family(path: Path | str) -> LlamaBackbone:
    """A checkpoint through the registered family."""
    with open_checkpoint(path) as checkpoint:
        with torch.device("meta"):
            backbone = FAMILY.build(FAMILY.resolve_config(checkpoint.raw))
        load_weights(backbone, checkpoint, FAMILY)
    assert isinstance(backbone, LlamaBackbone)
    return backbone


def build_unloaded(spec: LlamaConfig) -> DecodeBackbone:
    """The backbone of a spec on the meta device."""
    with torch.device("meta"):
        return FAMILY.build(spec)


def resolve(config: dict[str, Any], **changes: Any) -> Any:
    """The spec of a config.json given as a dict; a change to ... leaves the key out."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return FAMILY.resolve_config(RawConfig.from_config(merged))


@cache
def _expected(reference: Any, ids: tuple[int, ...]) -> Tensor:
    return reference_logits(reference, ids)


def error_of_run(
    backbone: LlamaBackbone, reference: Any, count: int, chunks: Sequence[int], plan: str, offset_path: str
) -> tuple[float, InferenceContext]:
    """Largest difference of any logit over a run of `count` ids, and the context that ran it."""
    ids = token_ids(count, seed=4)
    ctx = InferenceContext("cpu", plan=plan, offset_path=offset_path)
    rows = decode(backbone, ids, chunks, new_cache(backbone, count + 3), ctx)
    return worst(rows, _expected(reference, tuple(ids))), ctx


def separation(left: Any, right: Any, count: int) -> float:
    """How far apart two models are somewhere: what a wrong structure would cost."""
    ids = token_ids(count, seed=4)
    ours: Tensor = reference_logits(left, ids)
    return float((ours - reference_logits(right, ids)).abs().max())


_IN_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf_of(
    path: Path, model: Any, architecture: str, more: Mapping[str, str | float | int], *, permute: bool = True
) -> Path:
    """A float32 GGUF file of ``model`` under ``architecture``, as the converter writes it: q and k rows reordered."""
    c = model.config
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, str | float | int] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": c.vocab_size,
        **more,
    }
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        kind = stem.rpartition(".")[2]
        stored = permuted(tensor, heads[kind]) if permute and kind in heads else tensor
        writer.add_tensor(f"{prefix}{_IN_GGUF[stem]}.{ending}", stored.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
