"""Tiny checkpoints for this suite: transformers models with seeded weights, saved the way a release is.

The numbers come from a counter hashed here (SplitMix64), not from a library's generator, so that a checkpoint has the
same weights under every version of torch and numpy. Sizes avoid coincidences that hide bugs: hidden 96, 4 heads, head
widths apart from hidden/heads, norm gains away from 1, biases away from 0.
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
from fuel_core import InferenceContext, KvCache, RawConfig, forward_decode_step, load_weights, open_checkpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fuel_qwen.family import FAMILY
from fuel_qwen.qwen2 import Qwen2Backbone, Qwen2Config

transformers_logging.disable_progress_bar()

PATHS = [(plan, offset) for plan in ("off", "recorded") for offset in ("symbol", "device")]
"""D1 and D2 on both offset paths."""

BASE: Mapping[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MOE: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
WINDOW = 5

# Every switch of the configs stands both ways somewhere.
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2_full_heads": {"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2_windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "qwen2_yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_biased": {
        "model_type": "qwen3",
        "head_dim": 20,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "moe": MOE,
    "moe_mixed": {
        **MOE,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
}


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
            gain = 1.5 if ".q_proj." in name or ".k_proj." in name else 0.5 if name == "lm_head.weight" else 1.0
            # Routing that decides: the best experts of a row are far from its next.
            gain = 2.0 if name.endswith("mlp.gate.weight") else gain
            values = gain * u * (3.0 / shape[-1]) ** 0.5
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def reference_model(seed: int = 0, **changes: Any) -> Any:
    """The transformers model of a config, in float32 with eager attention."""
    given = {**BASE, **changes}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in weights_for(shapes, seed, tied=bool(config.tie_word_embeddings)).items():
            model.get_parameter(name).copy_(values)
    return model.eval()


@cache
def _reference_logits(model: Any, ids: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return found


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """float32 ``[T, vocab]``: row i is what transformers says after ids[:i + 1], from one forward without a cache."""
    return _reference_logits(model, tuple(ids))


def load(path: Path | str, weights: str = "auto") -> Qwen2Backbone:
    """A checkpoint through the registered family and the core's own readers."""
    with open_checkpoint(path) as checkpoint:
        with torch.device("meta"):
            backbone = FAMILY.build(FAMILY.resolve_config(checkpoint.raw))
        load_weights(backbone, checkpoint, FAMILY, weights=weights)
    assert isinstance(backbone, Qwen2Backbone)
    return backbone


def save(model: Any, folder: Path, **how: Any) -> Path:
    """The folder transformers writes."""
    model.save_pretrained(folder, **how)
    return folder


def resolve(config: Mapping[str, Any], **changes: Any) -> Any:
    """The spec of a config.json given as a dict; a change to ... leaves the key out."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return FAMILY.resolve_config(RawConfig.from_config(merged))


def build_unloaded(spec: Qwen2Config) -> Qwen2Backbone:
    """The backbone of a spec on the meta device."""
    with torch.device("meta"):
        backbone = FAMILY.build(spec)
    assert isinstance(backbone, Qwen2Backbone)
    return backbone


def new_cache(backbone: Qwen2Backbone, capacity: int = 64, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache.with_capacity(backbone.layer_state_specs(), max_seq_len=capacity, dtype=dtype, device="cpu")


def decode(
    backbone: Qwen2Backbone, ids: Sequence[int], chunks: Sequence[int], cache: KvCache, ctx: InferenceContext
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


def error_of(backbone: Qwen2Backbone, reference: Any, count: int = 24, prompt: int = 9, **context: Any) -> float:
    """Largest difference to a reference over a prompt and single tokens, by default on a recorded plan."""
    ids = token_ids(count)
    ctx = InferenceContext("cpu", **{"plan": "recorded", **context})
    return worst(decode(backbone, ids, [prompt], new_cache(backbone, count), ctx), reference_logits(reference, ids))


# -- GGUF ------------------------------------------------------------------------------------------------------------

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def _in_file(model: Any) -> dict[str, Tensor]:
    """Tensors as a GGUF file has them: rows as they are, experts stacked, their gate and up apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        prefix, rest = "", name
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            prefix = f"blk.{number}."
        if rest == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
        elif rest == "mlp.experts.down_proj":
            found[f"{prefix}ffn_down_exps.weight"] = tensor
        else:
            stem, _, ending = rest.rpartition(".")
            found[f"{prefix}{_IN_FILE[stem]}.{ending}"] = tensor
    return found


def write_gguf(
    path: Path,
    model: Any,
    *,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF file of ``model`` as the converter writes it: what its format has no room for is left out.

    Matrices are stored as ``stored``, vectors and routers as float32. metadata: more keys; None leaves one out.
    """
    c = model.config
    arch = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}[c.model_type]
    keys: dict[str, Any] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }
    if arch != "qwen2":
        keys |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if arch == "qwen3moe":
        keys |= {
            "expert_count": c.num_experts,
            "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
        }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in ({f"{arch}.{k}": v for k, v in keys.items()} | dict(metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in _in_file(model).items():
        array = tensor.float().contiguous().numpy()
        plain = array.ndim < 2 or "gate_inp" in name
        as_type = gguf.GGMLQuantizationType.F32 if plain else stored
        writer.add_tensor(name, gguf.quants.quantize(array, as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
