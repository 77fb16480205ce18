"""The reference pages say what the code is: names, signatures, fields, messages, links, and examples that run.

`doc_checks` has the comparisons; each is seen to complain here about a page that lacks something.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import shlex
import shutil
import sys
from collections.abc import Callable
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
    is_excerpt,
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
from test_errors import BASES, CASES, Ground
from toy_backbone import toy
from toy_family import TURNS, install_toy_family, write_toy_checkpoint

import fuel_core
from fuel_core import cli, errors, layers
from fuel_core.checkpoint import LoadReport, RopeParameters, published
from fuel_core.cli.app import command
from fuel_core.families import FamilyHooks
from fuel_core.generation import FinishReason, GeneratedToken, TokenLogprob
from fuel_core.llm import TextPiece, Usage
from fuel_core.native import build
from fuel_core.persistent_decode.session import SessionKey
from fuel_core.testing.registry import MANIFEST

ROOT = Path(__file__).resolve().parent.parent


def _is_ours(path: Path) -> bool:
    """Not in a folder that a tool made, such as `.pytest_cache`."""
    return not any(part.startswith(".") for part in path.relative_to(ROOT).parts)


DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *PAGES,
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.md") if _is_ours(path)),
]
WITH_EXAMPLES = [ROOT / "README.md", *PAGES]

# Files whose excerpts pages may show, because their own tests run them.
SOURCES = [
    p.read_text() for folder in ("examples", "plugins") for p in sorted((ROOT / folder).rglob("*.py")) if _is_ours(p)
]

HOOKS_WITH_A_DEFAULT = ("decode_config", "decode_bound_fields", "tied_weights")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _page(name: str) -> str:
    return (DOCS / name).read_text()


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


# -- hooks, layers, config --------------------------------------------------------------------------------------------


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
    for page, cls in (
        ("hooks.md", fuel_core.Family),
        ("hooks.md", fuel_core.DecodeDims),
        ("config.md", RopeParameters),
    ):
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


def test_translations_of_gguf_files_are_documented() -> None:
    section = sections(_page("config.md"))["Names in GGUF files"]
    assert dict(re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|$", section, re.MULTILINE)) == published.table("gguf_keys")
    spans = set(re.findall(r"`([^`\n]+)`", section))
    names = published.table("checkpoint_names")
    assert {*names["whole_model"], *names["per_block"], *published.permuted_architectures()} <= spans


# -- names, errors, statistics, keys ----------------------------------------------------------------------------------


def test_every_public_name_is_in_the_page_of_names_and_no_other() -> None:
    text = _page("python-api.md")
    tables = text[: text.index("## Calls")]
    assert list_complaints("fuel_core", first_column(tables), fuel_core.__all__) == []


def test_calls_in_the_page_of_names_have_their_signatures() -> None:
    text = _page("python-api.md")
    functions = [
        name for name in fuel_core.__all__
        if callable(getattr(fuel_core, name)) and name[0].islower() and name not in ("hookimpl", "layers", "errors")
    ]  # fmt: skip
    expected: dict[str, Callable[..., Any]] = {name: getattr(fuel_core, name) for name in functions}
    for cls in (fuel_core.LanguageModel, fuel_core.Conversation, fuel_core.Generation, fuel_core.ShapeKeyHasher):
        expected |= public_calls(cls)
    expected |= public_calls(fuel_core.ShapeKey)
    for name, call in public_calls(fuel_core.Checkpoint).items():
        if name != "Checkpoint":
            expected[name] = call
    prefixes = ("LanguageModel", "Conversation", "Generation", "ShapeKeyHasher", "ShapeKey", "Checkpoint")
    assert call_complaints(text, expected, exhaustive=prefixes) == []
    context = public_calls(fuel_core.InferenceContext)
    cache = {n: c for n, c in public_calls(fuel_core.KvCache).items() if n.partition(".")[2] not in _OF_A_STEP}
    for calls, prefix in ((context, "InferenceContext"), (cache, "KvCache")):
        shown = {name: signature(call) for name, call in calls.items() if name in documented_calls(text)}
        assert shown
        assert call_complaints(text, {name: calls[name] for name in shown}, exhaustive=[prefix]) == []
    assert set(cache) <= set(documented_calls(text))


_OF_A_STEP = ("check_room", "begin_step", "advance", "take_back", "abandon_step")


def test_properties_in_the_page_of_names_are_the_real_ones() -> None:
    text = _page("python-api.md")
    shown = [name for name in first_column(text) if re.fullmatch(r"LanguageModel\.\w+", name)]
    real = [f"LanguageModel.{name}" for name in public_properties(fuel_core.LanguageModel)]
    assert list_complaints("LanguageModel", shown, real) == []
    for cls in (fuel_core.Conversation, fuel_core.Generation, fuel_core.KvCache, fuel_core.Checkpoint):
        section = sections(text, 2)[cls.__name__]
        listed = re.search(r"^Properties: (.*?)\.(?: |$)", section, re.MULTILINE | re.DOTALL)
        assert listed is not None
        assert list_complaints(cls.__name__, re.findall(r"`(\w+)`", listed[1]), public_properties(cls)) == []
    for name in re.findall(r"`(\w+)`", sections(text, 2)["InferenceContext"].split("Attributes:")[1].split(".")[0]):
        assert hasattr(fuel_core.InferenceContext("cpu"), name)


def test_every_error_is_documented_with_what_it_is_a_kind_of() -> None:
    text = _page("errors.md")
    assert list_complaints("errors", list(sections(text)), errors.__all__) == []
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d) \|$", text, re.MULTILINE)
    assert sorted(rows) == sorted((name, getattr(errors, name).__base__.__name__, "2") for name in errors.__all__)


@pytest.mark.parametrize("name", sorted(errors.__all__))
def test_error_message_in_the_page_is_what_the_code_prints(
    name: str, tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = blocks(sections(_page("errors.md"))[name])
    kind = getattr(errors, name)
    case = next((case for case in CASES if case.raises is kind), None)
    if case is None:
        assert kind in BASES
        assert shown == []
        return
    install_toy_family(site)
    ground = Ground(write_toy_checkpoint(tmp_path / "toy"), site, monkeypatch)
    with pytest.raises(kind) as raised:
        case.when(ground)
    found = str(raised.value).replace(str(tmp_path), "PATH")
    (block,) = shown
    assert matches(block.text, found), found


def test_finish_reasons_are_documented() -> None:
    shown = first_column(sections(_page("stats.md"))["Finish reasons"])
    assert list_complaints("finish reasons", shown, get_args(FinishReason)) == []


def test_published_counters_are_fields_of_the_page() -> None:
    shown = first_column(sections(_page("stats.md"))["DecodeStats"])
    assert set(fuel_core.DecodeStats().as_dict()) <= set(shown)


AUTHORS_WORDS = {
    "D1", "D2", "activation dtype", "backbone", "baked", "bound", "bound field", "capability", "capacity", "checkpoint",
    "component", "context", "device-offset path", "disposition", "event", "family", "family API", "hand-over", "hook",
    "instance id", "alloc id", "model_type", "native code", "offset", "oracle", "packed", "plan", "plan backend",
    "re-point", "rebind", "recording", "regime", "replan", "rotated width", "sabotage", "session", "shape key", "slot",
    "source", "spec", "state spec", "structure", "structure key", "symbol path", "tied", "validity", "variant",
    "weight format", "weights epoch", "window", "window start",
}  # fmt: skip


def test_glossary_has_the_words_of_the_pages_and_no_word_twice() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", _page("glossary.md"), re.MULTILINE)
    assert len(words) == len(set(words))
    assert sorted(AUTHORS_WORDS - set(words)) == []
    others = " ".join(page.read_text() for page in PAGES if page.name != "glossary.md").lower()
    for word in words:
        spellings = (word, word.replace("-", ""), word.replace(" ", "_"), word.replace(" ", "."), word[:-1])
        assert any(spelling.lower() in others for spelling in spellings), f"no page uses {word!r}"


def test_components_of_both_keys_are_documented() -> None:
    section = sections(_page("decode-plans.md"), 2)["What is in the key"]
    first, second = section.split("The session's key")
    real = {re.sub(r"^(dims|config)\..*", r"\1.*", name) for name, _ in toy().decode_shape_key().components}
    assert list_complaints("shape key", first_column(first), real) == []
    assert list_complaints("session's key", first_column(second), _fields(SessionKey)) == []


# -- what pages name --------------------------------------------------------------------------------------------------


def test_places_named_on_the_way_of_a_request_exist() -> None:
    text = _page("how-a-request-flows.md")
    assert text.count("`fuel_core/") > 30
    assert place_complaints(ROOT, text) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_and_anchors_lead_somewhere(document: Path) -> None:
    assert dead_links(document, document.read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_commands_in_documents_exist(document: Path) -> None:
    top = command()
    options = {
        verb: {name for parameter in parsed.params for name in [*parameter.opts, *parameter.secondary_opts]}
        for verb, parsed in top.commands.items()
    }
    assert command_complaints(document.read_text(), options) == []


def test_checks_named_in_the_pages_exist() -> None:
    known = {f"{topic}.{name}" for topic, names in MANIFEST.items() for name in names}
    named = {span for page in PAGES for span in re.findall(rf"`((?:{'|'.join(MANIFEST)})\.[a-z_]+)`", page.read_text())}
    assert "contract.fixtures_can_see" in named
    assert named <= known


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (DOCS / "decisions" / "README.md").read_text())
    assert list_complaints("decisions", listed, [p.name for p in (DOCS / "decisions").glob("[0-9]*.md")]) == []


def test_every_page_is_in_the_index_and_in_the_navigation_of_the_site() -> None:
    pages = [str(page.relative_to(DOCS)) for page in PAGES if page.parent == DOCS and page.name != "README.md"]
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", _page("README.md")))
    assert list_complaints("docs/README.md", sorted(listed), pages) == []
    navigation = re.findall(r": *([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert list_complaints("mkdocs.yml", navigation, [str(page.relative_to(DOCS)) for page in PAGES]) == []


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=_name)
def test_python_runs_or_says_why_not(document: Path) -> None:
    assert block_complaints(document.read_text(), SOURCES) == []


def _cache_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No native code that another test had made, but the kernels, so that nothing starts a compiler."""
    library = build.shared_object()
    folder.mkdir(mode=0o700)
    if library is not None:
        shutil.copytree(library.parent, folder / library.parent.parent.name / library.parent.name)
    monkeypatch.setenv("FUEL_CACHE", str(folder))


