"""Recognises quantised weights from the names and stored types of tensors, whatever the config says or leaves out.

Quantised numbers read as plain ones give fluent nonsense, and a config that was edited or copied from another
checkpoint may declare nothing. Every published scheme leaves its scales beside the weights, under names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fuel_core.checkpoint.base import TensorInfo

__all__ = ["declared_method", "undeclared_method"]

# Last part of a tensor's name that no plain checkpoint has -> method.
_LEAVES: Final = {
    "weight_scale_inv": "fp8",
    "absmax": "bitsandbytes",
    "nested_absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "nested_quant_map": "bitsandbytes",
    "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes",
    "SCB": "bitsandbytes",
    "weight_packed": "compressed-tensors",
    "q_weight": "exl2",
    "trellis": "exl3",
    "W_q": "hqq",
    "Qidxs": "quip",
    "codebooks": "aqlm",
    "weight_scales": "eetq",
    "_scale": "quanto",
}
_PLAIN: Final = frozenset({"float32", "bfloat16", "float16"})
_DTYPES: Final = {"F8_": "fp8", "F6_": "fp6", "F4": "fp4"}


def undeclared_method(infos: Mapping[str, TensorInfo]) -> tuple[str, str] | None:
    """(method, the tensor that shows it), or None for plain weights."""
    for name, info in infos.items():
        stem, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias") and info.dtype_name in _PLAIN:
            continue  # nearly all there are, and what shows a scheme stands beside them
        method = _LEAVES.get(leaf)
        if method is not None:
            return method, name
        if leaf == "qweight" and (f"{stem}.qzeros" in infos or f"{stem}.scales" in infos):
            # Both store qweight, qzeros and scales; only gptq stores the order of its groups.
            return ("gptq" if f"{stem}.g_idx" in infos else "awq"), name
        if leaf == "scales" and f"{stem}.weight" in infos:
            packed = infos[f"{stem}.weight"].dtype_name == "U32"
            if packed or f"{stem}.biases" in infos:
                return "mlx", name
        if leaf in ("weight_scale", "scale_weight") and f"{stem}.weight" in infos:
            # Bytes are pairs of 4-bit numbers: with two levels of scales, or four numbers of three values.
            of_bytes = "nvfp4" if f"{stem}.weight_scale_2" in infos else "bitnet"
            return {"int8": "int8", "uint8": of_bytes}.get(infos[f"{stem}.weight"].dtype_name, "fp8"), name
        if leaf == "indices" and f"{stem}.centroids.weight" in infos:
            return "vptq", name
        if leaf.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in infos:
            return "mxfp4", name
        for start, word in _DTYPES.items():
            if f"{stem}.weight_scale_2" in infos:
                continue  # its scales are stored so
            if info.dtype_name.startswith(start):
                return word, name
    return None


def declared_method(block: object) -> str | None:
    """Name of the method that a `quantization_config` declares, worked out from its keys where it gives no name.

    None for null; "unnamed" for what tells nothing.
    """
    if block is None:
        return None
    if isinstance(block, str) and block:
        return block
    if not isinstance(block, Mapping):
        return "unnamed"
    for key in ("quant_method", "quant_algo", "fmt"):
        if isinstance(block.get(key), str) and block[key]:
            return str(block[key])
    keys: set[Any] = {key for key, value in block.items() if value is not None}
    if any(isinstance(key, str) and key.startswith(("bnb_", "load_in_", "_load_in_")) for key in keys):
        return "bitsandbytes"
    if "config_groups" in keys:
        return "compressed-tensors"
    if {"bits", "group_size"} <= keys:
        return "gptq" if keys & {"desc_act", "damp_percent", "sym"} else "awq" if "zero_point" in keys else "mlx"
    return "unnamed"
