"""Which plugin serves a checkpoint, and what a bad one may not do to the others."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from plugin_site import GOOD_MODULE, Asked, Site, imported

from fuel_core.checkpoint import published
from fuel_core.discovery import Discovery, FamilyRecord, FamilyWarning, Status
from fuel_core.errors import FamilyBrokenError, FamilyConflictError, FamilyNotFoundError


def _record(discovery: Discovery, name: str, distribution: str | None = None) -> FamilyRecord:
    (record,) = [
        r for r in discovery.records() if r.name == name and (distribution is None or r.distribution == distribution)
    ]
    return record


def test_listing_reads_metadata_and_imports_nothing(site: Site) -> None:
    module = site.install("fuel-zebra", "2.1", family="zebra", model_types=("zebra", "okapi"), gguf=("zebra",))
    record = _record(Discovery(), "zebra")
    assert record.status is Status.NOT_LOADED
    assert record.package == "fuel-zebra 2.1"
    assert record.api == (1,)
    assert record.model_types == ("okapi", "zebra")
    assert record.gguf_architectures == ("zebra",)
    assert imported() == []
    assert module not in sys.modules


def test_listing_a_slow_plugin_never_waits_for_it(site: Site) -> None:
    # An import that takes seconds (torch, say) must not be paid for by a listing. Imports are counted,
    # not timed; were this module imported, the count would say so before the sleep.
    slow = GOOD_MODULE.format(name="slow", model_types=("slow",), gguf=()) + "\nimport time; time.sleep(5)\n"
    site.install("fuel-slow", family="slow", source=slow)
    site.install("fuel-quick", family="quick")
    discovery = Discovery()
    assert {"slow", "quick"} <= {r.name for r in discovery.records()}
    discovery.family_for(Asked("quick"))
    assert imported() == ["fuel_quick"]


def test_family_for_imports_the_one_plugin_needed_and_only_once(site: Site) -> None:
    site.install("fuel-zebra", family="zebra", model_types=("zebra", "okapi"))
    site.install("fuel-other", family="other")
    discovery = Discovery()
    family = discovery.family_for(Asked("okapi"))
    assert family.name == "zebra"
    assert discovery.family_for(Asked("zebra")) is family
    assert imported() == ["fuel_zebra"]
    assert _record(discovery, "zebra").status is Status.OK
    assert _record(discovery, "zebra").family is family
    assert _record(discovery, "other").status is Status.NOT_LOADED


def test_family_for_gguf_uses_the_architecture_and_not_the_model_type(site: Site) -> None:
    site.install("fuel-zebra", family="zebra", model_types=("zebra_hf",), gguf=("zebra_gg",))
    discovery = Discovery()
    assert discovery.family_for(Asked(gguf_architecture="zebra_gg")).name == "zebra"
    with pytest.raises(FamilyNotFoundError, match="GGUF architecture 'zebra_hf'"):
        discovery.family_for(Asked(gguf_architecture="zebra_hf"))
    with pytest.raises(FamilyNotFoundError, match="model_type 'zebra_gg'"):
        discovery.family_for(Asked("zebra_gg"))


@pytest.mark.parametrize("model_type", ["zebra3small", "zebr", "ZEBRA", "zebra "])
def test_family_for_matches_a_model_type_exactly_and_lists_what_is_installed(site: Site, model_type: str) -> None:
    site.install("fuel-zebra", "2.1", family="zebra")
    with pytest.raises(FamilyNotFoundError) as caught:
        Discovery().family_for(Asked(model_type))
    assert repr(model_type) in str(caught.value)
    assert "zebra (fuel-zebra 2.1) for zebra" in str(caught.value)
    assert "docs/families.md" in str(caught.value)


def test_family_that_is_published_and_not_installed_is_named_with_the_pip_line(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"fuel-okapi": {"model_types": ["okapi", "okapi_moe"], "gguf_architectures": ["okapi_gg"]}}
    monkeypatch.setattr(published, "table", {"families": known}.__getitem__)
    site.install("fuel-zebra", family="zebra")
    for asked in (Asked("okapi_moe"), Asked(gguf_architecture="okapi_gg")):
        with pytest.raises(FamilyNotFoundError, match=r"fuel-zebra 1\.0.*; fuel-okapi does: pip install fuel-okapi$"):
            Discovery().family_for(asked)
    for asked in (Asked("okapi_gg"), Asked(gguf_architecture="okapi"), Asked("quagga")):
        with pytest.raises(FamilyNotFoundError, match=r"Families are separate packages: see docs/families\.md$"):
            Discovery().family_for(asked)
    # An older release of it, which does not claim the name yet.
    site.install("fuel-okapi", "0.0.1", family="okapi")
    with pytest.raises(FamilyNotFoundError, match=r"fuel-okapi does: pip install --upgrade fuel-okapi$"):
        Discovery().family_for(Asked("okapi_moe"))


def test_family_for_without_a_model_type_says_what_is_missing(site: Site) -> None:
    with pytest.raises(FamilyNotFoundError, match="states no model_type"):
        Discovery().family_for(Asked(None))


BROKEN_SOURCES = {
    "ImportError": "import a_module_that_does_not_exist_zz",
    "SyntaxError": "def register_families(:\n",
    "SystemExit": "import sys\nsys.exit(3)",
    "ZeroDivisionError": "1 / 0",
}


@pytest.mark.parametrize("kind", BROKEN_SOURCES)
def test_broken_plugin_is_a_record_and_leaves_the_others_working(site: Site, kind: str) -> None:
    site.install("fuel-bad", "0.3", family="bad", source=BROKEN_SOURCES[kind])
    site.install("fuel-good", family="good")
    discovery = Discovery()
    shown = "ModuleNotFoundError" if kind == "ImportError" else kind
    with pytest.raises(FamilyBrokenError) as caught:
        discovery.family_for(Asked("bad"))
    assert "fuel-bad 0.3" in str(caught.value)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)
    record = _record(discovery, "bad")
    assert record.status is Status.BROKEN
    assert record.traceback is not None
    assert shown in record.traceback
    assert "fuel_bad" not in sys.modules
    assert discovery.family_for(Asked("good")).name == "good"


def test_load_all_skips_each_broken_plugin_with_one_warning_and_strict_raises(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One warning, naming distribution, version and error.
    monkeypatch.setenv("FUEL_FAMILIES", "bad,good")  # families installed beside the tests stay out
    site.install("fuel-bad", "0.3", family="bad", source=BROKEN_SOURCES["SystemExit"])
    site.install("fuel-good", family="good")
    with pytest.warns(FamilyWarning) as caught:
        records = Discovery().load_all()
    assert [str(w.message) for w in caught] == [
        "family plugin fuel-bad 0.3 was skipped: fuel_bad failed with SystemExit: 3"
    ]
    assert {r.name: r.status for r in records}["good"] is Status.OK
    with pytest.raises(FamilyBrokenError, match=r"fuel-bad 0\.3 .*SystemExit"):
        Discovery().load_all(strict=True)


def test_keyboard_interrupt_during_import_passes_through_and_undoes_it(site: Site) -> None:
    source = "import sys\nraise KeyboardInterrupt if not hasattr(sys, '_fuel_retry') else SystemError\n"
    site.install("fuel-zebra", family="zebra", source=source)
    discovery = Discovery()
    with pytest.raises(KeyboardInterrupt):
        discovery.family_for(Asked("zebra"))
    assert "fuel_zebra" not in sys.modules
    assert _record(discovery, "zebra").status is Status.NOT_LOADED


HOOK = "from fuel_core.families import Family, hookimpl\n"
BAD_HOOKS = {
    "no hook at all": ("x = 1", "registers no family"),
    "a misspelt hook": (HOOK + "@hookimpl\ndef register_familes(register): pass", "unknown hook 'register_familes'"),
    "a wrong argument": (HOOK + "@hookimpl\ndef register_families(registry): pass", "registry"),
    "not a Family": (HOOK + "@hookimpl\ndef register_families(register): register('zebra')", "found str"),
    "twice the same": (
        HOOK + "@hookimpl\ndef register_families(register):\n    for _ in 'ab':\n"
        "        register(Family('zebra', ('zebra',), (), dict, dict))",
        "registered twice",
    ),
    "raises in the hook": (HOOK + "@hookimpl\ndef register_families(register): {}['gone']", "KeyError"),
}


@pytest.mark.parametrize("case", BAD_HOOKS)
def test_plugin_whose_hook_is_wrong_is_broken_and_rolled_back(site: Site, case: str) -> None:
    source, expected = BAD_HOOKS[case]
    site.install("fuel-zebra", family="zebra", source=source)
    site.install("fuel-good", family="good")
    discovery = Discovery()
    with pytest.raises(FamilyBrokenError, match="fuel-zebra") as caught:
        discovery.family_for(Asked("zebra"))
    assert expected in str(caught.value)
    assert "fuel_zebra" not in sys.modules
    # A half-registered plugin would fail the next plugin's verification, or be called again with it.
    assert discovery.family_for(Asked("good")).name == "good"


def test_failed_submodules_are_forgotten_and_foreign_modules_are_kept(site: Site) -> None:
    (site.folder / "fuel_zebra").mkdir()
    (site.folder / "fuel_zebra" / "__init__.py").write_text("import zebra_dependency, fuel_zebra.inner\n1 / 0\n")
    (site.folder / "fuel_zebra" / "inner.py").write_text("")
    (site.folder / "zebra_dependency.py").write_text("")
    site.install("fuel-zebra", family="zebra", module="unused", groups=_groups("zebra", "fuel_zebra"))
    with pytest.raises(FamilyBrokenError):
        Discovery().family_for(Asked("zebra"))
    assert not [name for name in sys.modules if name.partition(".")[0] == "fuel_zebra"]
    assert "zebra_dependency" in sys.modules


def _groups(family: str, module: str, group: str = "fuel_core.families.v1") -> dict[str, dict[str, str]]:
    return {group: {family: module}, "fuel_core.model_types": {family: module}}


def test_metadata_and_code_that_disagree_are_an_error_naming_both(site: Site) -> None:
    source = GOOD_MODULE.format(name="zebra", model_types=("zebra",), gguf=())
    site.install("fuel-zebra", family="zebra", model_types=("zebra", "okapi"), source=source)
    with pytest.raises(FamilyBrokenError, match=r"publishes model_type 'okapi' .* serves zebra"):
        Discovery().family_for(Asked("okapi"))


def test_two_distributions_with_one_model_type_conflict_whatever_the_order_on_disk(site: Site, tmp_path: Path) -> None:
    # Never decided by which folder comes first.
    site.install("fuel-zebra", "1.2", family="zebra")
    site.install("acme-zebra", "0.9", family="zebra", folder=tmp_path / "second")
    for order in (1, -1):
        sys.path[:0] = [str(site.folder), str(tmp_path / "second")][::order]
        try:
            with pytest.raises(FamilyConflictError) as caught:
                Discovery().family_for(Asked("zebra"))
            message = str(caught.value)
            for part in ("fuel-zebra 1.2", "acme-zebra 0.9", "load(family=", "--family", "FUEL_PREFER="):
                assert part in message
            assert [r.status for r in Discovery().records() if r.name == "zebra"] == [Status.DUPLICATE] * 2
        finally:
            del sys.path[:2]
    assert imported() == []


def test_every_setting_that_the_conflict_message_names_resolves_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("acme-zebra", family="zebra")

    def module_for(prefer: str | None = None) -> str:
        before = len(imported())
        Discovery().family_for(Asked("zebra"), prefer)
        (name,) = imported()[before:] or ["already imported"]
        sys.modules.pop(name, None)
        return name

    assert module_for("acme-zebra") == "acme_zebra"
    assert module_for("Acme_Zebra") == "acme_zebra"  # names compare as package indexes compare them
    assert module_for("fuel-zebra") == "fuel_zebra"
    monkeypatch.setenv("FUEL_PREFER", "other=x, zebra=acme-zebra")
    assert module_for() == "acme_zebra"
    assert module_for("fuel-zebra") == "fuel_zebra"  # the call is closer than the environment
    statuses = {r.distribution: r.status for r in Discovery().records() if r.name == "zebra"}
    assert statuses == {"acme-zebra": Status.NOT_LOADED, "fuel-zebra": Status.DUPLICATE}
    monkeypatch.setenv("FUEL_PREFER", "zebra=not-installed")
    with pytest.raises(FamilyConflictError):
        module_for()


def test_conflict_over_a_model_type_between_two_families_is_settled_by_family_name(site: Site) -> None:
    site.install("fuel-zebra", family="zebra", model_types=("zebra", "okapi"))
    site.install("fuel-okapi", family="okapi")
    discovery = Discovery()
    with pytest.raises(FamilyConflictError, match="'okapi'"):
        discovery.family_for(Asked("okapi"))
    assert "'okapi' (fuel-okapi 1.0)" in _record(discovery, "zebra").detail
    assert discovery.family_for(Asked("okapi"), "zebra").name == "zebra"
    assert discovery.family_for(Asked("okapi"), "okapi").name == "okapi"
    assert discovery.family_for(Asked("zebra")).name == "zebra"


def test_conflict_between_distributions_that_install_the_same_module_cannot_be_chosen_away(site: Site) -> None:
    site.install("fuel-zebra", family="zebra", module="zebra_plugin")
    site.install("acme-zebra", family="zebra", module="zebra_plugin")
    with pytest.raises(FamilyConflictError, match="both install the module 'zebra_plugin'"):
        Discovery().family_for(Asked("zebra"), "acme-zebra")


def test_prefer_cannot_make_a_family_serve_what_it_does_not_claim(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    with pytest.raises(FamilyNotFoundError, match="family='zebra'"):
        Discovery().family_for(Asked("okapi"), "zebra")
    with pytest.raises(FamilyNotFoundError, match="family='zerba'"):
        Discovery().family_for(Asked("zebra"), "zerba")


def test_unreadable_prefer_is_an_error_only_where_it_would_decide(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("acme-zebra", family="zebra")
    monkeypatch.setenv("FUEL_PREFER", "acme-zebra")
    assert [r.status for r in Discovery().records() if r.name == "zebra"] == [Status.DUPLICATE] * 2
    with pytest.raises(FamilyConflictError, match="expected NAME=DISTRIBUTION, found 'acme-zebra'"):
        Discovery().family_for(Asked("zebra"))


def test_distribution_found_twice_on_the_path_is_one(site: Site, tmp_path: Path) -> None:
    site.install("fuel-zebra", "1.2", family="zebra")
    site.install("fuel_Zebra", "1.1", module="fuel_zebra", family="zebra", folder=tmp_path / "second")
    sys.path.append(str(tmp_path / "second"))
    try:
        record = _record(Discovery(), "zebra")
        assert (record.version, record.status) == ("1.2", Status.NOT_LOADED)
        assert Discovery().family_for(Asked("zebra")).name == "zebra"
    finally:
        sys.path.remove(str(tmp_path / "second"))


def test_distribution_shadowed_by_one_without_plugins_publishes_nothing(site: Site, tmp_path: Path) -> None:
    # The first on the path is what an import would find, also where only the second has entry points.
    site.install("fuel-zebra", "1.2", family="zebra", groups={})
    site.install("fuel-zebra", "1.1", family="zebra", folder=tmp_path / "second")
    sys.path.append(str(tmp_path / "second"))
    try:
        assert "zebra" not in {r.name for r in Discovery().records()}
    finally:
        sys.path.remove(str(tmp_path / "second"))


def test_loading_one_plugin_does_not_call_the_hook_of_another(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("acme-zebra", family="zebra")
    discovery = Discovery()
    first = discovery.family_for(Asked("zebra"), "fuel-zebra")
    second = discovery.family_for(Asked("zebra"), "acme-zebra")
    assert first is not second
    assert discovery.family_for(Asked("zebra"), "fuel-zebra") is first


@pytest.mark.parametrize(
    ("group", "found"),
    [
        ("fuel_core.families.v0", "family API 0"),
        ("fuel_core.families.v99", "family API 99"),
        ("fuel_core.families.one", "'fuel_core.families.one'"),
        ("fuel_core.families", "'fuel_core.families'"),
        ("fuel_core.families.1", "'fuel_core.families.1'"),
        ("fuel_core.families.v01", "'fuel_core.families.v01'"),
        ("fuel_core.families.v1.1", "'fuel_core.families.v1.1'"),
        ("fuel_core.families.v1000000000", "'fuel_core.families.v1000000000'"),
    ],
)
def test_plugin_for_another_family_api_is_refused_with_both_numbers_before_import(
    site: Site, group: str, found: str
) -> None:
    site.install("fuel-zebra", "7.0", family="zebra", groups=_groups("zebra", "fuel_zebra", group))
    discovery = Discovery()
    record = _record(discovery, "zebra")
    assert record.status is Status.INCOMPATIBLE
    assert found in record.detail
    assert "this core has 1" in record.detail
    with pytest.raises(FamilyBrokenError, match=r"fuel-zebra 7\.0 .*this core has 1"):
        discovery.family_for(Asked("zebra"))
    assert [r.name for r in discovery.records() if r.distribution == "fuel-zebra"] == ["zebra"]
    assert imported() == []


def test_plugin_published_for_two_apis_is_loaded_through_the_module_for_this_one(site: Site) -> None:
    site.install(
        "fuel-zebra",
        module="zebra_old",
        family="zebra",
        groups={
            "fuel_core.families.v1": {"zebra": "zebra_old"},
            "fuel_core.families.v2": {"zebra": "zebra_new"},
            "fuel_core.model_types": {"zebra": "zebra_new"},
        },
    )
    discovery = Discovery()
    assert _record(discovery, "zebra").api == (1, 2)
    assert discovery.family_for(Asked("zebra")).name == "zebra"
    assert imported() == ["zebra_old"]


def test_incompatible_rival_is_no_conflict(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("acme-zebra", family="zebra", groups=_groups("zebra", "acme_zebra", "fuel_core.families.v99"))
    assert Discovery().family_for(Asked("zebra")).name == "zebra"
    assert imported() == ["fuel_zebra"]


def test_claim_without_a_family_entry_is_reported(site: Site) -> None:
    site.install("fuel-zebra", groups={"fuel_core.model_types": {"zebra": "fuel_zebra"}})
    record = _record(Discovery(), "fuel_zebra")
    assert record.status is Status.INCOMPATIBLE
    assert "no fuel_core.families.v1 entry point" in record.detail
    with pytest.raises(FamilyBrokenError, match="fuel-zebra"):
        Discovery().family_for(Asked("zebra"))


def test_allow_list_disables_the_rest_and_reports_a_name_that_matches_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("fuel-okapi", family="okapi")
    monkeypatch.setenv("FUEL_FAMILIES", "zebra, zerba")
    discovery = Discovery()
    statuses = {r.name: r.status for r in discovery.records()}
    assert statuses["zebra"] is Status.NOT_LOADED
    assert statuses["okapi"] is Status.DISABLED
    assert statuses["zerba"] is Status.NOT_FOUND
    with pytest.warns(FamilyWarning, match="FUEL_FAMILIES names 'zerba', which no installed distribution publishes"):
        assert discovery.family_for(Asked("zebra")).name == "zebra"
    with pytest.raises(FamilyNotFoundError, match="FUEL_FAMILIES"):
        discovery.family_for(Asked("okapi"))
    monkeypatch.setenv("FUEL_FAMILIES", "")
    assert {r.status for r in discovery.records()} == {Status.DISABLED}
    with pytest.raises(FamilyNotFoundError):
        discovery.family_for(Asked("zebra"))


def test_disabled_rival_is_no_conflict(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("fuel-zebra", family="zebra", model_types=("zebra",))
    site.install("acme-stripes", family="stripes", model_types=("zebra",))
    monkeypatch.setenv("FUEL_FAMILIES", "stripes")
    assert Discovery().family_for(Asked("zebra")).name == "stripes"


def test_unreadable_entry_points_of_one_distribution_do_not_hide_another(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    site.install("fuel-okapi", family="okapi")
    (site.folder / "fuel_okapi-1.0.dist-info" / "entry_points.txt").write_text("[fuel_core.families.v1\nokapi ! x\n")
    (site.folder / "nameless-1.0.dist-info").mkdir()
    (site.folder / "nameless-1.0.dist-info" / "entry_points.txt").write_text("[fuel_core.families.v1]\nnone = none\n")
    assert Discovery().family_for(Asked("zebra")).name == "zebra"


def test_threads_that_need_one_plugin_import_it_once(site: Site) -> None:
    slow = GOOD_MODULE.format(name="zebra", model_types=("zebra",), gguf=()) + "\nimport time; time.sleep(0.05)\n"
    site.install("fuel-zebra", family="zebra", source=slow)
    discovery = Discovery()
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(discovery.family_for(Asked("zebra")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(family) for family in found}) == 1
    assert imported() == ["fuel_zebra"]


def test_record_as_dict_is_plain_data(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    discovery = Discovery()
    discovery.family_for(Asked("zebra"))
    shown = json.loads(json.dumps(_record(discovery, "zebra").as_dict()))
    assert shown["family"] == "zebra"
    assert shown["status"] == "ok"
    assert shown["api"] == [1]


@pytest.mark.parametrize("plugin", ["[]", "{}", "42", "None", "Strange()"])
def test_object_that_is_no_plugin_is_broken_and_leaves_the_others_working(site: Site, plugin: str) -> None:
    # Neither hashable nor comparable: whatever keeps plugins in sets and compares them would fail for the next one too.
    source = f"class Strange:\n    __hash__ = None\n    def __eq__(self, other): raise ValueError\nplugin = {plugin}\n"
    site.install("fuel-bad", family="bad", source=source, groups=_groups("bad", "fuel_bad:plugin"))
    site.install("fuel-good", family="good")
    discovery = Discovery()
    with pytest.raises(FamilyBrokenError, match=r"fuel-bad 1\.0"):
        discovery.family_for(Asked("bad"))
    assert discovery.family_for(Asked("good")).name == "good"


def test_what_a_plugin_prints_while_it_is_imported_stays_out_of_stdout(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "print('hello')\n" + GOOD_MODULE.format(name="zebra", model_types=("zebra",), gguf=())
    site.install("fuel-zebra", family="zebra", source=source)
    Discovery().family_for(Asked("zebra"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_register_kept_by_a_plugin_adds_nothing_later(site: Site) -> None:
    source = (
        HOOK + "kept = []\n@hookimpl\ndef register_families(register):\n    kept.append(register)\n"
        "    register(Family('zebra', ('zebra',), (), dict, dict))\n"
    )
    site.install("fuel-zebra", family="zebra", source=source)
    discovery = Discovery()
    family = discovery.family_for(Asked("zebra"))
    sys.modules["fuel_zebra"].kept[0](family.__class__("okapi", ("okapi",), (), dict, dict))
    assert next(iter(discovery._loaded.values())).families == {"zebra": family}


def test_plugin_installed_while_the_process_runs_is_found(site: Site) -> None:
    module = site.install("fuel-zebra", family="zebra")
    source = (site.folder / f"{module}.py").read_text()
    (site.folder / f"{module}.py").unlink()
    discovery = Discovery()
    assert _record(discovery, "zebra").status is Status.BROKEN
    before = site.folder.stat()
    (site.folder / f"{module}.py").write_text(source)
    # The import system goes by the folder's time stamp, which two changes in a row may share.
    os.utime(site.folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert _record(discovery, "zebra").status is Status.NOT_LOADED
    assert discovery.family_for(Asked("zebra")).name == "zebra"


def test_one_distribution_with_two_modules_for_one_name_is_told_to_choose_by_family(site: Site) -> None:
    for module, family in (("one", "zebra"), ("two", "okapi")):
        source = GOOD_MODULE.format(name=family, model_types=("zebra",), gguf=())
        (site.folder / f"fuel_{module}.py").write_text(source)
    groups = {
        "fuel_core.families.v1": {"zebra": "fuel_one", "okapi": "fuel_two"},
        "fuel_core.model_types": {"zebra": "fuel_one"},
        # The same name once more: the file is read line by line.
        "fuel_core.model_types ": {"zebra": "fuel_two"},
    }
    site.install("fuel-zebra", groups=groups)
    info = site.folder / "fuel_zebra-1.0.dist-info" / "entry_points.txt"
    info.write_text(info.read_text().replace("model_types ]", "model_types]"))
    with pytest.raises(FamilyConflictError, match=r"family 'okapi' of fuel-zebra 1\.0 and by family 'zebra'") as caught:
        Discovery().family_for(Asked("zebra"))
    assert "FUEL_PREFER" not in str(caught.value)  # it names distributions, and there is one
    assert Discovery().family_for(Asked("zebra"), "okapi").name == "okapi"


def test_broken_rival_is_said_to_be_broken(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    module = site.install("acme-zebra", family="zebra")
    (site.folder / f"{module}.py").unlink()
    discovery = Discovery()
    with pytest.raises(FamilyConflictError, match=r"acme-zebra 1\.0 \(broken\) and by fuel-zebra 1\.0"):
        discovery.family_for(Asked("zebra"))
    assert discovery.family_for(Asked("zebra"), "fuel-zebra").name == "zebra"
    with pytest.raises(FamilyBrokenError, match=r"acme-zebra 1\.0 .*module 'acme_zebra' is not there"):
        discovery.family_for(Asked("zebra"), "acme-zebra")


def test_warning_raises_each_time_where_warnings_are_errors(site: Site) -> None:
    site.install("fuel-zebra", family="zebra")
    metadata = site.folder / "fuel_zebra-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: not-installed-zz\nRequires-Dist: ??\n")
    discovery = Discovery()
    record = _record(discovery, "zebra")
    assert record.warnings[0] == "fuel-zebra 1.0 requires not-installed-zz, which is not installed"
    assert record.warnings[1].startswith("fuel-zebra 1.0 has a requirement that cannot be read: ")
    assert record.status is Status.NOT_LOADED
    for _ in "ab":
        with pytest.raises(FamilyWarning, match="not-installed-zz"):
            discovery.family_for(Asked("zebra"))
    with pytest.warns(FamilyWarning) as caught:
        discovery.family_for(Asked("zebra"))
    assert len(caught) == 2
    discovery.family_for(Asked("zebra"))


def test_core_that_runs_from_a_checkout_satisfies_requirements_of_itself(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(site.folder), *(p for p in sys.path if "site-packages" not in p)])
    site.install("fuel-zebra", family="zebra")
    metadata = site.folder / "fuel_zebra-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: fuel-core>=0.1\n")
    assert _record(Discovery(), "zebra").warnings == ()
