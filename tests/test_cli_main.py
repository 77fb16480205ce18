"""The command as a whole: help, exit codes, one-line errors, pipes and interrupts, and what importing it costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_site import Site

from fuel_core import cli, discovery
from fuel_core.errors import CheckpointNotFoundError

VERBS = ["generate", "chat", "inspect", "bench", "doctor", "families"]


def _run_python(code: str, *, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> object:
    """Make `fuel families` end in a given exception; whatever the verb, main() turns it into code and line."""

    def fail_with(error: BaseException) -> int:
        def families(*, load: bool = False) -> list[discovery.FamilyRecord]:
            raise error

        monkeypatch.setattr(discovery, "families", families)
        return cli.main(["families"])

    return fail_with


@pytest.mark.parametrize("arguments", [["--help"], [], *([verb, "--help"] for verb in VERBS), ["--version"]])
def test_help_and_version_exit_zero_and_import_no_torch(arguments: list[str]) -> None:
    done = _run_python(
        "import sys\nfrom fuel_core.cli import main\n"
        f"code = main({arguments!r})\n"
        "print(code, sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    assert done.stderr == "0 []\n"
    assert done.stdout.strip()


def test_help_groups_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [
        shown.index(word)
        for word in ("Run ─", "generate ", "chat ", "Look ─", "inspect ", "doctor ", "Extend ─", "families ")
    ]
    assert places == sorted(places)


def test_families_imports_neither_torch_nor_a_plugin(site: Site) -> None:
    site.install("fuel-zebra", family="zebra", source="raise SystemExit('imported')")
    done = _run_python(
        "import sys\nfrom fuel_core.cli import main\n"
        "code = main(['families'])\n"
        "print(code, sorted({'torch', 'fuel_zebra'} & set(sys.modules)), file=sys.stderr)",
        path=site.folder,
    )
    assert done.stderr == "0 []\n"
    assert "fuel-zebra 1.0" in done.stdout


def test_module_run_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fuel_core", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("fuel-core ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["families"], ["families", "--json"]])
def test_output_that_cannot_be_written_is_said_to_be_the_output(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fuel_core", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr == (
        "fuel: output: expected room for it, found 'No space left on device'; free some, or send it elsewhere\n"
    )
    assert done.returncode == 2


@pytest.mark.parametrize("arguments", [["--nope"], ["nope"], ["generate"], ["generate", "x", "--threads", "zero"]])
def test_usage_error_is_one_line_on_stderr_and_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fuel: ")
    assert captured.err.count("\n") == 1


def test_user_error_is_one_line_without_traceback_and_exits_2(
    failing: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(CheckpointNotFoundError("no checkpoint\n  at x")) == 2  # type: ignore[operator]
    assert capsys.readouterr().err == "fuel: no checkpoint at x\n"


def test_internal_error_exits_1_and_says_how_to_see_more(failing: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(ZeroDivisionError("division by zero")) == 1  # type: ignore[operator]
    captured = capsys.readouterr().err
    assert captured == "fuel: internal error, ZeroDivisionError: division by zero (FUEL_DEBUG=1 shows where)\n"


@pytest.mark.parametrize("error", [CheckpointNotFoundError("gone"), ZeroDivisionError("oops")])
def test_debug_setting_shows_the_traceback_and_keeps_the_code(
    failing: object, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUEL_DEBUG", "1")
    assert failing(error) == (1 if isinstance(error, ZeroDivisionError) else 2)  # type: ignore[operator]
    captured = capsys.readouterr().err
    assert "Traceback (most recent call last)" in captured
    assert captured.splitlines()[-1].startswith("fuel: ")
    monkeypatch.setenv("FUEL_DEBUG", "0")
    failing(error)  # type: ignore[operator]
    assert "Traceback" not in capsys.readouterr().err


def test_warning_of_ours_is_one_line_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def families(*, load: bool = False) -> list[discovery.FamilyRecord]:
        warnings.warn("a plugin\nis odd", discovery.FamilyWarning, stacklevel=2)
        warnings.warn("elsewhere", RuntimeWarning, stacklevel=2)
        return []

    others: list[str] = []
    monkeypatch.setattr(discovery, "families", families)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        usual = warnings.showwarning = lambda message, *_: others.append(str(message))
        assert cli.main(["families"]) == 0
        assert warnings.showwarning is usual
    assert capsys.readouterr().err == "fuel: warning: a plugin is odd\n"
    assert others == ["elsewhere"]


def test_interrupt_exits_130_without_a_word() -> None:
    done = _run_python(
        "import os, signal, sys\nfrom fuel_core import discovery\nfrom fuel_core.cli import main\n"
        "discovery.families = lambda load: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(['families']))"
    )
    assert done.returncode == 130
    assert done.stderr == ""
    assert signal.SIGINT.value + 128 == 130


def test_interrupt_exits_130_while_the_command_is_being_imported() -> None:
    done = _run_python(
        "import os, signal, sys\nfrom fuel_core.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(main(['families']))"
    )
    assert done.returncode == 130
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["families", "--json"], ["families"], ["--help"]])
def test_closed_pipe_is_silent(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fuel_core", *arguments], stdout=write_end, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to\n99"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
        ImportError("libx.so: failed to map segment from shared object"),
        ImportError("libx.so: cannot allocate memory in static TLS block"),
    ],
    ids=["python", "cpu", "gpu", "library", "thread storage"],
)
def test_memory_that_runs_out_is_one_line_of_the_user(
    failing: Callable[[BaseException], int], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert failing(error) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "memory: expected room" in said[0]
    assert failing(RuntimeError("another")) == 1
    assert failing(ImportError("another")) == 1