_PLACES = re.compile(r"path/to/(?:checkpoint|model\.gguf)")


@pytest.mark.parametrize(
    "document",
    [page for page in WITH_EXAMPLES if any(b.language == "python" or b.mark for b in blocks(page.read_text()))],
    ids=_name,
)
def test_examples_run_and_print_what_is_shown(
    document: Path, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _cache_of_its_own(tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)
    install_toy_family(site)
    model = str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))
    namespace: dict[str, Any] = {"__name__": "document"}
    monkeypatch.setitem(sys.modules, "document", type(sys)("document"))  # dataclasses look their module up
    printed = ""
    for block in blocks(document.read_text()):
        where = f"{_name(document)}:{block.line}"
        if block.mark == "run":
            call, _, expected = block.text.partition("\n")
            arguments = shlex.split(call.removeprefix("$ fuel "))
            assert cli.main([model if word == "MODEL" else word for word in arguments]) == 0, where
            captured = capsys.readouterr()
            assert matches(expected, captured.out + captured.err), f"{where}:\n{captured.out}{captured.err}"
        elif block.mark == "output":
            assert matches(block.text, printed), f"{where}:\n{printed}"
        elif block.language == "python" and block.mark != "fragment" and not is_excerpt(block, SOURCES):
            code = parse(_PLACES.sub(model, block.text), block.line)
            result = eval(code, namespace)
            if inspect.iscoroutine(result):
                asyncio.run(result)
            printed = capsys.readouterr().out


