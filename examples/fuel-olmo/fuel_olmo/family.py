"""What this package hands to the core."""

from __future__ import annotations

from fuel_core import Family

from fuel_olmo.olmo import (
    DEFAULTS,
    GGUF_ARCHITECTURES,
    MODEL_TYPES,
    OlmoBackbone,
    resolve_config,
)

FAMILY = Family(
    name="olmo",
    model_types=MODEL_TYPES,
    gguf_architectures=GGUF_ARCHITECTURES,
    resolve_config=resolve_config,
    build=OlmoBackbone,
    defaults=DEFAULTS,
)
