"""The promise to family authors: within one number, what was released stays. docs/compatibility.md says it in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from family_api import SNAPSHOT, complaints, surface

from fuel_core.families import FAMILY_API

Surface = dict[str, Any]


def test_surface_keeps_what_was_recorded_for_this_number() -> None:
    recorded = json.loads(SNAPSHOT.read_text())
    assert recorded["family_api"] == FAMILY_API
    found = complaints(recorded, surface())
    assert found == [], "\n".join([*found, "either undo this, or raise FAMILY_API (docs/compatibility.md)"])


def test_recorded_surface_covers_hooks_inputs_and_layers() -> None:
    recorded = json.loads(SNAPSHOT.read_text())
    assert {"decode_apply_layer", "decode_rope_plan", "layer_state_specs"} <= set(recorded["required_hooks"])
    assert ["layer_idx", "positional_or_keyword", None] in recorded["hooks"]["decode_apply_layer"]
    assert [f[0] for f in recorded["fields"]["DecodeLayerInputs"]][:4] == ["h", "cos", "sin", "mask"]
    assert recorded["calls"]["layers.attend"][-1] == ["softcap", "positional_or_keyword", "None"]
    assert {f"layers.{name}" for name in recorded["names"]["fuel_core.layers"]} <= set(recorded["calls"])


def _edit(change: Callable[[Surface], object]) -> list[str]:
    was = surface()
    now = copy.deepcopy(was)
    change(now)
    return complaints(was, now)


BREAKS: dict[str, tuple[Callable[[Surface], object], str]] = {
    "a name goes": (lambda s: s["names"]["fuel_core"].remove("KeyValue"), "fuel_core.KeyValue is gone"),
    "an error goes": (lambda s: s["names"]["fuel_core.errors"].remove("ConfigError"), "ConfigError is gone"),
    "a hook goes": (lambda s: s["hooks"].pop("tied_weights"), "hook tied_weights"),
    "a hook gains an argument": (
        lambda s: s["hooks"]["decode_apply_layer"].append(["more", "keyword_only", "None"]),
        "hook decode_apply_layer: the core would call it otherwise",
    ),
    "a hook becomes required": (lambda s: s["required_hooks"].append("tied_weights"), "give it a default"),
    "the plugin hook loses its argument": (
        lambda s: s["plugin_hooks"]["register_families"].clear(),
        "argument 'register' is gone",
    ),
    "a layer function goes": (lambda s: s["calls"].pop("layers.attend"), "layers.attend is gone"),
    "a parameter goes": (lambda s: s["calls"]["layers.attend"].pop(), "layers.attend: 'softcap' is gone"),
    "a parameter is renamed": (
        lambda s: s["calls"]["layers.attend"][1].__setitem__(0, "query"),
        "layers.attend: 'q' is gone",
    ),
    "parameters swap": (lambda s: s["calls"]["layers.rotate"].reverse(), "stands elsewhere than before"),
    "a parameter becomes keyword-only": (
        lambda s: s["calls"]["layers.attend"][-1].__setitem__(1, "keyword_only"),
        "is keyword_only, was positional_or_keyword",
    ),
    "a default goes": (lambda s: s["calls"]["layers.attend"][-1].__setitem__(2, None), "has default None, was None"),
    "a default changes": (lambda s: s["calls"]["layers.attend"][-1].__setitem__(2, "50.0"), "has default 50.0"),
    "a required parameter comes": (
        lambda s: s["calls"]["layers.attend"].append(["sink", "keyword_only", None]),
        "new 'sink' has no default",
    ),
    "a positional parameter comes": (
        lambda s: s["calls"]["layers.attend"].append(["sink", "positional_or_keyword", "None"]),
        "new 'sink' must be keyword-only",
    ),
    "a parameter comes first": (
        lambda s: s["calls"]["KeyValue"].insert(0, ["kind", "positional_or_keyword", "'kv'"]),
        "KeyValue: 'n_kv_heads' stands elsewhere",
    ),
    "a field goes": (lambda s: s["fields"]["DecodeLayerInputs"].pop(3), "DecodeLayerInputs (fields): 'mask' is gone"),
    "a field without default comes": (
        lambda s: s["fields"]["DecodeLayerInputs"].append(["slopes", "keyword_only", None]),
        "new 'slopes' has no default",
    ),
    "a positional field comes": (
        lambda s: s["fields"]["DecodeLayerInputs"].append(["slopes", "positional_or_keyword", "None"]),
        "new 'slopes' must be keyword-only",
    ),
    "a property goes": (lambda s: s["properties"]["DecodeLayerInputs"].clear(), "DecodeLayerInputs.seq_len is gone"),
}


@pytest.mark.parametrize("change", BREAKS)
def test_change_that_a_plugin_would_notice_is_found(change: str) -> None:
    edit, expected = BREAKS[change]
    assert any(expected in line for line in _edit(edit)), _edit(edit)


KEEPS: dict[str, Callable[[Surface], object]] = {
    "nothing changes": lambda s: None,
    "a name comes": lambda s: s["names"]["fuel_core"].append("Zebra"),
    "a hook with a default comes": lambda s: s["hooks"].update(decode_more=[]),
    "a hook gets a default": lambda s: s["required_hooks"].remove("decode_rope_plan"),
    "the plugin hook gains an argument": lambda s: s["plugin_hooks"]["register_families"].append("core"),
    "a layer function comes": lambda s: s["calls"].update({"layers.mix": []}),
    "a keyword comes": lambda s: s["calls"]["layers.attend"].append(["sink", "keyword_only", "None"]),
    "a parameter gets a default": lambda s: s["calls"]["layers.attend"][2].__setitem__(2, "1.0"),
    "a constructor gains a last parameter with default": lambda s: s["calls"]["KeyValue"].append(
        ["kind", "positional_or_keyword", "'kv'"]
    ),
    "a keyword field comes": lambda s: s["fields"]["DecodeLayerInputs"].append(["slopes", "keyword_only", "None"]),
    "a property comes": lambda s: s["properties"]["DecodeLayerInputs"].append("batch"),
}


@pytest.mark.parametrize("change", KEEPS)
def test_change_that_no_plugin_can_notice_is_allowed(change: str) -> None:
    assert _edit(KEEPS[change]) == []