# -- the comparisons themselves -------------------------------------------------------------------------------------

PAGE = """# Page

## A part

| call | is |
|---|---|
| `Thing.go(a, b=1)` | it goes |
| `Thing.gone()` | went |

### attend

`attend(inputs, q, scale, softcap=None)` attends.

| field | is |
|---|---|
| `x` | one |
"""


class Thing:
    def go(self, a: int, b: int = 1) -> None: ...


def test_a_call_that_is_missing_gone_or_has_another_signature_is_found() -> None:
    expected = {"Thing.go": Thing.go, "attend": layers.attend}
    assert call_complaints(PAGE.replace("| `Thing.gone()` | went |\n", ""), expected, exhaustive=["Thing"]) == []
    assert call_complaints(PAGE, expected, exhaustive=["Thing"]) == ["Thing.gone is documented and gone"]
    assert call_complaints(PAGE.replace("b=1", "b=2"), expected) == [
        "Thing.go: documented as (a, b=2), is (a, b=1)"
    ]  # fmt: skip
    assert call_complaints(PAGE.replace("### attend", "### other").replace("`attend(", "`other("), expected) == [
        "attend(inputs, q, scale, softcap=None) is not documented"
    ]
    assert "softcap" in call_complaints(PAGE.replace(", softcap=None", ""), expected)[0]


