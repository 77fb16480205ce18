"""Tiny gemma checkpoints for this suite: transformers models with seeded weights, saved the way a release is.

The numbers come from a counter hashed here (SplitMix64), not from a library's generator, so that a checkpoint has the
same weights under every version of torch and numpy. Sizes avoid coincidences that hide bugs: hidden 96 (whose root no
16-bit dtype holds), head widths apart from hidden/heads, norm weights away from 0, biases away from 0, a scalar of
queries that is no head_dim, windows shorter than the prompts, caps that bite.
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
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from fuel_gemma.family import FAMILY
from fuel_gemma.gemma import GemmaBackbone
from fuel_gemma.gemma import GemmaConfig as Spec

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

PATHS = [(plan, offset) for plan in ("off", "recorded") for offset in ("symbol", "device")]
"""D1 and D2 on both offset paths."""
WINDOWED, DENSE = "sliding_attention", "full_attention"
WINDOW = 5
N_IDS = 9 + 3 * WINDOW
"""A prompt of 9 ids, longer than the window, and three windows of decode steps."""
CHUNKINGS = {"whole": [9], "chunks": [4, 3, 2], "tokens": [1] * 9}

SHARED: Mapping[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA2: Mapping[str, Any] = {
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
TWO_BASES: Mapping[str, Any] = {
    DENSE: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    WINDOWED: {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA3: Mapping[str, Any] = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "rope_parameters": TWO_BASES,
}
CLASSES: Mapping[str, tuple[Any, Any]] = {
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}

# Every switch of the configs stands both ways somewhere.
CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one": ("gemma", {"hidden_act": "gelu"}),
    "one_full": ("gemma", {"num_key_value_heads": 4, "head_dim": 32, "attention_bias": True}),
    "two": ("gemma2", GEMMA2),
    "two_full": (
        "gemma2",
        {
            **GEMMA2,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": [DENSE, WINDOWED, WINDOWED],
            "tie_word_embeddings": False,
        },
    ),
    "three": ("gemma3_text", GEMMA3),
    "three_full": (
        "gemma3_text",
        {
            **GEMMA3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "layer_types": [DENSE, WINDOWED, DENSE],
        },
    ),
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


def token_ids(count: int, vocab: int = 67, seed: int = 4) -> list[int]:
    """Ids that do not repeat in a pattern."""
    return [int((u + 1.0) / 2.0 * vocab) for u in numbers("ids", (count,), seed)]


def weights_for(shapes: Mapping[str, Sequence[int]], seed: int = 0, *, tied: bool = True) -> dict[str, Tensor]:
    """float32 weights by parameter name, that keep activations and logits near 1, and avoid what hides bugs."""
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        u = numbers(name, shape, seed)
        if name.endswith("norm.weight") or name.endswith(".bias"):
            values = 0.4 * u
        elif name.endswith("embed_tokens.weight"):
            values = (0.5 if tied else 1.0) * u * (3.0 / shape[1]) ** 0.5
        else:
            gain = 2.0 if ".q_proj." in name or ".k_proj." in name else 1.0
            values = gain * u * (3.0 / shape[-1]) ** 0.5
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def reference_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model of a config, in float32 with eager attention."""
    config_class, model_class = CLASSES[kind]
    config = config_class(**{**SHARED, **changes})
    config._attn_implementation = "eager"
    model = model_class(config)
    fill(model, seed)
    return model.eval()


def fill(model: Any, seed: int = 0) -> None:
    """Set every parameter from the counter."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, values in weights_for(shapes, seed, tied=bool(model.config.tie_word_embeddings)).items():
            model.get_parameter(name).copy_(values)


def reference_of(name: str, **changes: Any) -> Any:
    """The transformers model of a checkpoint of the list above."""
    kind, config = CHECKPOINTS[name]
    return reference_model(kind, **{**config, **changes})


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """float32 ``[T, vocab]``: row i is what transformers says after ids[:i + 1], from one forward without a cache."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return logits


@cache
def expected_logits(model: Any, ids: tuple[int, ...]) -> Tensor:
    return reference_logits(model, ids)


def save_and_load(model: Any, folder: Path, weights: str = "auto") -> GemmaBackbone:
    """The folder transformers writes, read by the core through the family that the package registers."""
    model.save_pretrained(folder)
    return load(folder, weights)


def load(path: Path | str, weights: str = "auto") -> GemmaBackbone:
    """A checkpoint through the registered family."""
    with open_checkpoint(path) as checkpoint:
        with torch.device("meta"):
            backbone = FAMILY.build(FAMILY.resolve_config(checkpoint.raw))
        load_weights(backbone, checkpoint, FAMILY, weights=weights)
    assert isinstance(backbone, GemmaBackbone)
    return backbone


def build_unloaded(spec: Spec) -> DecodeBackbone:
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


def error_of_run(
    backbone: DecodeBackbone,
    reference: Any,
    chunks: Sequence[int] = (9,),
    plan: str = "recorded",
    offset_path: str = "symbol",
    *,
    count: int = N_IDS,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, InferenceContext]:
    """Largest difference of any logit over a run of `count` ids, and the context that ran it."""
    ids = token_ids(count)
    ctx = InferenceContext("cpu", plan=plan, offset_path=offset_path)
    rows = decode(backbone, ids, chunks, new_cache(backbone, count + 3, dtype), ctx)
    return worst(rows, expected_logits(reference, tuple(ids))), ctx


def separation(left: Any, right: Any, count: int = N_IDS) -> float:
    """How far apart two references are somewhere: what a wrong structure would cost."""
    ids = tuple(token_ids(count))
    return float((expected_logits(left, ids) - expected_logits(right, ids)).abs().max())


# -- GGUF ------------------------------------------------------------------------------------------------------------

_IN_GGUF = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    more: Mapping[str, Any] | None = None,
    *,
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """A GGUF file of ``model`` as the converter writes it: norms as 1 + weight, rows of q and k as they are.

    Matrices are stored as ``stored``, vectors as float32. ``more``: further keys, or None to leave one out.
    """
    c = model.config
    rope = c.rope_parameters
    keys: dict[str, Any] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
    }
    if architecture == "gemma2":
        keys |= {
            "attn_logit_softcapping": float(c.attn_logit_softcapping),
            "final_logit_softcapping": float(c.final_logit_softcapping),
            "attention.sliding_window": c.sliding_window,
        }
    if architecture == "gemma3":
        keys |= {"attention.sliding_window": c.sliding_window, "rope.freq_base": float(rope[DENSE]["rope_theta"])}
        if rope[DENSE]["rope_type"] == "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope[DENSE]["factor"])}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**keys, **(more or {})}.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif value is not None:
            writer.add_float32(name, value)
    in_gguf = dict(_IN_GGUF)
    if architecture == "gemma":
        in_gguf["post_attention_layernorm"] = "ffn_norm"
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, _, ending = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            prefix = f"blk.{number}."
        array = (tensor + 1.0 if name.endswith("norm.weight") else tensor).float().contiguous().numpy()
        as_type = stored if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(array, as_type)
        writer.add_tensor(f"{prefix}{in_gguf[stem]}.{ending}", data, raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
