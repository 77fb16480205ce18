"""Gives a family's `resolve_config` values that no key can have, at every key that it reads, and tells what comes out.

Which keys those are is found by watching it read, so that a key added to a family is covered as it is added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from fuel_core.checkpoint import RawConfig
from fuel_core.errors import CheckpointError, ConfigError
from fuel_core.families import Family

__all__ = ["VALUES", "complaints", "hostile_configs", "keys_read"]

VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    1,
    -1,
    0.5,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    2**31,
    2**61,
    2**64,
    10**400,
    "",
    "7",
    "7" * 5000,
    "banana\n",
    [],
    ["7"],
    [None],
    [10**400],
    {},
    {"": 1},
    {"a": {"b": 7}},
)
"""Of another type, not finite, of the wrong sign, zero, beyond any range, text that looks like a number, too long."""
_LONGEST: Final = 1000


class _Watched(dict[str, Any]):
    """A mapping that notes which keys are asked for."""

    def __init__(self, values: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


class _WatchedConfig(RawConfig):
    """A raw config that notes which keys are asked for, of itself and of what is made of it."""

    def __init__(self, raw: RawConfig, seen: set[str]) -> None:
        super().__init__(
            dict(raw),
            {key: raw.source(key) for key in raw},
            format=raw.format,
            gguf_architecture=raw.gguf_architecture,
            nested_model_type=raw.nested_model_type,
        )
        self._values: dict[str, Any] = _Watched(self._values, seen)
        self._seen = seen

    def with_values(self, values: Mapping[str, Any], source: str) -> RawConfig:
        return _WatchedConfig(super().with_values(values, source), self._seen)


def keys_read(resolve: Callable[[RawConfig], object], raw: RawConfig) -> list[str]:
    """The keys that `resolve` asks `raw` for, there or not."""
    seen: set[str] = set()
    resolve(_WatchedConfig(raw, seen))
    return sorted(seen)


def hostile_configs(raw: RawConfig, key: str) -> Iterator[tuple[str, RawConfig]]:
    """(what was changed, the config) for every value at `key`, and below it where it holds an object or a list."""
    place = raw.source(key) if key in raw else "config.json"
    for value in VALUES:
        yield f"{key}: {value!r:.40}", raw.with_values({key: copy.deepcopy(value)}, place)
        inside = raw.get(key)
        if isinstance(inside, Mapping):
            for name in inside:
                yield f"{key}.{name}: {value!r:.40}", raw.with_values({key: {**inside, name: value}}, place)
        elif isinstance(inside, (list, tuple)) and inside:
            yield f"{key}[0]: {value!r:.40}", raw.with_values({key: [value, *inside[1:]]}, place)


def complaints(family: Family, raw: RawConfig, *, named: bool = True) -> Iterator[str]:
    """What goes wrong with hostile values at the keys that the family reads: anything but a spec that builds, or one of
    our errors, in one line. named: refusals have to name the key.
    """
    for key in keys_read(family.resolve_config, raw):
        for what, hostile in hostile_configs(raw, key):
            try:
                spec = family.resolve_config(hostile)
                hash(spec)
                with torch.device("meta"):
                    model = family.build(spec)
                model.decode_mask_plan(), model.decode_rope_plan(), model.decode_dims()
            except (ConfigError, CheckpointError) as error:
                text = str(error)
                # What a key that is not there means, and which family a model_type leads to, is no matter of its name.
                nameless = not named or what.endswith(": None") or key == "model_type"
                if "\n" in text or len(text) > _LONGEST:
                    yield f"{what} gives a message of {len(text)} characters in {len(text.splitlines())} lines"
                elif key not in text and not nameless:
                    yield f"{what} gives an error that does not name the key: {text}"
            except Exception as error:
                yield f"{what} gives {type(error).__name__}: {str(error)[:200]}"
