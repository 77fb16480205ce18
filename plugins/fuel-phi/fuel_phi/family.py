"""What this package hands to the core: one family of two generations, which share a name and little else."""

from __future__ import annotations

from typing import Any

from fuel_core import DecodeBackbone, Family, RawConfig, errors

from fuel_phi import phi, phi3

# Names that look like ours and are not.
_OTHERS = {
    "phi-msft": "an early revision of Phi-1.5 or Phi-2, whose tensors are laid out for the code beside them; download "
    "the current revision, whose model_type is phi",
    "phi3small": "Phi-3-small, which is another architecture (block-sparse attention, gegelu); use Phi-3-mini or "
    "Phi-3-medium",
}


def resolve_config(raw: RawConfig) -> phi.PhiConfig | phi3.Phi3Config:
    """Raw config -> the spec of its generation. Raises ConfigError naming the key, what was expected and found."""
    word = raw.gguf_architecture if raw.format == "gguf" else raw.model_type
    if word in (*phi.MODEL_TYPES, *phi.GGUF_ARCHITECTURES):
        return phi.resolve_config(raw)
    if word in (*phi3.MODEL_TYPES, *phi3.GGUF_ARCHITECTURES):
        return phi3.resolve_config(raw)
    what = _OTHERS.get(word or "", "a newer release may know it")
    raise errors.UnsupportedCheckpointError(
        f"expected model_type {' or '.join(FAMILY.model_types)} for family 'phi', found {word!r:.80}; {what}"
    )


def build(config: phi.PhiConfig | phi3.Phi3Config) -> DecodeBackbone:
    """Spec -> backbone; the spec's class says which."""
    return phi3.Phi3Backbone(config) if isinstance(config, phi3.Phi3Config) else phi.PhiBackbone(config)


# Each architecture has names of its own: the same word in a file stands for another matrix.
GGUF_NAMES: Any = {"phi2": phi.GGUF_NAMES, "phi3": phi3.GGUF_NAMES}

FAMILY = Family(
    name="phi",
    model_types=(*phi.MODEL_TYPES, *phi3.MODEL_TYPES),
    gguf_architectures=(*phi.GGUF_ARCHITECTURES, *phi3.GGUF_ARCHITECTURES),
    resolve_config=resolve_config,
    build=build,
    gguf_names=GGUF_NAMES,
)
