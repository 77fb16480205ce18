"""What this package hands to the core: one family of three generations."""

from __future__ import annotations

from typing import Any

from fuel_core import DecodeBackbone, Family, RawConfig, errors

from fuel_gemma import gemma, gemma2, gemma3

_GENERATIONS: tuple[Any, ...] = (gemma, gemma2, gemma3)


def resolve_config(raw: RawConfig) -> gemma.GemmaConfig:
    """Raw config -> the spec of its generation. Raises ConfigError naming the key, what was expected and found."""
    in_gguf = raw.format == "gguf"
    word = raw.gguf_architecture if in_gguf else raw.model_type
    for module in _GENERATIONS:
        if word in (module.GGUF_ARCHITECTURES if in_gguf else module.MODEL_TYPES):
            break
    else:
        raise errors.ConfigError(
            f"{raw.source('model_type')}: expected model_type to be one of {', '.join(FAMILY.model_types)}, found "
            f"{word!r:.80} for family 'gemma'; correct the config"
        )
    spec: gemma.GemmaConfig = module.resolve_config(raw)
    return spec


def build(config: gemma.GemmaConfig) -> DecodeBackbone:
    """Spec -> backbone; the spec's class says which."""
    if isinstance(config, gemma3.Gemma3Config):
        return gemma3.Gemma3Backbone(config)
    if isinstance(config, gemma2.Gemma2Config):
        return gemma2.Gemma2Backbone(config)
    return gemma.GemmaBackbone(config)


def tensor_name(name: str) -> str | None:
    """Checkpoint tensor -> parameter; None for one that is no weight of the decoder."""
    # Old checkpoints store each layer's frequencies.
    return None if name.endswith(".rotary_emb.inv_freq") else gemma3.tensor_name(name)


FAMILY = Family(
    name="gemma",
    model_types=tuple(word for module in _GENERATIONS for word in module.MODEL_TYPES),
    gguf_architectures=tuple(word for module in _GENERATIONS for word in module.GGUF_ARCHITECTURES),
    resolve_config=resolve_config,
    build=build,
    tensor_names=tensor_name,
    defaults=gemma.DEFAULTS,
)
