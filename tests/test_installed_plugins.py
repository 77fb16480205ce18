"""Plugins as real packages: wheels, pip, fresh interpreters. What a bad one may not do to the others or the listing.

`test_discovery.py` checks the same rules case by case in one process; this is what a user meets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plugin_wheels import Environment, Plugin, build_wheels, good
from toy_family import write_toy_checkpoint

HERE = Path(__file__).resolve().parent

HOOK = "from fuel_core import Family, hookimpl\n@hookimpl\ndef register_families(register):\n    "


def _published(group: str, family: str, module: str) -> dict[str, dict[str, str]]:
    return {group: {family: module}, "fuel_core.model_types": {family: module}}


V1 = "fuel_core.families.v1"
UNPRINTABLE = "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd\n"

CROWD = [
    Plugin("fuel-good", "good"),
    Plugin(
        "fuel-pair",
        "left",
        f"{HOOK}for w in ('left', 'right'): register(Family(w, (w,), (), dict, dict))\n",
        groups={
            V1: {"left": "fuel_pair", "right": "fuel_pair"},
            "fuel_core.model_types": {"left": "fuel_pair", "right": "fuel_pair"},
        },
    ),
    Plugin(
        "fuel-both",
        "both",
        good("both"),
        module="fuel_both_v1",
        modules={"fuel_both_v2": "raise SystemExit"},
        groups={
            V1: {"both": "fuel_both_v1"},
            "fuel_core.families.v2": {"both": "fuel_both_v2"},
            "fuel_core.model_types": {"both": "fuel_both_v1"},
        },
    ),
    Plugin("acme-chatty", "chatty", "print('hello from acme')\n" + good("chatty")),
    Plugin("acme-needs", "needs", requires=("torch<1", "not-installed-zz>=2", "fuel-core>=0.1", "rich; extra == 'x'")),
    # -- import fails
    Plugin("acme-import", "import", "import a_module_that_does_not_exist_zz"),
    Plugin("acme-syntax", "syntax", "def register_families(:\n"),
    Plugin("acme-exit", "exit", "import sys\nsys.exit(3)"),
    Plugin("acme-base", "base", "class Stop(BaseException): pass\nraise Stop('no more')"),
    Plugin("acme-odd", "odd", UNPRINTABLE),
    # -- what is imported is no plugin
    Plugin("acme-object", "object", "plugin = 42", groups=_published(V1, "object", "acme_object:plugin")),
    Plugin("acme-nohook", "nohook", "x = 1"),
    Plugin("acme-text", "text", HOOK + "register('text')"),
    Plugin("acme-other", "other", good("another")),
    # -- metadata without code, or the other way round
    Plugin("acme-stale", "stale"),
    Plugin("acme-nowhere", "nowhere", groups=_published(V1, "nowhere", "acme_elsewhere")),
    Plugin("acme-noattr", "noattr", groups=_published(V1, "noattr", "acme_noattr:gone")),
    Plugin("acme-badref", "badref", groups=_published(V1, "badref", "acme badref!")),
    Plugin("acme-unversioned", "unversioned"),
    # -- another family API
    Plugin("acme-old", "old", groups=_published("fuel_core.families.v0", "old", "acme_old")),
    Plugin("acme-new", "new", groups=_published("fuel_core.families.v99", "new", "acme_new")),
    Plugin("acme-bare", "bare", groups=_published("fuel_core.families", "bare", "acme_bare")),
    Plugin("acme-one", "one", groups=_published("fuel_core.families.1", "one", "acme_one")),
    Plugin("acme-padded", "padded", groups=_published("fuel_core.families.v01", "padded", "acme_padded")),
    Plugin("acme-vast", "vast", groups=_published("fuel_core.families.v" + "9" * 5000, "vast", "acme_vast")),
    Plugin("acme-unnamed", "unnamed", groups={"fuel_core.model_types": {"unnamed": "acme_unnamed"}}),
    # -- an import that costs: were it paid, the test would run into its time limit
    Plugin("acme-slow", "slow", good("slow") + "import time; time.sleep(600)\n"),
    # -- a model that really runs
    Plugin(
        "fuel-toy",
        "toy",
        "from toy_family import register_families\n",
        modules={name: (HERE / f"{name}.py").read_text() for name in ("toy_family", "toy_backbone", "plugin_site")},
    ),
]

# family -> (status listed, status once loaded, what the detail says then)
STATUSES = {
    "good": ("not loaded", "ok", ""),
    "left": ("not loaded", "ok", ""),
    "right": ("not loaded", "ok", ""),
    "both": ("not loaded", "ok", ""),
    "chatty": ("not loaded", "ok", ""),
    "needs": ("not loaded", "ok", ""),
    "toy": ("not loaded", "ok", ""),
    "import": ("not loaded", "broken", "ModuleNotFoundError: No module named 'a_module_that_does_not_exist_zz'"),
    "syntax": ("not loaded", "broken", "SyntaxError"),
    "exit": ("not loaded", "broken", "SystemExit: 3"),
    "base": ("not loaded", "broken", "Stop: no more"),
    "odd": ("not loaded", "broken", "Odd"),
    "object": ("not loaded", "broken", "registers no family"),
    "nohook": ("not loaded", "broken", "registers no family"),
    "text": ("not loaded", "broken", "found str"),
    "other": ("not loaded", "broken", "registers another, not 'other' as its metadata says"),
    "stale": ("broken", "broken", "module 'acme_stale' is not there"),
    "nowhere": ("broken", "broken", "module 'acme_elsewhere' is not there"),
    "noattr": ("not loaded", "broken", "AttributeError"),
    "badref": ("broken", "broken", "entry point 'acme badref!'"),
    "unversioned": ("not loaded", "ok", ""),
    "old": ("incompatible", "incompatible", "family API 0, this core has 1"),
    "new": ("incompatible", "incompatible", "family API 99, this core has 1"),
    "bare": ("incompatible", "incompatible", "'fuel_core.families'"),
    "one": ("incompatible", "incompatible", "'fuel_core.families.1'"),
    "padded": ("incompatible", "incompatible", "'fuel_core.families.v01'"),
    "vast": ("incompatible", "incompatible", "'fuel_core.families.v9999"),
    "acme_unnamed": ("incompatible", "incompatible", "no fuel_core.families.v1 entry point names"),
    "slow": ("not loaded", "not loaded", ""),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rivals = [
        Plugin("fuel-zebra", "zebra", version="1.2", model_types=("zebra", "okapi")),
        Plugin("acme-zebra", "zebra", version="0.9"),
        Plugin("fuel-zebra", "zebra", version="1.1"),
    ]
    return build_wheels([*CROWD, *rivals], tmp_path_factory.mktemp("wheelhouse"))


@pytest.fixture(scope="module")
def crowd(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment.create(tmp_path_factory.mktemp("crowd"), wheels, [plugin.wheel for plugin in CROWD])
    (made.site / "acme_stale.py").unlink()  # as after an uninstall that was cut short
    metadata = made.site / "acme_unversioned-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0\n", ""))
    return made


@pytest.fixture(scope="module")
def rivals(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    names = ["fuel_zebra-1.2-py3-none-any.whl", "acme_zebra-0.9-py3-none-any.whl"]
    return Environment.create(tmp_path_factory.mktemp("rivals"), wheels, names)


@pytest.fixture(scope="module")
def empty(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("empty"), wheels, [])


def _by_family(records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["family"]: record for record in records.values()}


def test_listing_shows_every_plugin_and_imports_none(crowd: Environment, tmp_path: Path) -> None:
    log = tmp_path / "imports"
    shown = _by_family(crowd.families(IMPORT_LOG=str(log)))
    assert {name: record["status"] for name, record in shown.items()} == {
        name: listed for name, (listed, _, _) in STATUSES.items()
    }
    assert not log.exists()
    assert all("\n" not in record["detail"] for record in shown.values())


def test_loading_all_makes_each_bad_plugin_a_record_of_its_own(crowd: Environment) -> None:
    # The slow one is left out by the allow-list, which is what that is for.
    allowed = ",".join(name for name in STATUSES if name != "slow")
    shown = _by_family(crowd.families("--load", FUEL_FAMILIES=allowed))
    assert shown.pop("slow")["status"] == "disabled"
    for name, record in shown.items():
        _, status, detail = STATUSES[name]
        assert (name, record["status"]) == (name, status)
        assert detail in record["detail"]
        assert bool(record["detail"]) == (status != "ok"), record["detail"]
        assert record["traceback"] is None or record["status"] == "broken"


def test_listing_as_a_table_names_status_and_reason_of_each(crowd: Environment) -> None:
    done = crowd.fuel("families")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    for name, (listed, _, _) in STATUSES.items():
        assert listed in rows[name]
        assert listed == "not loaded" or f"\n{name}: " in "\n" + done.stderr
    assert "needs: acme-needs 1.0 requires torch<1, found torch " in done.stderr


def test_model_runs_among_every_kind_of_bad_plugin(crowd: Environment, tmp_path: Path) -> None:
    # What is broken is not on this model's way, so nothing is said of it.
    checkpoint = str(write_toy_checkpoint(tmp_path / "toy"))
    done = crowd.fuel("generate", checkpoint, "w1 w2", "-n", "4", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["token_ids"]) == 4


INSPECT = """
import json, sys, tempfile
from pathlib import Path
from fuel_core.cli import main

