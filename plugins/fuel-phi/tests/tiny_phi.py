"""Tiny phi checkpoints for this suite: transformers models with seeded weights, saved the way a release is.

The numbers come from a counter hashed here (SplitMix64), not from a library's generator, so that a checkpoint has the
same weights under every version of torch and numpy. Sizes avoid coincidences that hide bugs: hidden 96, 4 heads, norm
gains away from 1, biases away from 0, queries and keys large enough for attention to depend on positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
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
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM, PhiConfig, PhiForCausalLM
from transformers.utils import logging as transformers_logging

from fuel_phi.family import FAMILY

transformers_logging.disable_progress_bar()

PATHS = [(plan, offset) for plan in ("off", "recorded") for offset in ("symbol", "device")]
"""D1 and D2 on both offset paths."""

SHARED: Mapping[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
ORIGINAL = 16
WINDOW = 5


def longrope(pairs: int, original: int = ORIGINAL) -> dict[str, Any]:
    """A RoPE block with two lists of ``pairs`` numbers that differ."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.5 * i for i in range(pairs)],
        "original_max_position_embeddings": original,
    }


PHI = {**SHARED, "layer_norm_eps": 1e-5}
PHI3 = {**SHARED, "rms_norm_eps": 1e-5, "original_max_position_embeddings": ORIGINAL}

# Every switch of the configs stands both ways somewhere.
CHECKPOINTS: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    # 12 of 24 features rotate, the share of Phi-1 and Phi-1.5.
    "phi": (PhiConfig, PhiForCausalLM, {**PHI, "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}}),
    # Heads of 20 features, of which 8 rotate: the share of Phi-2; queries narrower than the hidden state.
    "phi_narrow": (
        PhiConfig,
        PhiForCausalLM,
        {
            **PHI,
            "head_dim": 20,
            "num_key_value_heads": 2,
            "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.4},
        },
    ),
    "phi_normed": (
        PhiConfig,
        PhiForCausalLM,
        {
            **PHI,
            "qk_layernorm": True,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 1.0},
        },
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {**PHI3, "rope_parameters": dict(DEFAULT_ROPE)}),
    "phi3_windowed": (
        Phi3Config,
        Phi3ForCausalLM,
        {**PHI3, "num_key_value_heads": 2, "sliding_window": WINDOW, "rope_parameters": dict(DEFAULT_ROPE)},
    ),
    "phi4_mini": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            **PHI3,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            "rope_parameters": {**longrope(9, 256), "partial_rotary_factor": 0.75},
        },
    ),
}
CROSSING = {**PHI3, "num_key_value_heads": 2, "rope_parameters": {**longrope(9), "partial_rotary_factor": 0.75}}
"""Phi-4-mini with an original length that a test can outgrow."""


def numbers(name: str, shape: Sequence[int], seed: int = 0) -> npt.NDArray[np.float64]:
    """Uniform numbers in [-1, 1), a pure function of name, shape and seed (SplitMix64 over a counter)."""
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        start = np.uint64(zlib.crc32(f"{seed}/{name}".encode())) << np.uint64(32)
        z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)).astype(np.float64) / 2**52 - 1.0).reshape(tuple(shape))


def token_ids(count: int, vocab: int = 67, seed: int = 0) -> list[int]:
    """Ids that do not repeat in a pattern."""
    return [int((u + 1.0) / 2.0 * vocab) for u in numbers("ids", (count,), seed)]


