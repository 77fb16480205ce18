"""generate, chat, inspect and bench over a toy family: what goes where, and what the numbers say."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_site import Site
from toy_backbone import toy
from toy_family import install_toy_family, write_toy_checkpoint, write_toy_config

from fuel_core import cli


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    install_toy_family(site)
    return str(write_toy_checkpoint(tmp_path / "toy", template=True))


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("}\n")
    assert out.count("\n") == 1  # exactly one object and nothing beside it
    report = json.loads(out)
    assert isinstance(report, dict)
    return report


def test_generate_json_reports_text_tokens_and_a_plan_that_was_held(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _json(capsys, "generate", model, "w1 w2 w3", "-n", "12")
    assert report["finish_reason"] == "length"
    assert len(report["token_ids"]) == 12
    assert report["text"].split() == [f"w{i}" for i in report["token_ids"]]
    assert report["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "cached_tokens": 0, "total_tokens": 15}
    assert report["stats"]["plans_built"] == 1
    assert report["stats"]["rebinds"] == 10
    assert report["tokens_per_second"] > 0


def test_generate_prints_the_text_alone_on_stdout(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _json(capsys, "generate", model, "w1 w2 w3", "-n", "6")["text"]
    assert cli.main(["generate", model, "w1 w2 w3", "-n", "6"]) == 0
    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert "6 tokens (length)" in captured.err
    assert "built 1, rebinds 4" in captured.err
    assert "fuel chat" in captured.err  # this checkpoint has a template that generate does not apply


def test_generate_reads_the_prompt_from_stdin(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _json(capsys, "generate", model, "w1 w2 w3", "-n", "4")["token_ids"]
    for arguments in ([model], [model, "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2 w3\n"))
        assert _json(capsys, "generate", *arguments, "-n", "4")["token_ids"] == expected


def test_generate_plan_off_decodes_the_same_tokens_without_a_plan(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = _json(capsys, "generate", model, "w1 w2 w3", "-n", "8")
    fresh = _json(capsys, "generate", model, "w1 w2 w3", "-n", "8", "--plan", "off")
    assert fresh["token_ids"] == held["token_ids"]
    assert (fresh["stats"]["plans_built"], fresh["stats"]["rebinds"]) == (0, 0)
    assert held["stats"]["plans_built"] == 1


def test_generate_stops_before_a_stop_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = _json(capsys, "generate", model, "w1 w2 w3", "-n", "8")["text"].split()
    report = _json(capsys, "generate", model, "w1 w2 w3", "-n", "8", "--stop", words[3])
    assert report["finish_reason"] == "stop"
    assert report["text"].split() == words[:3]


def test_explain_plan_names_each_decision(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", model, "w1 w2 w3", "-n", "6", "--explain-plan"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fuel plan: ")]
    assert any("ABSENT (first_step)" in line for line in lines)
    assert any("KEPT" in line for line in lines)
    events = _json(capsys, "generate", model, "w1 w2 w3", "-n", "6", "--explain-plan")["plan_events"]
    assert [f"fuel plan: {event}" for event in events] == lines


def test_chat_applies_the_template_and_generate_does_not(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    chat = _json(capsys, "chat", model, "w5 w6", "-n", "6")
    as_rendered = _json(capsys, "generate", model, "w0 w5 w6 w1", "-n", "6")
    assert chat["usage"]["prompt_tokens"] == 4
    assert chat["token_ids"] == as_rendered["token_ids"]
    with_system = _json(capsys, "chat", model, "w5 w6", "--system", "w7", "-n", "6")
    assert with_system["usage"]["prompt_tokens"] == 6


def test_chat_without_a_template_is_a_user_error_that_names_the_way_out(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_toy_family(site)
    assert cli.main(["chat", str(write_toy_checkpoint(tmp_path / "plain")), "w1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no chat template" in captured.err
    assert "generate" in captured.err


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--dtype", "f99", "f99"),
        ("--weights", "f99", "f99"),
        ("--plan", "nope", "nope"),
        ("--family", "nope", "nope"),
        ("--max-seq-len", "2", "2"),
    ],
)
def test_wrong_option_value_is_a_user_error_that_names_it(
    model: str, option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", model, "w1 w2 w3", "-n", "2", option, value]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("fuel: ")
    assert named in captured.err.splitlines()[-1]


@pytest.mark.parametrize("verb", ["generate", "chat", "inspect", "bench"])
def test_missing_model_is_a_user_error(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["w1"] if verb in ("generate", "chat") else []
    assert cli.main([verb, str(tmp_path / "gone"), *prompt]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fuel: ")
    assert "gone" in captured.err


def test_inspect_json_says_sources_layers_sizes_and_who_serves(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "inspect", model, "--max-seq-len", "64", "--dtype", "bf16")
    assert (report["family"], report["package"], report["model_type"]) == ("toy", "fuel-toy 1.0", "toy")
    assert report["config"]["window"] == {"value": 5, "source": "config.json"}
    assert [layer["window"] for layer in report["layers"]] == [5, None, 5]
    assert [layer["rope_variant"] for layer in report["layers"]] == [0, 0, 0]
    parameters = sum(parameter.numel() for parameter in toy().parameters())
    assert report["has_weights"] is True
    assert report["parameters"]["count"] == parameters
    assert report["parameters"]["bytes_by_dtype"] == {"float32": 4 * parameters}
    # 3 layers, k and v, 2 heads of 20, 64 positions, 2 bytes each
    assert report["kv_cache"] == {"max_seq_len": 64, "dtype": "bfloat16", "bytes": 3 * 2 * 2 * 20 * 64 * 2}
    assert report["shape_key"]["components"]["config.hidden_size"] == 96
    assert "config.window" not in report["shape_key"]["components"]  # bound, so not part of the key


def test_inspect_config_only_folder_computes_sizes_and_says_so(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_toy_family(site)
    folder = str(write_toy_config(tmp_path / "bare"))
    report = _json(capsys, "inspect", folder)
    assert report["has_weights"] is False
    assert report["parameters"]["count"] == sum(parameter.numel() for parameter in toy().parameters())
    assert "no weights" in report["parameters"]["source"]
    assert cli.main(["inspect", folder]) == 0
    captured = capsys.readouterr()
    assert "no weights" in captured.err
    assert "hidden_size" in captured.out
    assert cli.main(["generate", folder, "w1"]) == 2


def test_bench_compares_both_paths_on_one_prompt(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, "bench", model, "--prompt", "w1 w2 w3", "--tokens", "8", "--pairs", "2")
    assert report["tokens_equal"] is True
    assert report["d1_stats"]["plans_built"] == 0
    assert report["d1_stats"]["fresh_steps"] == 3 * 8
    # One run builds the plan; the others, on the same cache, find it held: their one-token prompts rebind too.
    assert report["d2_stats"]["plans_built"] == 1
    assert report["d2_stats"]["rebinds"] == 6 + 2 * 8
    for name in ("d1_tokens_per_second", "d2_tokens_per_second", "d2_over_d1"):
        assert report[name] > 0
    assert cli.main(["bench", model, "--prompt", "w1 w2 w3", "--tokens", "4", "--pairs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "tokens equal" in shown
    assert "built 1" in shown


def test_bench_refuses_to_compare_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", model, "--plan", "off"]) == 2
    assert "'off'" in capsys.readouterr().err