folder = Path(tempfile.mkdtemp())
for family in sys.argv[1:]:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    print(main(["inspect", str(folder)]), file=sys.stderr)
"""


def test_model_of_a_bad_plugin_is_refused_in_one_line_that_names_it(crowd: Environment) -> None:
    bad = ["import", "syntax", "exit", "base", "odd", "old", "stale", "badref", "unnamed"]
    done = crowd.run("-c", INSPECT, *bad)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert len(lines) == 2 * len(bad), done.stderr
    for family, line, code in zip(bad, lines[::2], lines[1::2], strict=True):
        assert code == "2"
        assert line.startswith(f"fuel: acme-{family} 1.0 ")
        assert STATUSES["acme_unnamed" if family == "unnamed" else family][2] in line


ASK = """
import json, sys
from dataclasses import dataclass
from fuel_core.discovery import Discovery

@dataclass
class Asked:
    model_type: str
    gguf_architecture: str = ""
    format: str = "huggingface"

found = Discovery()
for word in sys.argv[1:]:
    try:
        print(word, found.family_for(Asked(word)).name)
    except Exception as error:
        print(word, type(error).__name__, error)
"""


def test_good_plugins_serve_after_every_bad_one_has_failed(crowd: Environment) -> None:
    bad = [name for name, (_, loaded, _) in STATUSES.items() if loaded == "broken"]
    fine = ["good", "left", "right", "both", "chatty", "unversioned", "toy"]
    done = crowd.run("-c", ASK, *bad, *fine)
    outcome = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.split()[0] in STATUSES)
    assert {name: outcome[name].split()[0] for name in bad} == dict.fromkeys(bad, "FamilyBrokenError")
    assert {name: outcome[name] for name in fine} == {name: name for name in fine}


def test_violated_requirement_warns_once_and_decides_nothing(crowd: Environment) -> None:
    record = _by_family(crowd.families())["needs"]
    missing_line, torch_line = sorted(record["warnings"])
    assert torch_line.startswith("acme-needs 1.0 requires torch<1, found torch ")
    assert missing_line == "acme-needs 1.0 requires not-installed-zz>=2, which is not installed"
    done = crowd.run("-c", ASK, "needs", "needs", "good")
    assert done.stdout.splitlines() == ["needs needs", "needs needs", "good good"]
    assert done.stderr.count("FamilyWarning: acme-needs 1.0 requires torch<1") == 1
    assert done.stderr.count("FamilyWarning: acme-needs 1.0 requires not-installed-zz>=2") == 1


def test_strict_setting_raises_where_a_warning_would_stand(crowd: Environment) -> None:
    # A strict mode raises.
    done = crowd.run("-c", ASK, "needs", "good", FUEL_STRICT="1")
    needs, fine = done.stdout.splitlines()
    assert needs.startswith("needs FamilyBrokenError acme-needs 1.0 requires ")
    assert "FUEL_STRICT" in needs
    assert fine == "good good"
    load_all = "from fuel_core.discovery import Discovery\nDiscovery().load_all()"
    done = crowd.run("-c", load_all, FUEL_FAMILIES="exit,good")
    assert done.returncode == 0
    assert "FamilyWarning: family plugin acme-exit 1.0 was skipped: acme_exit failed with SystemExit: 3" in done.stderr
    done = crowd.run("-c", load_all, FUEL_FAMILIES="exit,good", FUEL_STRICT="1")
    assert done.returncode == 1
    assert "FamilyBrokenError: family plugin acme-exit 1.0 was skipped" in done.stderr
    assert crowd.fuel("families", FUEL_STRICT="1", FUEL_FAMILIES="good").returncode == 0
    assert crowd.fuel("families", FUEL_STRICT="1", FUEL_FAMILIES="good,old").returncode == 2
    assert crowd.fuel("families", FUEL_STRICT="0", FUEL_FAMILIES="good,old").returncode == 0


def test_allow_list_in_a_real_environment(crowd: Environment) -> None:
    none = crowd.families(FUEL_FAMILIES="")
    assert {record["status"] for record in none.values()} == {"disabled"}
    some = _by_family(crowd.families(FUEL_FAMILIES="good,godo"))
    assert (some["good"]["status"], some["godo"]["status"]) == ("not loaded", "not found")
    assert {r["status"] for n, r in some.items() if n not in ("good", "godo")} == {"disabled"}
    done = crowd.run("-c", ASK, "good", "left", FUEL_FAMILIES="good,godo")
    assert done.stdout.startswith("good good\nleft FamilyNotFoundError fuel-pair 1.0 handles model_type 'left'")
    assert done.stderr.count("FUEL_FAMILIES names 'godo', which no installed distribution publishes") == 1


SPAWN = """
import json, multiprocessing as mp
from fuel_core import discovery