def weights_for(shapes: Mapping[str, Sequence[int]], seed: int = 0, *, tied: bool = False) -> dict[str, Tensor]:
    """float32 weights by parameter name, that keep activations and logits near 1, and avoid what hides bugs."""
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        u = numbers(name, shape, seed)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.4 * u
        elif name.endswith(".bias"):
            values = 0.4 * u
        elif name == "model.embed_tokens.weight":
            values = u if not tied else 0.5 * u * (3.0 / shape[1]) ** 0.5
        else:
            scores = any(part in name for part in (".q_proj.", ".k_proj.", ".qkv_proj."))
            gain = 1.5 if scores else 0.5 if name == "lm_head.weight" else 1.0
            values = gain * u * (3.0 / shape[-1]) ** 0.5
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def reference_of(config_class: Any, model_class: Any, changes: Mapping[str, Any], seed: int = 0) -> Any:
    """The transformers model of a config, in float32 with eager attention."""
    config = config_class(**{k: dict(v) if isinstance(v, Mapping) else v for k, v in changes.items()})
    config._attn_implementation = "eager"
    model = model_class(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in weights_for(shapes, seed, tied=bool(config.tie_word_embeddings)).items():
            model.get_parameter(name).copy_(values)
    return model.eval()


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """float32 ``[T, vocab]``: row i is what transformers says after ids[:i + 1], from one forward without a cache."""
    with torch.no_grad():
        out: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return out


def reference_steps(model: Any, ids: Sequence[int]) -> Tensor:
    """The same, each row from a forward of its own: where the length decides the frequencies, the rows differ."""
    return torch.stack([reference_logits(model, ids[: n + 1])[-1] for n in range(len(ids))])


def save_and_load(model: Any, folder: Path, **how: Any) -> DecodeBackbone:
    """The folder transformers writes, read by the core through the family that the package registers."""
    model.save_pretrained(folder)
    return load_family(folder, **how)


def load_family(path: Path | str, weights: str = "auto") -> DecodeBackbone:
    """A checkpoint through the registered family."""
    with open_checkpoint(path) as checkpoint:
        with torch.device("meta"):
            backbone = FAMILY.build(FAMILY.resolve_config(checkpoint.raw))
        load_weights(backbone, checkpoint, FAMILY, weights=weights)
    return backbone


def build_unloaded(spec: Any) -> DecodeBackbone:
    """The backbone of a spec on the meta device."""
    with torch.device("meta"):
        return FAMILY.build(spec)


def resolve(config: Mapping[str, Any], **changes: Any) -> Any:
    """The spec of a config.json given as a dict; a change to ... leaves the key out."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return FAMILY.resolve_config(RawConfig.from_config(merged))


def new_cache(backbone: DecodeBackbone, capacity: int = 64, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache.with_capacity(backbone.layer_state_specs(), max_seq_len=capacity, dtype=dtype, device="cpu")


def decode(
    backbone: DecodeBackbone, ids: Sequence[int], chunks: Sequence[int], cache: KvCache, ctx: InferenceContext
) -> list[tuple[int, Tensor]]:
    """Feed ids: first in chunks, then one by one. Returns (index of the last id fed, its logits [vocab]) per call."""
    rows, fed = [], 0
    for size in [*chunks, *[1] * (len(ids) - sum(chunks))]:
        logits = forward_decode_step(backbone, list(ids[fed : fed + size]), cache, ctx)
        fed += size
        rows.append((fed - 1, logits))
    return rows


def worst(rows: Sequence[tuple[int, Tensor]], expected: Tensor) -> float:
    """Largest absolute difference of any logit at any step."""
    return max(float((logits - expected[index]).abs().max()) for index, logits in rows)


@cache
def _expected(reference: Any, ids: tuple[int, ...]) -> Tensor:
    return reference_logits(reference, ids)


def error_of_run(
    backbone: DecodeBackbone,
    reference: Any,
    count: int,
    chunks: Sequence[int],
    plan: str,
    offset_path: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, InferenceContext]:
    """Largest difference of any logit over a run of `count` ids, and the context that ran it."""
    ids = token_ids(count, seed=4)
    ctx = InferenceContext("cpu", plan=plan, offset_path=offset_path)
    rows = decode(backbone, ids, chunks, new_cache(backbone, count + 3, dtype), ctx)
    return worst(rows, _expected(reference, tuple(ids))), ctx


_IN_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.fc1": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.fc2": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}


def fused(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a phi model with q, k and v of a layer in one, as files of its first revision hold them."""
    joined: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            rows = [state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            joined[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(rows)
        elif ".k_proj." not in name and ".v_proj." not in name:
            joined[name] = tensor
    return joined


def write_gguf(
    path: Path, model: Any, architecture: str, keys: Mapping[str, Any], state: Mapping[str, Tensor] | None = None
) -> Path:
    """A GGUF file of ``model`` as a converter writes it.

    keys: metadata without the architecture's prefix; None leaves one out, an array is a tensor that is no weight.
    """
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope = c.rope_parameters
    metadata: dict[str, Any] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        **keys,
    }
    for key, value in metadata.items():
        name = f"{architecture}.{key}"
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
    for name, tensor in (state or model.state_dict()).items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        writer.add_tensor(f"{prefix}{_IN_GGUF[stem]}.{ending}", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
