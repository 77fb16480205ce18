"""What this package hands to the core."""

from __future__ import annotations

from fuel_core import Family

from fuel_olmo.olmo import DEFAULTS, OlmoBackbone, resolve_config

FAMILY = Family(
    name="olmo",
    model_types=("olmo2",),
    gguf_architectures=("olmo2",),
    resolve_config=resolve_config,
    build=OlmoBackbone,
    defaults=DEFAULTS,
)
