"""What this package hands to the core: one family of three generations, which share Qwen2's modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from fuel_core import DecodeBackbone, Family, RawConfig

from fuel_qwen import qwen2, qwen3, qwen3_moe

_GENERATIONS: tuple[ModuleType, ...] = (qwen2, qwen3, qwen3_moe)
_BY_NAME: dict[str, Any] = {
    name: module for module in _GENERATIONS for name in (*module.MODEL_TYPES, *module.GGUF_ARCHITECTURES)
}


def resolve_config(raw: RawConfig) -> qwen2.Qwen2Config:
    """Raw config -> the spec of its generation. Raises ConfigError naming the key, what was expected and found."""
    name = raw.gguf_architecture if raw.format == "gguf" else raw.model_type
    spec: qwen2.Qwen2Config = _BY_NAME.get(name or "", qwen2).resolve_config(raw)
    return spec


def build(config: qwen2.Qwen2Config) -> DecodeBackbone:
    """Spec -> backbone; the spec's class says which."""
    if isinstance(config, qwen3_moe.Qwen3MoeConfig):
        return qwen3_moe.Qwen3MoeBackbone(config)
    if isinstance(config, qwen3.Qwen3Config):
        return qwen3.Qwen3Backbone(config)
    return qwen2.Qwen2Backbone(config)


FAMILY = Family(
    name="qwen",
    model_types=(*qwen2.MODEL_TYPES, *qwen3.MODEL_TYPES, *qwen3_moe.MODEL_TYPES),
    gguf_architectures=(*qwen2.GGUF_ARCHITECTURES, *qwen3.GGUF_ARCHITECTURES, *qwen3_moe.GGUF_ARCHITECTURES),
    resolve_config=resolve_config,
    build=build,
    tensor_names=qwen2.tensor_name,
    defaults=qwen2.DEFAULTS,
)
