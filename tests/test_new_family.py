"""`fuel new-family`: what it writes installs and passes as it is, a refusal is one line, and nothing is half done.

The package is built, installed beside the core's wheel and run by an interpreter of its own, as its author would.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from plugin_site import Site
from plugin_wheels import ROOT, Environment, build_wheels

import fuel_core
from fuel_core import cli
from fuel_core.errors import NewFamilyError
from fuel_core.testing import scaffold
from fuel_core.testing.scaffold import Names, core_range, names_of

NAMES = ["zebra", "q", "my_zebra2", "a1_b2_c3_d4_e5_f6_g7_h8_"[:23] + "x"]
"""As short and as long as a name may be, with digits and underscores: lines must fit, and none may be joined."""
FOLDER = "a folder of mine"
"""Has spaces, as home folders do."""


def write(name: str, into: Path, *options: str) -> Path:
    assert cli.main(["new-family", name, "--into", str(into), *options]) == 0
    return into / names_of(name).distribution


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a call that ends with exit code 2."""
    capsys.readouterr()
    assert cli.main(["new-family", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def held(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- the package, installed ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("new") / FOLDER
    into.mkdir()
    path, _ = scaffold.new_family(names_of("zebra"), into)
    return path


@pytest.fixture(scope="module")
def installed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The core and the package, from wheels, where the checkout cannot be seen."""
    folder = tmp_path_factory.mktemp("zebra")
    wheels = build_wheels([], folder, projects=[project])
    return Environment.create(folder / "venv", wheels, [next(wheels.glob("fuel_zebra-*.whl")).name])


def run(installed: Environment, folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's interpreter in `folder`. The kernels are those that this suite has."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [installed.python, *arguments],
        capture_output=True,
        text=True,
        env=kept | {"OMP_NUM_THREADS": "1"} | settings,
        cwd=folder,
        timeout=600,
    )


def test_new_package_passes_every_check(installed: Environment) -> None:
    done = run(installed, installed.folder, "-m", "fuel_core", "check", "zebra", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["family"] == "zebra"
    assert (report["failed"], report["expected_failures"]) == (0, 0)
    # A toy without windows has nothing to show to these; everything else ran, on both configs.
    skipped = {check["name"].partition("[")[0] for check in report["checks"] if check["outcome"] == "skipped"}
    assert skipped == {"correctness.windows_crossed_twice", "bound.window_and_mask_are_one_entry"}
    assert report["passed"] > 90


def test_new_package_passes_its_own_tests(installed: Environment, project: Path) -> None:
    """With one topic of the kit, which shows that pytest collects it; the others run in the test above."""
    topics = "not (contract or correctness or identity or bound or plans or interleavings)"
    command = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", topics]
    done = run(installed, project, *command, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])  # type: ignore[index]
    assert passed >= 16
    assert done.stdout.count("::imports_no_torch PASSED") == 1


def test_new_package_is_clean_for_mypy(installed: Environment, project: Path, tmp_path: Path) -> None:
    done = run(installed, project, "-m", "mypy", "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found in 5 source files" in done.stdout


def test_check_fails_once_a_norm_is_another(installed: Environment, project: Path, tmp_path: Path) -> None:
    """The oracle of the new package is one that can say no."""
    was, becomes = "self.post_attention_layernorm(h)", "self.input_layernorm(h)"
    shutil.copytree(project / "fuel_zebra", tmp_path / "fuel_zebra")
    model = tmp_path / "fuel_zebra" / "zebra.py"
    text = model.read_text()
    assert text.count(was) == 1
    model.write_text(text.replace(was, becomes))
    arguments = ["-m", "fuel_core", "check", "zebra", "--only", "correctness.fresh_steps"]
    done = run(installed, tmp_path, *arguments, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 2, done.stdout
    assert "correctness.fresh_steps[grouped]: grouped: fresh steps on the symbol path" in done.stderr
    assert "logits are off by" in done.stderr


def test_one_line_takes_the_truth_from_transformers(installed: Environment, project: Path, tmp_path: Path) -> None:
    """The line that stands in a comment, on an architecture that the toy is once its gain is gone."""
    package = tmp_path / "fuel_zebra"
    shutil.copytree(project / "fuel_zebra", package)
    changes = {
        "zebra.py": [("attended * self.attn_gain.to(attended.dtype)", "attended"), ('("zebra",)', '("llama",)')],
        "conformance.py": [
            ('"model_type": "zebra"', '"model_type": "llama"'),
            ("Conformance, reference_oracle", "Conformance, transformers_oracle"),
            ("    oracle=reference_oracle(reference),\n", ""),
            ("    # oracle=transformers_oracle(),\n", "    oracle=transformers_oracle(),\n"),
        ],
    }
    for name, of_file in changes.items():
        text = (package / name).read_text()
        for was, becomes in of_file:
            assert text.count(was) == 1, was
            text = text.replace(was, becomes)
        lines = [line for line in text.splitlines() if "self.attn_gain" not in line]
        (package / name).write_text("\n".join(lines) + "\n")
    (package / "reference.py").write_text("def reference(*_): raise AssertionError('asked')\n")
    arguments = ["-m", "fuel_core", "check", "zebra", "--only", "correctness.held_steps"]
    done = run(installed, tmp_path, *arguments, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    assert "2 passed" in done.stdout


def test_core_from_a_wheel_writes_what_the_checkout_writes(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    done = run(installed, tmp_path / "here", "-m", "fuel_core", "new-family", "Okapi")
    assert done.returncode == 0, done.stderr
    ours = write("okapi", tmp_path)
    theirs = tmp_path / "here" / "fuel-okapi"
    assert held(ours) == held(theirs)
    assert all((theirs / name).read_bytes() == (ours / name).read_bytes() for name in held(ours) if "." in name[1:])


def test_installed_package_is_found_and_its_name_is_taken(installed: Environment) -> None:
    shown = installed.families("--load")["fuel-zebra:zebra"]
    assert (shown["status"], shown["model_types"], shown["warnings"]) == ("ok", ["zebra"], [])
    done = run(installed, installed.folder, "-m", "fuel_core", "new-family", "zebra")
    assert done.returncode == 2
    assert "fuel-zebra 0.1.0 serves the family 'zebra'" in done.stderr


# -- what it writes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_written_code_is_as_the_linter_wants_it(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path, "--model-type", name + "-with-the-longest-one"[: 40 - len(name)])
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("asked", "name", "distribution", "class_name"),
    [
        ("zebra", "zebra", "fuel-zebra", "Zebra"),
        ("Zebra", "zebra", "fuel-zebra", "Zebra"),
        ("fuel-zebra", "zebra", "fuel-zebra", "Zebra"),
        ("Fuel_Zebra", "zebra", "fuel-zebra", "Zebra"),
        ("my-zebra2", "my_zebra2", "fuel-my-zebra2", "MyZebra2"),
        ("my_zebra2", "my_zebra2", "fuel-my-zebra2", "MyZebra2"),
    ],
)
def test_one_family_is_one_name_however_it_is_spelt(asked: str, name: str, distribution: str, class_name: str) -> None:
    names = names_of(asked)
    assert names == Names(name, name)
    assert (names.distribution, names.module, names.class_name) == (distribution, f"fuel_{name}", class_name)


def test_package_states_the_core_it_was_written_with(tmp_path: Path) -> None:
    project = tomllib.loads((write("zebra", tmp_path) / "pyproject.toml").read_text())["project"]
    core, torch = (Requirement(line) for line in project["dependencies"])
    assert core.name == "fuel-core"
    assert core.specifier.contains(fuel_core.__version__)
    assert str(core.specifier) == str(Requirement(f"fuel-core{core_range(fuel_core.__version__)}").specifier)
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(torch) in {str(Requirement(line)) for line in stated["dependencies"]}
    tools = {Requirement(line).name: line for line in stated["optional-dependencies"]["test"]}
    extras = project["optional-dependencies"]
    assert extras["test"] == [tools["build"], tools["hatchling"], tools["pytest"]]
    assert extras["lint"] == [tools["mypy"], tools["ruff"]]
    assert set(project["entry-points"]) == {
        f"fuel_core.families.v{fuel_core.FAMILY_API}", "fuel_core.model_types", "fuel_core.conformance"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.0", ">=0.1.0,<0.2"),
        ("0.9.3", ">=0.9.3,<0.10"),
        ("1.4.2", ">=1.4.2,<2"),
        ("0.2.0.dev3+gabc", ">=0.2.0.dev3,<0.3"),
    ],
)
def test_range_of_cores_ends_where_the_surface_may_change(version: str, expected: str) -> None:
    assert core_range(version) == expected
    assert Requirement(f"fuel-core{expected}").specifier.contains(version.partition("+")[0], prereleases=True)


def test_workflow_runs_the_checks_on_both_ends_of_the_range(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    path = write("zebra", tmp_path)
    jobs = yaml.safe_load((path / ".github" / "workflows" / "check.yml").read_text())["jobs"]
    assert jobs["check"]["strategy"]["matrix"] == {"core": ["oldest", "newest"]}
    steps = jobs["check"]["steps"]
    assert {"fuel check zebra", "python -m pytest --fuel-optional"} <= {step.get("run") for step in steps}
    assert {"ruff check .", "ruff format --check .", "mypy"} <= {step.get("run") for step in jobs["lint"]["steps"]}
    # The lines that find the lower bound, as the runner's shell would run them.
    (script,) = (step["run"] for step in steps if step.get("if") == "matrix.core == 'oldest'")
    finding, installing = script.rsplit("python -m pip install", 1)
    assert installing.split() == ['"fuel-core==$oldest"', "-e", "'.[test]'"]
    shown = subprocess.run(
        ["bash", "-e", "-c", finding + 'echo "$oldest"'], cwd=path, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == fuel_core.__version__


def test_editable_install_needs_no_other_package(tmp_path: Path) -> None:
    """`pip install --no-build-isolation -e .` has what the environment has, and `editables` is rarely in it."""
    path = write("zebra", tmp_path)
    asked = (
        "import sys; sys.modules['editables'] = None; from hatchling import build; "
        "print(build.build_editable(sys.argv[1]))"
    )
    command = [sys.executable, "-c", asked, str(tmp_path)]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.strip()) as archive:
        (pth,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(pth).decode().strip() == str(path.resolve())


def test_gguf_entry_point_in_the_comment_can_be_taken_in(tmp_path: Path) -> None:
    text = (write("zebra", tmp_path) / "pyproject.toml").read_text()
    comment = text[text.index("# general.architecture") : text.index("# Where `fuel check")]
    assert "which need not be the model_type" in comment
    lines = [line.removeprefix("# ") for line in comment.splitlines() if line.startswith(("# [", "# zebra"))]
    points = tomllib.loads("\n".join(lines))["project"]["entry-points"]
    assert points == {"fuel_core.gguf_architectures": {"zebra": "fuel_zebra"}}


def test_model_type_may_be_another_than_the_name(tmp_path: Path) -> None:
    path = write("zebra", tmp_path, "--model-type", "zebra-MoE_2")
    points = tomllib.loads((path / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["fuel_core.model_types"] == {"zebra-MoE_2": "fuel_zebra"}
    assert 'MODEL_TYPES = ("zebra-MoE_2",)' in (path / "fuel_zebra" / "zebra.py").read_text()
    assert '"model_type": "zebra-MoE_2"' in (path / "fuel_zebra" / "conformance.py").read_text()


def test_no_word_is_left_to_fill_in_and_no_template_is_left_out(tmp_path: Path) -> None:
    path = write("my-zebra", tmp_path)
    for name in held(path):
        if (path / name).is_file():
            assert "{{" not in re.sub(r"\$\{\{ .*? \}\}", "", (path / name).read_text()), name
    templates = ROOT / "fuel_core" / "testing" / "scaffold" / "templates"
    there = {str(file.relative_to(templates)) for file in templates.rglob("*") if file.is_file()}
    assert there == {f"{template}.tmpl" for template in scaffold.FILES.values()}


def test_licences_are_the_ones_of_the_core(tmp_path: Path) -> None:
    path = write("zebra", tmp_path)
    assert (path / "LICENSE-APACHE").read_text() == (ROOT / "LICENSE-APACHE").read_text()
    expected = (ROOT / "LICENSE-MIT").read_text().replace("the fuel authors", "the fuel-zebra authors")
    assert (path / "LICENSE-MIT").read_text() == expected


def test_links_of_the_new_documents_lead_somewhere(tmp_path: Path) -> None:
    path = write("zebra", tmp_path)
    for document in path.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (path / target).exists(), f"{document.name} links to {target}"


# -- what it prints --------------------------------------------------------------------------------------------------


def test_next_steps_are_printed_as_a_shell_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-family", "fuel-zebra"]) == 0
    captured = capsys.readouterr()
    assert "  pip install -e ./fuel-zebra\n  fuel check zebra\n" in captured.out
    assert "docs/writing-a-family.md" in captured.out
    assert "'zebra'" in captured.err  # it was called otherwise
    assert cli.main(["new-family", "okapi", "--into", FOLDER]) == 0
    captured = capsys.readouterr()
    assert f"  pip install -e './{FOLDER}/fuel-okapi'\n" in captured.out
    assert captured.err == ""


def test_json_is_one_object_that_names_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new-family", "My-Zebra", "--into", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    report: dict[str, Any] = json.loads(captured.out)
    assert captured.err == ""
    assert {key: report[key] for key in ("family", "model_type", "distribution", "module")} == {
        "family": "my_zebra", "model_type": "my_zebra", "distribution": "fuel-my-zebra", "module": "fuel_my_zebra"
    }  # fmt: skip
    path = Path(report["path"])
    assert path == tmp_path / "fuel-my-zebra"
    assert report["files"] == [name for name in held(path) if (path / name).is_file()]
    assert report["next"] == [f"pip install -e {path}", "fuel check my_zebra"]
    assert report["docs"] == "docs/writing-a-family.md"


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "use one such as 'zebra'"),
        ("fuel-", "use one such as 'zebra'"),
        ("--", "use one such as 'zebra'"),
        ("2zebra", "use 'zebra'"),
        ("my zebra", "use 'my-zebra'"),
        ("my.zebra/2", "use 'my-zebra-2'"),
        ("../zebra", "use 'zebra'"),
        ("my--zebra_", "use 'my-zebra'"),
        ("z" * 25, f"use '{'z' * 24}'"),
        ("class", "Python's own; use another, such as 'class-lm'"),
        ("Lambda", "Python's own"),
        ("family", "two family.py"),
        ("conformance", "two conformance.py"),
        ("raw", "two RawConfig"),
        ("decode", "two DecodeBackbone"),
        ("core", "fuel-core"),
    ],
)
def test_name_that_cannot_be_one_is_refused(
    asked: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--into", str(tmp_path), "--", asked)
    assert said in line
    assert "expected" in line
    assert held(tmp_path) == []


@pytest.mark.parametrize("word", ["", "two words", "z" * 41, '"', "zebra.2", "-zebra", "z\n"])
def test_model_type_that_cannot_be_published_is_refused(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "zebra", "--into", str(tmp_path), f"--model-type={word}")
    assert "--model-type" in line
    assert held(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["zebra"], "the family 'zebra'"),
        (["Fuel-Zebra"], "the family 'zebra'"),
        (["okapi"], "the model_type 'okapi'"),
        (["quagga"], "the GGUF architecture 'quagga'"),
        (["lion", "--model-type", "okapi"], "the model_type 'okapi'"),
    ],
)
def test_name_that_an_installed_family_has_is_refused_with_who_has_it(
    arguments: list[str], what: str, tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("acme-zebra", "2.1", family="zebra", model_types=("okapi",), gguf=("quagga",))
    into = tmp_path / "into"
    into.mkdir()
    line = refused(capsys, *arguments, "--into", str(into))
    assert f"acme-zebra 2.1 serves {what}" in line
    assert held(into) == []
    # One that nobody has is written all the same.
    write("lion", into)


def test_package_of_that_name_without_a_family_is_refused(
    tmp_path: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("fuel-zebra", "3.0", groups={})
    assert "fuel-zebra 3.0 is installed" in refused(capsys, "zebra", "--into", str(tmp_path))


def test_second_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("zebra", tmp_path)
    (path / "README.md").write_text("mine")
    before = held(tmp_path)
    line = refused(capsys, "zebra", "--into", str(tmp_path))
    assert "nothing or an empty folder expected" in line
    assert str(path) in line
    assert (path / "README.md").read_text() == "mine"
    assert held(tmp_path) == before


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "fuel-zebra").mkdir()
    assert (write("zebra", tmp_path) / "pyproject.toml").exists()


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_what_is_no_folder_is_left_alone(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, elsewhere = tmp_path / "fuel-zebra", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if what == "a file":
        target.write_text("mine")
    else:
        target.symlink_to(elsewhere)
    assert f"found {what}" in refused(capsys, "zebra", "--into", str(tmp_path))
    assert held(tmp_path) == ["elsewhere", "fuel-zebra"]


def test_place_that_is_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "found a file" in refused(capsys, "zebra", "--into", str(tmp_path / "file"))
    assert "found nothing" in refused(capsys, "zebra", "--into", str(tmp_path / "nowhere"))
    assert "--into" in refused(capsys, "zebra", "--into", str(tmp_path / "file" / "below"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "can write to" in refused(capsys, "zebra", "--into", str(tmp_path))
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_what_the_system_forbids_is_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*_: Any, **__: Any) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.mkdtemp", forbidden)
    line = refused(capsys, "zebra", "--into", str(tmp_path))
    assert os.strerror(number) in line
    assert "can write to with --into" in line


@pytest.mark.parametrize("after", [0, 1, 9, len(scaffold.FILES) - 1])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_package_that_could_not_be_finished(
    after: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, written = Path.write_text, 0

    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        nonlocal written
        written += 1
        if written > after:
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises((NewFamilyError, KeyboardInterrupt)) as caught:
        scaffold.new_family(names_of("zebra"), tmp_path)
    assert isinstance(error, KeyboardInterrupt) or "free some room" in str(caught.value)
    assert written == after + 1
    assert held(tmp_path) == []


def test_folder_that_is_filled_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        target.mkdir()
        (target / "mine").touch()
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert "meanwhile" in refused(capsys, "zebra", "--into", str(tmp_path))
    assert held(tmp_path) == ["fuel-zebra", "fuel-zebra/mine"]


def test_folders_have_the_permissions_that_folders_have_here(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = write("zebra", tmp_path)
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode == (path / "tests").stat().st_mode


def test_writing_a_package_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from fuel_core import cli; assert not cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "new-family", "zebra", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