def test_a_name_that_is_missing_gone_or_there_twice_is_found() -> None:
    assert list_complaints("fields", first_column(sections(PAGE)["attend"]), ["x"]) == []
    assert list_complaints("f", ["x"], ["x", "y"]) == ["f: y is not documented"]
    assert list_complaints("f", ["x", "y"], ["x"]) == ["f: y is documented and gone"]
    assert list_complaints("f", ["x", "x"], ["x"]) == ["f: x is documented twice"]


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Other\n\n## What, exactly?\n\n## What, exactly?\n\n```\n# not a heading\n```\n")
    good = "[a](other.md#what-exactly) [b](other.md#what-exactly-1) [c](https://nowhere.example) [d](#here)\n# Here\n"
    assert dead_links(page, good) == []
    assert dead_links(page, "```python\nx[0](y)\n```\n") == []
    assert dead_links(page, "[a](none.md)") == ["none.md: no such file"]
    assert dead_links(page, "[a](other.md#not-a-heading)") == ["other.md#not-a-heading: no such heading"]
    assert dead_links(page, "[a](#there)") == ["#there: no such heading"]
    assert dead_links(page, "[a](other.md#what-exactly-2)") == ["other.md#what-exactly-2: no such heading"]


def test_python_that_does_not_parse_and_marks_without_a_reason_are_found() -> None:
    assert block_complaints("```python\nx = await y\n```\n") == []
    assert block_complaints("<!-- fragment: half a call -->\n```python\nf(\n```\n") == []
    assert "a fragment says why" in block_complaints("<!-- fragment -->\n```python\nf(\n```\n")[0]
    assert "mark a fragment" in block_complaints("```python\nf(\n```\n")[0]
    assert "unknown mark" in block_complaints("<!-- fragmet: half -->\n```python\nf()\n```\n")[0]
    assert "'python' expected" in block_complaints("```python3\nf()\n```\n")[0]
    source = "class A:\n    def f(self):\n        return 1\n"
    excerpt = blocks("```python\ndef f(self):\n    return 1\n```\n")[0]
    assert is_excerpt(excerpt, [source])
    assert not is_excerpt(excerpt, [source.replace("1", "2")])


def test_an_output_that_differs_is_found() -> None:
    assert matches("a\n...\nz 1\n", "a\nb\nc\nz 1")
    assert matches("alloc ... -> ...", "alloc 4 -> 9")
    assert not matches("a\n...\nz 1\n", "a\nb\nz 2")
    assert not matches("a\n", "a\nb\n")


def test_places_that_are_not_there_are_found() -> None:
    good = "`fuel_core/llm.py::LanguageModel.stream` and `fuel_core/errors.py`"
    assert place_complaints(ROOT, good) == []
    assert place_complaints(ROOT, "`fuel_core/llms.py`") == ["fuel_core/llms.py: no such file"]
    assert place_complaints(ROOT, "`fuel_core/llm.py::LanguageModel.flow`") == [
        "fuel_core/llm.py::LanguageModel.flow: fuel_core/llm.py defines no LanguageModel.flow"
    ]


def test_verbs_and_options_that_are_not_there_are_found() -> None:
    options = {"generate": {"--seed", "-n"}}
    assert command_complaints("`fuel generate MODEL --seed 1`\n```\n$ fuel generate M -n 4\n```\n", options) == []
    assert command_complaints("a fuel line and `fuel.load`", options) == []
    assert command_complaints("`fuel generat MODEL`", options) == ["'fuel generat MODEL': fuel has no verb 'generat'"]
    assert command_complaints("```\nprintf x | fuel generate M --sede 1\n```", options) == [
        "'printf x | fuel generate M --sede 1': fuel generate has no --sede"
    ]


def test_an_example_whose_output_is_wrong_fails_its_page(tmp_path: Path) -> None:
    page = "```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```text\n3\n```\n"
    code, output = blocks(page)
    assert (code.language, code.mark, output.mark) == ("python", None, "output")
    assert not matches(output.text, "2\n")
    assert output.line == 6


def test_anchors_are_those_that_github_makes() -> None:
    assert slug("`--explain-plan`, and what it *says*") == "--explain-plan-and-what-it-says"
    assert anchors("# A\n## A\n") == {"a", "a-1"}
