"""The reference pages say what the code is: names, signatures, fields, messages, links, and examples that run.

`doc_checks` has the comparisons; each is seen to complain here about a page that lacks something.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from doc_checks import (
    anchors,
    block_complaints,
    blocks,
    call_complaints,
    command_complaints,
    dead_links,
    documented_calls,
    first_column,
    list_complaints,
    matches,
    parse,
    place_complaints,
    public_calls,
    public_properties,
    sections,
    signature,
    slug,
)
from plugin_site import Site
from toy_family import TURNS, install_toy_family, write_toy_checkpoint

import fuel_core
from fuel_core import cli, errors, layers
from fuel_core.checkpoint import LoadReport, RopeParameters
from fuel_core.cli.app import command
from fuel_core.families import FamilyHooks
from fuel_core.generation import FinishReason, GeneratedToken, TokenLogprob
from fuel_core.llm import TextPiece, TextStream, Usage

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *PAGES,
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
WITH_EXAMPLES = [ROOT / "README.md", *PAGES]

HOOKS_WITH_A_DEFAULT = ("decode_config", "decode_bound_fields", "tied_weights")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _page(name: str) -> str:
    return (DOCS / name).read_text()


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


# -- hooks, layers, config ---------------------------------------------------------------------------------------------


def _hooks() -> dict[str, Callable[..., Any]]:
    backbone = fuel_core.DecodeBackbone
    names = [*backbone.__abstractmethods__, *HOOKS_WITH_A_DEFAULT]
    return {name: getattr(backbone, name) for name in names} | {"register_families": FamilyHooks.register_families}


def _calls_of_hooks_page() -> dict[str, Callable[..., Any]]:
    calls = _hooks()
    backbone = public_calls(fuel_core.DecodeBackbone)
    del backbone["DecodeBackbone"]
    calls |= {name: call for name, call in backbone.items() if name.partition(".")[2] not in calls}
    for cls in (fuel_core.KeyValue, fuel_core.Slots, fuel_core.StateSlot):
        calls |= public_calls(cls)
    for plan in (fuel_core.MaskPlan, fuel_core.RopePlan, fuel_core.RopeVariant):
        calls |= public_calls(plan)
    calls["DecodeDims.of"] = fuel_core.DecodeDims.of
    calls["DecodeLayerInputs.slot"] = fuel_core.DecodeLayerInputs.slot
    return calls


def test_every_hook_and_what_authors_build_is_in_the_hooks_page_with_its_signature() -> None:
    classes = ("DecodeBackbone", "KeyValue", "Slots", "StateSlot", "MaskPlan", "RopePlan", "RopeVariant", "DecodeDims")
    expected = _calls_of_hooks_page()
    assert {"decode_apply_layer", "register_families", "DecodeBackbone.reconfigure"} <= set(expected)
    assert call_complaints(_page("hooks.md"), expected, exhaustive=(*classes, "DecodeLayerInputs")) == []
    documented = [name for name in documented_calls(_page("hooks.md")) if "." not in name and name[0].islower()]
    assert list_complaints("hooks", documented, _hooks()) == []


def test_required_hooks_and_hooks_with_a_default_are_told_apart() -> None:
    text = _page("hooks.md")
    required = text[text.index("### Required hooks") : text.index("### Hooks with a default")]
    backbone = fuel_core.DecodeBackbone
    assert list_complaints("required", _hook_headings(required), backbone.__abstractmethods__) == []
    rest = text[text.index("### Hooks with a default") : text.index("## What comes with the base class")]
    assert list_complaints("with a default", _hook_headings(rest), HOOKS_WITH_A_DEFAULT) == []
    assert all(not getattr(getattr(backbone, name), "__isabstractmethod__", False) for name in HOOKS_WITH_A_DEFAULT)


def _hook_headings(text: str) -> list[str]:
    return [name for name in sections(text) if name[0].islower()]


@pytest.mark.parametrize(
    ("page", "cls"),
    [
        ("hooks.md", fuel_core.Family),
        ("hooks.md", fuel_core.DecodeLayerInputs),
        ("hooks.md", fuel_core.DecodeDims),
        ("config.md", RopeParameters),
        ("stats.md", fuel_core.DecodeStats),
        ("stats.md", fuel_core.Completion),
        ("stats.md", Usage),
        ("stats.md", TextPiece),
        ("stats.md", GeneratedToken),
        ("stats.md", TokenLogprob),
        ("stats.md", fuel_core.PlanEvent),
        ("stats.md", LoadReport),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_field_of_a_record_is_documented_and_no_other(page: str, cls: Any) -> None:
    calls = tuple(documented_calls(_page(page)))
    shown = [name for name in first_column(sections(_page(page))[cls.__name__]) if name.partition("(")[0] not in calls]
    assert list_complaints(cls.__name__, shown, [*_fields(cls), *_read_only(cls)]) == []


def _read_only(cls: type) -> list[str]:
    return public_properties(cls) if cls not in (fuel_core.DecodeLayerInputs,) else []


def test_the_fields_of_a_spec_are_documented_with_their_defaults() -> None:
    (section,) = [s for name, s in sections(_page("config.md"), 2).items() if name == "DecoderConfig"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? *\|", section, re.MULTILINE))
    real = {
        f.name: "" if f.default is f.default_factory is dataclasses.MISSING else repr(f.default)
        for f in dataclasses.fields(fuel_core.DecoderConfig)
    }
    real["sources"] = "{}"
    assert rows == real


def test_defaults_in_field_tables_are_the_real_ones() -> None:
    for page, cls in (("hooks.md", fuel_core.Family), ("hooks.md", fuel_core.DecodeDims), ("config.md", RopeParameters)):
        rows = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? *\|", sections(_page(page))[cls.__name__], re.MULTILINE))
        for field in dataclasses.fields(cls):
            real = "" if field.default is dataclasses.MISSING else repr(field.default)
            if field.default_factory is not dataclasses.MISSING:
                real = "{}"
            assert rows[field.name] == real, f"{page}: {cls.__name__}.{field.name}"


def test_properties_of_a_backbone_are_documented() -> None:
    shown = [name for name in first_column(_page("hooks.md")) if re.fullmatch(r"DecodeBackbone\.\w+", name)]
    assert list_complaints("DecodeBackbone", shown, [
        f"DecodeBackbone.{name}" for name in public_properties(fuel_core.PersistentDecodeModel)
    ]) == []  # fmt: skip


def test_every_name_of_layers_is_documented_with_its_signature() -> None:
    text = _page("layers.md")
    expected = {name: getattr(layers, name) for name in layers.__all__}
    assert call_complaints(text, expected) == []
    assert list_complaints("layers", list(sections(text)), layers.__all__) == []


def test_reader_and_raw_config_are_documented_with_their_signatures() -> None:
    expected = public_calls(fuel_core.ConfigReader) | public_calls(fuel_core.RawConfig)
    expected["RopeParameters.rotary_width"] = RopeParameters.rotary_width
    prefixes = ("ConfigReader", "RawConfig", "RopeParameters")
    assert call_complaints(_page("config.md"), expected, exhaustive=prefixes) == []
    shown = [name for name in first_column(_page("config.md")) if re.fullmatch(r"RawConfig\.\w+", name)]
    properties = [f"RawConfig.{name}" for name in public_properties(fuel_core.RawConfig)]
    assert list_complaints("RawConfig", shown, properties) == []
