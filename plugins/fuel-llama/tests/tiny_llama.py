"""Tiny llama checkpoints for this suite: transformers models with seeded weights, saved the way a release is.

The numbers come from a counter hashed here (SplitMix64), not from a library's generator, so that a checkpoint has the
same weights under every version of torch and numpy. Sizes avoid coincidences that hide bugs: hidden 96, 4 heads, head
widths apart from hidden/heads, norm gains away from 1, biases away from 0, queries and keys large enough for attention
to depend on positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fuel_core import InferenceContext, KvCache, forward_decode_step, load_weights, open_checkpoint
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from fuel_llama.llama import FAMILY, LlamaBackbone

transformers_logging.disable_progress_bar()

PATHS = [(plan, offset) for plan in ("off", "recorded") for offset in ("symbol", "device")]
"""D1 and D2 on both offset paths."""

DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
ROPES: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT_ROPE,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
    },
}

BASE: Mapping[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": DEFAULT_ROPE,
}

# Every switch of the config stands both ways somewhere, and no two of them always together.
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "grouped": {},
    "full_heads": {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "wide_heads": {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 4},
    "mlp_biased": {"head_dim": 16, "mlp_bias": True, "tie_word_embeddings": True},
    **{kind: {"head_dim": 16, "rope_parameters": ROPES[kind]} for kind in ("linear", "llama3", "yarn")},
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
            values = gain * u * (3.0 / shape[-1]) ** 0.5
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def config_for(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def reference_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """The transformers model of a config, in float32 with eager attention."""
    config = LlamaConfig(**config_for(**changes))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    # The one buffer of the model has no place in a checkpoint and must be worked out again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in weights_for(shapes, seed, tied=bool(config.tie_word_embeddings)).items():
            model.get_parameter(name).copy_(values)
    return model.eval()


def exact_frequencies(rope: Mapping[str, Any], width: int) -> tuple[npt.NDArray[np.float64], float]:
    """Inverse frequencies ``[width / 2]`` and the factor on cos and sin, float64, from the published formulas.

    linear: Chen et al. 2023 (arXiv 2306.15595). llama3: the Llama 3.1 release. yarn: Peng et al. 2023 (arXiv
    2309.00071), with beta 32 and 1. Written apart from the core and from transformers; a test holds all three together.
    """
    theta, i = float(rope["rope_theta"]), np.arange(width // 2)
    plain = theta ** (-2.0 * i / width)
    kind = rope["rope_type"]
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = float(rope["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = original * plain / (2.0 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return plain * kept + plain / factor * (1.0 - kept), 1.0
    assert kind == "yarn"

    def pair_that_turns(times: float) -> float:
        return width * np.log(original / (times * 2.0 * np.pi)) / (2.0 * np.log(theta))

    first = max(np.floor(pair_that_turns(32.0)), 0.0)
    last = min(np.ceil(pair_that_turns(1.0)), width - 1.0)
    ramp = np.clip((i - first) / max(last - first, 0.001), 0.0, 1.0)
    return plain * (1.0 - ramp) + plain / factor * ramp, 0.1 * np.log(factor) + 1.0


def use_exact_angles(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Give a transformers model cos and sin from float64 angles; its own are float32 products of float32 factors."""
    frequencies, scale = exact_frequencies(model.config.rope_parameters, model.config.head_dim)
    inv_freq = torch.from_numpy(frequencies)

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    model.model.rotary_emb.forward = forward
    return model


def reference_logits(model: LlamaForCausalLM, ids: Sequence[int]) -> Tensor:
    """float32 ``[T, vocab]``: row i is what transformers says after ids[:i + 1], from one forward without a cache."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def save(model: LlamaForCausalLM, folder: Path, **how: Any) -> Path:
    """The folder transformers writes."""
    model.save_pretrained(folder, **how)
    return folder


def load(path: Path | str, weights: str = "auto") -> LlamaBackbone:
    """A checkpoint through the core's own readers."""
    checkpoint = open_checkpoint(path)
    config = FAMILY.resolve_config(checkpoint.raw)
    with torch.device("meta"):
        backbone = FAMILY.build(config)
    load_weights(backbone, checkpoint, FAMILY, weights=weights)
    assert isinstance(backbone, LlamaBackbone)
    return backbone


def new_cache(backbone: LlamaBackbone, capacity: int = 64, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache.with_capacity(backbone.layer_state_specs(), max_seq_len=capacity, dtype=dtype, device="cpu")


def decode(
    backbone: LlamaBackbone, ids: Sequence[int], chunks: Sequence[int], cache: KvCache, ctx: InferenceContext
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


def fresh_logits(backbone: LlamaBackbone, ids: Sequence[int], **context: Any) -> list[Tensor]:
    """Logits after each id from steps executed fresh on a cache of their own: the relative oracle."""
    cache, ctx = new_cache(backbone, len(ids)), InferenceContext("cpu", plan="off", **context)
    return [logits for _, logits in decode(backbone, ids, [1], cache, ctx)]
