"""What a family plugin hands to the core: one `Family` per set of architectures, through one hook.

Knows nothing of packages, entry points or imports (`discovery` does), and names no family.

A plugin module looks like this:

    from fuel_core import Family, hookimpl

    @hookimpl
    def register_families(register):
        from .model import FAMILY     # imported on demand: the module itself stays light
        register(FAMILY)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from fuel_core.errors import FamilyBrokenError

if TYPE_CHECKING:
    from fuel_core.backbone import DecodeBackbone
    from fuel_core.checkpoint import RawConfig

__all__ = ["FAMILY_API", "HOOK_NAMESPACE", "Family", "FamilyHooks", "hookimpl"]

FAMILY_API = 1
"""Number of the contract between core and plugins: `Family`, the hook and what `DecodeBackbone` asks for.

It is raised when a plugin written for the old contract would break or, worse, be silently wrong; it has nothing to do
with release numbers. A plugin states it as the last part of its entry-point group, `fuel_core.families.v1`.
"""

HOOK_NAMESPACE = "fuel_core"

hookspec = pluggy.HookspecMarker(HOOK_NAMESPACE)
hookimpl = pluggy.HookimplMarker(HOOK_NAMESPACE)
"""Marks a plugin's implementation of a hook."""


def _no_defaults() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """A set of architectures that one plugin knows how to build.

    - `name`: the family, as in the plugin's `fuel_core.families.v1` entry point.
    - `model_types`: the `model_type` strings of `config.json` it serves, matched exactly.
    - `gguf_architectures`: the `general.architecture` strings of GGUF files it serves, matched exactly.
    - `resolve_config(raw)`: a raw config (Hugging Face spelling) -> the frozen spec that `build` takes, a dataclass
      extending `DecoderConfig`. Refuses by name what it does not support.
    - `build(config)`: the backbone. Called under `torch.device("meta")`: it allocates and initialises nothing.
    - `tensor_names`: checkpoint tensor name -> parameter name, a mapping (names it lacks are kept) or a function. A
      result of None skips that tensor (stored buffers that are no parameters). None: the names agree.
    - `gguf_names`: GGUF tensor name pattern -> checkpoint tensor name, where the gguf package's map differs.
    - `defaults`: values of config keys that published checkpoints of this family leave out.

    Raises FamilyBrokenError where a field cannot be what it says.
    """

    name: str
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    resolve_config: Callable[[RawConfig], Any]
    build: Callable[[Any], DecodeBackbone]
    tensor_names: Callable[[str], str | None] | Mapping[str, str | None] | None = None
    gguf_names: Mapping[str, str | Mapping[str, str | None] | None] | None = None
    defaults: Mapping[str, Any] = field(default_factory=_no_defaults)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise FamilyBrokenError(f"Family.name must be a non-empty string, found {self.name!r}; give it one")
        for label in ("model_types", "gguf_architectures"):
            words = getattr(self, label)
            # A bare string is a sequence of one-letter strings: the usual slip, and silent without this check.
            if not isinstance(words, tuple) or not all(isinstance(word, str) and word for word in words):
                raise FamilyBrokenError(
                    f"Family {self.name!r}: {label} must be a tuple of non-empty strings, found {words!r}; "
                    "write ('name',)"
                )
        if not self.model_types and not self.gguf_architectures:
            raise FamilyBrokenError(f"Family {self.name!r} serves no model_type and no GGUF architecture; name one")
        for label in ("resolve_config", "build"):
            value = getattr(self, label)
            if not callable(value):
                raise FamilyBrokenError(
                    f"Family {self.name!r}: {label} must be callable, found {value!r}; pass a function"
                )


class FamilyHooks:
    """The hooks a plugin may implement; pluggy checks names and arguments against these."""

    @hookspec
    def register_families(self, register: Callable[[Family], None]) -> None:
        """Call `register(family)` once for every `Family` of this plugin.

        Called once per process, when a checkpoint first needs the plugin.
        """
