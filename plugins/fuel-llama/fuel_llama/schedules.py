"""Per-layer schedules that configs of more than one architecture publish."""

from __future__ import annotations

from fuel_core import ConfigReader, errors

WINDOWED, DENSE = "sliding_attention", "full_attention"


def layer_types(reader: ConfigReader, n_layers: int, window: int | None) -> tuple[str, ...] | None:
    """``WINDOWED`` or ``DENSE`` for each layer, None where the config does not say.

    Raises ConfigError for another word, a list of another length, and a windowed layer without a width.
    """
    kinds = reader.list("layer_types", length=n_layers)
    for layer, kind in enumerate(kinds or ()):
        place = f"{reader.raw.source('layer_types')}: expected"
        if kind not in (WINDOWED, DENSE):
            raise errors.ConfigError(
                f"{place} layer_types[{layer}] to be {WINDOWED} or {DENSE}, found {kind!r:.80} for family "
                f"{reader.family!r}; correct the config"
            )
        if kind == WINDOWED and window is None:
            raise errors.ConfigError(
                f"{place} a sliding_window, since layer {layer} is {WINDOWED}, found none for family "
                f"{reader.family!r}; add the width"
            )
    return kinds
