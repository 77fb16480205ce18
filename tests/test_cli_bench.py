"""fuel bench: its picture, what is refused before anything is measured, and what stands in the report beside it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_code import FakeBuilds
from plugin_site import Site
from toy_family import install_toy_family, write_toy_checkpoint

from fuel_core import cli
from fuel_core.cli import bench_plot
from fuel_core.plan_backends import recording

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (the bench extra)"
)


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    install_toy_family(site)
    # A name that matplotlib would read as a formula, and a wrong one.
    return str(write_toy_checkpoint(tmp_path / r"toy $\no_such{"))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures as they are saved."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig

    def keep(self: Any, *arguments: Any, **options: Any) -> None:
        kept.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def _refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, file: Path) -> str:
    """The one line of a refusal; nothing may be loaded for it."""
    loaded: list[str] = []
    monkeypatch.setattr("fuel_core.llm.open_checkpoint", loaded.append)
    assert cli.main(["bench", model, "--plot", str(file)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, loaded) == ("", [])
    assert captured.err.startswith("fuel: --plot: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("out.bmp", "a name ending in .png, .svg, .pdf expected, found"),
        ("out", "a name ending in .png, .svg, .pdf expected, found"),
        ("no/such/out.png", "a file in a folder that is there expected"),
        ("folder.png", "found the folder"),
        ("a_file/out.png", "a file in a folder that is there expected"),
    ],
)
def test_a_picture_that_cannot_be_saved_is_refused_before_anything_is_measured(
    file: str,
    said: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "a_file").touch()
    line = _refused(capsys, monkeypatch, model, tmp_path / file)
    assert said in line
    assert file in line or "folder" in line


def test_a_place_without_permission_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asked for, not tried: who runs the tests may be allowed everything.
    monkeypatch.setattr("os.access", lambda place, mode: False)
    assert "without permission" in _refused(capsys, monkeypatch, model, tmp_path / "out.png")


def test_without_matplotlib_the_line_says_what_to_install(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert 'pip install "fuel-core[bench]"' in _refused(capsys, monkeypatch, model, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_nothing_but_a_picture_imports_matplotlib() -> None:
    code = "import sys, fuel_core.cli.app, fuel_core.cli.bench, fuel_core.cli.bench_plot as p; p.sparkline([1.0])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('matplotlib' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "False\n"


@needs_matplotlib
def test_the_picture_shows_the_numbers_of_the_report(
    model: str, tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.png"
    arguments = ["bench", model, "--prompt", "w1 w2", "-n", "7", "--pairs", "3", "--plot", str(file), "--json"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plot"] == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "recorded_ms_per_token" not in report, "no native code, so D2 is the recorded plan"
    for side in ("d1", "d2"):
        assert len(report[f"{side}_ms_per_token"]) == 6  # the first token comes with the prompt
    upper, lower = figures[0].axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in upper.get_lines()}
    assert drawn == {
        "D1": pytest.approx(report["d1_ms_per_token"], abs=1e-4),
        "D2 recorded": pytest.approx(report["d2_ms_per_token"], abs=1e-4),
    }
    ratios = [d1 / d2 for d1, d2 in zip(drawn["D1"], drawn["D2 recorded"], strict=True)]
    assert list(lower.get_lines()[0].get_ydata()) == pytest.approx(ratios)
    assert upper.get_title().startswith(Path(model).name)


@needs_matplotlib
def test_native_code_is_drawn_beside_the_recorded_plan(
    model: str, tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_shared", recording._Shared())
    FakeBuilds(monkeypatch)
    assert cli.main(["compile", model]) == 0
    capsys.readouterr()
    assert cli.main(["bench", model, "-n", "4", "--pairs", "2", "--plot", str(tmp_path / "a.svg"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_equal"] is True
    assert report["d2_stats"]["plan_backend"] == "compiled"
    assert [line.get_label() for line in figures[0].axes[0].get_lines()] == ["D1", "D2 compiled", "D2 recorded"]
    assert len(report["recorded_ms_per_token"]) == 3
    assert cli.main(["bench", model, "-n", "4", "--pairs", "1", "--json"]) == 0
    assert "recorded_ms_per_token" not in json.loads(capsys.readouterr().out), "two sides where nothing is drawn"


@needs_matplotlib
@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("SVG", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_says_what_is_written(suffix: str, begins: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"out.{suffix}"
    file.write_text("what was there before")
    bench_plot.check_plot(file)
    bench_plot.draw(file, "title", {"D1": [[0.02, 0.01]], "D2": [[0.01, 0.01]]}, "D1")
    assert file.read_bytes().startswith(begins)


def test_the_table_shows_each_side_with_its_spread(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", model, "-n", "12", "--pairs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("D1, every step fresh", "D2, plan held"))]
    assert len(rows) == 2
    for row in rows:
        assert len(row.split()[-1]) == 11, "a bar for each step"
        assert set(row.split()[-1]) <= set("▁▂▃▄▅▆▇█")


def test_bars_have_the_height_of_their_value() -> None:
    assert bench_plot.sparkline([0.0, 1.0, 2.0, 7.0, 8.0]) == "▁▂▃██"
    assert bench_plot.sparkline([3.0, 3.0]) == "▁▁"
    assert bench_plot.sparkline([1.0]) == "▁"
    many = bench_plot.sparkline([float(i // 10) for i in range(320)])
    assert len(many) == 32
    assert many == "".join(sorted(many))
