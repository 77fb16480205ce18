"""What a family plugin builds on, as data, and which changes of it keep the promise of docs/compatibility.md.

    python tests/family_api.py      record the surface of this checkout in tests/family_api_vN.json

Recorded at a release, or where a new number is begun: the promise is about what was released. Three kinds of things are
told apart by who depends on whom: what a plugin implements (hooks: the core calls them), what it calls (functions and
constructors) and what it reads (fields).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fuel_core
from fuel_core import layers
from fuel_core.families import FAMILY_API, FamilyHooks

SNAPSHOT = Path(__file__).resolve().parent / f"family_api_v{FAMILY_API}.json"

# Names of fuel_core whose calls and fields matter to a family; of the others only their being there.
_OF_A_FAMILY = (
    "ConfigReader", "DecodeDims", "DecoderConfig", "Family", "KeyValue", "MaskPlan", "RawConfig", "RopeParameters",
    "RopePlan", "RopeVariant", "Slots", "StateSlot",
)  # fmt: skip
_READ = ("DecodeDims", "DecodeLayerInputs", "DecoderConfig", "Family", "RopeParameters")
_HOOKS_WITH_DEFAULTS = ("decode_config", "decode_bound_fields", "tied_weights")

Parameter = list[Any]
"""[name, kind, default as text or None]"""


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    return [
        [p.name, p.kind.name.lower(), None if p.default is p.empty else _text(p.default)]
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


def _text(default: Any) -> str:
    # The representation of a function or a factory holds an address.
    return "..." if callable(default) or " at 0x" in repr(default) or "factory" in repr(default) else repr(default)


def _public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") or not (inspect.isfunction(member) or inspect.ismethod(member)):
            continue
        if (getattr(member, "__module__", "") or "").startswith("fuel_core"):
            yield name, member


def surface() -> dict[str, Any]:
    """The surface of this checkout, JSON-ready."""
    backbone = fuel_core.DecodeBackbone
    hooks = sorted({*backbone.__abstractmethods__, *_HOOKS_WITH_DEFAULTS})
    calls: dict[str, list[Parameter]] = {}
    for name in layers.__all__:
        calls[f"layers.{name}"] = _parameters(getattr(layers, name))
    for name in _OF_A_FAMILY:
        cls = getattr(fuel_core, name)
        calls[name] = _parameters(cls)
        calls |= {f"{name}.{method}": _parameters(member) for method, member in _public_methods(cls)}
    for name, member in _public_methods(backbone):
        if name not in hooks:
            calls[f"DecodeBackbone.{name}"] = _parameters(member)
    inputs = fuel_core.DecodeLayerInputs
    calls["DecodeLayerInputs.slot"] = _parameters(inputs.slot)
    return {
        "family_api": FAMILY_API,
        "names": {
            module: sorted(importlib.import_module(module).__all__)
            for module in ("fuel_core", "fuel_core.layers", "fuel_core.errors")
        },
        "plugin_hooks": {"register_families": [p[0] for p in _parameters(FamilyHooks.register_families)]},
        "hooks": {name: _parameters(getattr(backbone, name)) for name in hooks},
        "required_hooks": sorted(backbone.__abstractmethods__),
        "calls": dict(sorted(calls.items())),
        "fields": {name: [_field(f) for f in dataclasses.fields(getattr(fuel_core, name))] for name in _READ},
        "properties": {"DecodeLayerInputs": [n for n, m in vars(inputs).items() if isinstance(m, property)]},
    }


def _field(field: dataclasses.Field[Any]) -> Parameter:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    default = None if not has_default else "..." if field.default is dataclasses.MISSING else _text(field.default)
    return [field.name, "keyword_only" if field.kw_only else "positional_or_keyword", default]


def complaints(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Changes from `was` to `now` that a plugin written for `was` could notice, one line each."""
    found: list[str] = []
    for module, names in was["names"].items():
        found += [f"{module}.{name} is gone" for name in names if name not in now["names"].get(module, ())]
    for hook, arguments in was["plugin_hooks"].items():
        gone = [a for a in arguments if a not in now["plugin_hooks"].get(hook, ())]
        found += [f"hook {hook}: argument {argument!r} is gone" for argument in gone]
    for hook, parameters in was["hooks"].items():
        if now["hooks"].get(hook) != parameters:
            found.append(f"hook {hook}: the core would call it otherwise than before; add another hook with a default")
    found += [
        f"hook {hook}: required, but plugins that are out do not have it; give it a default"
        for hook in now["required_hooks"]
        if hook not in was["required_hooks"]
    ]
    for name, parameters in was["calls"].items():
        if name not in now["calls"]:
            found.append(f"{name} is gone")
        else:
            only_keywords = name.startswith("layers.") or name == "DecodeLayerInputs.slot"
            found += _call_complaints(name, parameters, now["calls"][name], only_keywords=only_keywords)
    for name, fields in was["fields"].items():
        only_keywords = name == "DecodeLayerInputs"
        found += _call_complaints(f"{name} (fields)", fields, now["fields"].get(name, []), only_keywords=only_keywords)
    for name, properties in was["properties"].items():
        found += [f"{name}.{p} is gone" for p in properties if p not in now["properties"].get(name, ())]
    return found


def _call_complaints(name: str, was: list[Parameter], now: list[Parameter], *, only_keywords: bool) -> Iterator[str]:
    """What a caller written for `was` would notice. New parameters need a default and come last, or by keyword only."""
    position = {parameter[0]: i for i, parameter in enumerate(now)}
    for i, (parameter, kind, default) in enumerate(was):
        if parameter not in position:
            yield f"{name}: {parameter!r} is gone"
            continue
        _, kind_now, default_now = now[position[parameter]]
        if kind != kind_now:
            yield f"{name}: {parameter!r} is {kind_now}, was {kind}"
        if default is not None and default_now != default:
            yield f"{name}: {parameter!r} has default {default_now}, was {default}"
        if kind.startswith("positional") and position[parameter] != i:
            yield f"{name}: {parameter!r} stands elsewhere than before"
    known = {parameter[0] for parameter in was}
    for parameter, kind, default in now:
        if parameter in known or kind.startswith("var_"):
            continue
        if default is None:
            yield f"{name}: new {parameter!r} has no default"
        elif only_keywords and kind != "keyword_only":
            yield f"{name}: new {parameter!r} must be keyword-only"


def main() -> None:
    SNAPSHOT.write_text(json.dumps(surface(), indent=1) + "\n")
    print(f"{SNAPSHOT.name}: recorded")


if __name__ == "__main__":
    main()