def look(word):
    from fuel_core.discovery import Discovery
    found = Discovery()
    class Asked:
        format, model_type, gguf_architecture = "huggingface", word, None
    name = found.family_for(Asked).name
    return name, [r.as_dict() for r in found.records()]

if __name__ == "__main__":
    mine = look("good")
    with mp.get_context("spawn").Pool(2) as pool:
        for theirs in pool.map(look, ["good", "good"]):
            assert json.dumps(theirs) == json.dumps(mine)
    print(len(mine[1]), sum(r["status"] == "ok" for r in mine[1]))
"""


def test_spawned_workers_see_what_their_parent_sees(crowd: Environment, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = crowd.run(str(script), FUEL_FAMILIES="good,left")
    assert (done.returncode, done.stdout) == (0, f"{len(STATUSES)} 1\n"), done.stderr


# -- two packages for one name


def test_two_packages_for_one_name_are_an_error_whatever_the_order_of_installation(
    rivals: Environment, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ["acme_zebra-0.9-py3-none-any.whl", "fuel_zebra-1.2-py3-none-any.whl"]
    other = Environment.create(tmp_path_factory.mktemp("rivals-reversed"), wheels, names)
    said = [environment.run("-c", ASK, "zebra").stdout for environment in (rivals, other)]
    assert said[0] == said[1]
    for part in ("FamilyConflictError", "acme-zebra 0.9", "fuel-zebra 1.2", "load(family=", "--family", "FUEL_PREFER="):
        assert part in said[0]
    for environment in (rivals, other):
        shown = environment.families()
        assert shown["acme-zebra:zebra"]["status"] == shown["fuel-zebra:zebra"]["status"] == "duplicate"
        assert shown["acme-zebra:zebra"]["duplicate_of"] == ["fuel-zebra 1.2"]
        assert shown["fuel-zebra:zebra"]["duplicate_of"] == ["acme-zebra 0.9"]


def test_what_is_claimed_once_is_served_beside_what_is_claimed_twice(rivals: Environment, tmp_path: Path) -> None:
    log = tmp_path / "imports"
    done = rivals.run("-c", ASK, "okapi", IMPORT_LOG=str(log))
    assert (done.stdout, log.read_text()) == ("okapi zebra\n", "fuel_zebra\n")


@pytest.mark.parametrize("chosen", ["acme-zebra", "fuel-zebra"])
def test_preference_chooses_between_two_packages(rivals: Environment, tmp_path: Path, chosen: str) -> None:
    log = tmp_path / "imports"
    settings = {"FUEL_PREFER": f"zebra={chosen}", "IMPORT_LOG": str(log)}
    assert rivals.run("-c", ASK, "zebra", **settings).stdout == "zebra zebra\n"
    assert log.read_text() == chosen.replace("-", "_") + "\n"
    statuses = {r["distribution"]: r["status"] for r in rivals.families(**settings).values()}
    assert statuses.pop(chosen) == "not loaded"
    assert set(statuses.values()) == {"duplicate"}


def test_family_option_chooses_between_two_packages(rivals: Environment, tmp_path: Path) -> None:
    log = tmp_path / "imports"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "zebra"}))
    rivals.fuel("inspect", str(folder), "--family", "acme-zebra", IMPORT_LOG=str(log))
    assert log.read_text() == "acme_zebra\n"
    done = rivals.fuel("inspect", str(folder))
    assert done.returncode == 2
    assert "is claimed by acme-zebra 0.9 and by fuel-zebra 1.2; choose one with" in done.stderr


def test_one_package_on_the_path_twice_is_one_and_the_first_counts(
    rivals: Environment, wheels: Path, tmp_path: Path
) -> None:
    rivals.install(wheels, ["fuel_zebra-1.1-py3-none-any.whl"], target=tmp_path)
    settings = {"FUEL_FAMILIES": "zebra", "FUEL_PREFER": "zebra=fuel-zebra"}
    assert rivals.families(**settings)["fuel-zebra:zebra"]["version"] == "1.2"
    ahead = rivals.families(**settings, PYTHONPATH=str(tmp_path))
    assert ahead["fuel-zebra:zebra"]["version"] == "1.1"
    assert len(ahead) == 2
    twice = rivals.families(**settings, PYTHONPATH=f"{rivals.site}:{rivals.site}")
    assert [r["version"] for r in twice.values()] == ["0.9", "1.2"]


def test_two_metadata_folders_of_one_package_take_the_newer_and_say_so(
    wheels: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    made = Environment.create(tmp_path_factory.mktemp("leftover"), wheels, ["fuel_zebra-1.2-py3-none-any.whl"])
    made.install(wheels, ["fuel_zebra-1.1-py3-none-any.whl"], target=tmp_path)
    (tmp_path / "fuel_zebra-1.1.dist-info").rename(made.site / "fuel_zebra-1.1.dist-info")
    record = made.families()["fuel-zebra:zebra"]
    assert (record["version"], record["status"]) == ("1.2", "not loaded")
    (said,) = record["warnings"]
    assert said.startswith("fuel-zebra has metadata of versions 1.1 and 1.2 in ")
    assert "1.2 is taken" in said


# -- nothing installed


def test_nothing_installed_is_said_with_what_to_do(empty: Environment) -> None:
    done = empty.fuel("families")
    assert done.returncode == 0
    assert "No family is installed" in done.stdout
    assert empty.families() == {}
    asked = empty.families(FUEL_FAMILIES="zebra")
    assert [(r["family"], r["status"]) for r in asked.values()] == [("zebra", "not found")]
    done = empty.run("-c", INSPECT, "zebra")
    assert done.stderr.endswith("\n2\n")
    assert "No installed family handles model_type 'zebra' (installed: none)" in done.stderr


# -- fuel doctor


def test_doctor_lists_what_each_bad_plugin_means_and_the_rest_of_the_installation(crowd: Environment) -> None:
    done = crowd.fuel("doctor", "--json", FUEL_CACHE=str(crowd.folder / "cache"))
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["torch"]["error"] is None
    assert report["core"]["folder"] == str(crowd.site / "fuel_core")
    bad = {name for name, (listed, _, _) in STATUSES.items() if listed in ("broken", "incompatible")}
    assert len(report["problems"]) == len(bad), report["problems"]
    for name in bad:
        assert any(line.startswith(f"family {name!r} (acme-") for line in report["problems"])
    assert any("acme-needs 1.0 requires torch<1" in line for line in report["remarks"])
    assert done.stderr.count("problem: ") == len(bad)


def test_doctor_finds_nothing_broken_where_nothing_but_the_core_is_installed(empty: Environment) -> None:
    done = empty.fuel("doctor", FUEL_CACHE=str(empty.folder / "cache"))
    assert done.returncode == 0
    assert "remark: no family is installed, so no model can be served" in done.stderr
    assert "problem" not in done.stderr
