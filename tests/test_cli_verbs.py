"""generate, chat, inspect and bench over a toy family: what goes where, and what the numbers say."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from plugin_site import Site
from toy_backbone import toy
from toy_family import install_toy_family, write_toy_checkpoint, write_toy_config

from fuel_core import SamplingParams, cli, load
from fuel_core.cli.reply import prompt_text, show_progress


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


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_logprobs_without_json_are_said_to_be_left_out(
    verb: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, model, "w1", "-n", "2", "--logprobs", "1"]) == 0
    assert capsys.readouterr().err.count("--logprobs: printed with --json only\n") == 1
    assert cli.main([verb, model, "w1", "-n", "2", "--logprobs", "1", "--json"]) == 0
    assert "--logprobs" not in capsys.readouterr().err


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


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_completions_are_what_single_requests_with_their_seeds_give(
    verb: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [verb, model, "w1 w2 w3", "-n", "6", "--temperature", "2"]
    report = _json(capsys, *drawn, "--seed", "7", "--completions", "3")
    replies = report["completions"]
    assert [reply["seed"] for reply in replies] == [7, 8, 9]
    assert sum(reply["stats"]["fresh_steps"] for reply in replies) == 1  # one prompt for all
    for reply in replies:
        alone = _json(capsys, *drawn, "--seed", str(reply["seed"]))
        assert (reply["text"], reply["token_ids"]) == (alone["text"], alone["token_ids"])
    assert len({reply["text"] for reply in replies}) > 1
    assert cli.main([*drawn, "--seed", "7", "--completions", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(reply["text"] + "\n" for reply in replies)
    heads = [line for line in captured.err.splitlines() if line.startswith("-- ")]
    assert [line.partition(":")[0] for line in heads] == ["-- 1 of 3, seed 7", "-- 2 of 3, seed 8", "-- 3 of 3, seed 9"]


def test_one_completion_is_a_list_of_one_and_greedy_ones_are_said_to_be_the_same(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    single = _json(capsys, "generate", model, "w1 w2", "-n", "4")
    (only,) = _json(capsys, "generate", model, "w1 w2", "-n", "4", "--completions", "1")["completions"]
    assert only["token_ids"] == single["token_ids"]
    assert only["tokens_per_second"] is None  # nothing was measured between two tokens
    assert cli.main(["generate", model, "w1 w2", "-n", "4", "--completions", "2", "--explain-plan"]) == 0
    captured = capsys.readouterr()
    assert captured.out == (single["text"] + "\n") * 2
    assert "Nothing was drawn, so the replies are the same" in captured.err
    assert "fuel plan: step 1 ABSENT" in captured.err


@pytest.mark.parametrize("arguments", [["generate", "w1", "--completions", "0"], ["chat", "--completions", "2"]])
def test_completions_that_cannot_be_are_a_user_error(
    model: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([arguments[0], model, *arguments[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--completions" in captured.err
    assert captured.err.count("\n") == 1


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
        ("--device", "nowhere", "nowhere"),
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


def test_inspect_shows_the_format_of_each_weight_and_what_it_loses_where_asked(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _json(capsys, "inspect", model)["weights"]
    assert {(entry["stored"], entry["format"], entry["relative_error"]) for entry in plain} == {
        ("float32", "f32", None)
    }
    packed = _json(capsys, "inspect", model, "--weights", "int8", "--errors")["weights"]
    assert [entry["parameter"] for entry in packed] == [entry["parameter"] for entry in plain]
    for entry in packed:
        assert entry["format"] == "int8"
        assert 1e-4 < entry["relative_error"] < 0.02
    assert cli.main(["inspect", model, "--weights", "int8", "--errors"]) == 0
    shown = capsys.readouterr().out
    assert f"weights: {len(packed)} stored as float32, kept as int8; relative error 0.0" in shown
    four = _json(capsys, "inspect", model, "--weights", "int4")["weights"]
    fallen = [entry for entry in four if entry["format"] != "int4"]
    assert {entry["format"] for entry in fallen} <= {"int8"}
    assert all(entry["asked"] == "int4" and "multiple of 32" in entry["reason"] for entry in fallen)
    assert cli.main(["inspect", model, "--weights", "int3"]) == 2
    assert "expected one of auto, f32" in capsys.readouterr().err


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


# -- sampling and prompt sources ---------------------------------------------------------------------


def test_generate_takes_every_sampling_parameter_by_its_name(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.1,
        "seed": 7,
        "logprobs": 2,
    }
    assert {*flags, "logit_bias"} == {field.name for field in fields(SamplingParams)}
    arguments = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    arguments += ["--logit-bias", "5=2.5", "--logit-bias", "9=-inf"]
    report = _json(capsys, "generate", model, "w1 w2 w3", "-n", "8", *arguments)
    llm = load(model)
    expected = llm.generate("w1 w2 w3", 8, **flags, logit_bias={5: 2.5, 9: float("-inf")})  # type: ignore[arg-type]
    assert report["token_ids"] == expected.token_ids
    assert report["seed"] == 7
    assert [len(entry["top"]) for entry in report["logprobs"]] == [2] * 8
    assert [entry["token"] for entry in report["logprobs"]] == [f"w{i}" for i in report["token_ids"]]
    assert expected.logprobs is not None
    assert report["logprobs"][3]["logprob"] == expected.logprobs[3].logprob


def test_generate_json_names_the_seed_that_was_used(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = _json(capsys, "generate", model, "w1", "-n", "8", "--temperature", "1")
    again = _json(capsys, "generate", model, "w1", "-n", "8", "--temperature", "1", "--seed", str(drawn["seed"]))
    assert again["token_ids"] == drawn["token_ids"]
    greedy = _json(capsys, "generate", model, "w1", "-n", "2")
    assert greedy["seed"] is None
    assert "logprobs" not in greedy


def test_ignore_eos_goes_on_past_a_stop_id(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    biased = ["--logit-bias", "65=100"]
    stopped = _json(capsys, "generate", model, "w1", "-n", "4", *biased)
    assert (stopped["finish_reason"], stopped["token_ids"]) == ("stop", [65])
    going = _json(capsys, "generate", model, "w1", "-n", "4", *biased, "--ignore-eos")
    assert (going["finish_reason"], going["token_ids"]) == ("length", [65] * 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--top-k", "-2"], "top_k: 1 or more expected"),
        (["--temperature", "nan"], "temperature: a finite number"),
        (["--logit-bias", "5"], "--logit-bias: ID=NUMBER expected, found '5'"),
        (["--logit-bias", "500=1"], "logit_bias: ids in 0..66 expected, found 500"),
        (["--file", "absent.txt"], "one source expected"),
    ],
)
def test_sampling_option_that_cannot_be_used_is_one_line(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(["generate", model, "w1", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("fuel: ")
    assert said in line


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"w1 w2\n", "w1 w2"), (b"w1 w2", "w1 w2"), (b"w1 w2\n\n", "w1 w2\n"), ("\ufeffé\r\n".encode(), "é")],
)
def test_prompt_from_a_file_or_stdin_loses_one_newline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    assert prompt_text(None, file) == prompt
    for given in (None, "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        assert prompt_text(given) == prompt
    assert prompt_text("w1\n") == "w1\n"  # an argument is taken as it is


def test_prompt_file_is_used_and_bytes_that_are_no_text_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("w1 w2 w3\n")
    by_file = _json(capsys, "generate", model, "--file", str(file), "-n", "4")
    assert by_file["token_ids"] == _json(capsys, "generate", model, "w1 w2 w3", "-n", "4")["token_ids"]
    file.write_bytes(b"w1 \xff")
    assert cli.main(["generate", model, "--file", str(file)]) == 2
    assert "UTF-8 text expected, found byte 0xff at offset 3" in capsys.readouterr().err
    assert cli.main(["generate", model, "--file", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_empty_prompt_is_bos_alone_or_a_user_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _json(capsys, "generate", model, "", "-n", "2")["usage"]["prompt_tokens"] == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert _json(capsys, "generate", model, "-n", "2")["usage"]["prompt_tokens"] == 1
    settings = Path(model) / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "</s>"}))
    assert cli.main(["generate", model, ""]) == 2
    assert "no BOS" in capsys.readouterr().err


def test_progress_is_shown_for_a_long_prompt_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_progress() is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for total, shown in ((5000, True), (1500, False)):
        show = show_progress()
        assert show is not None
        for done in range(512, total, 512):
            show(done, total)
        show(total, total)
        err = capsys.readouterr().err
        assert ("prompt: 1024 of 5000 tokens" in err) is shown
        assert err.endswith("\x1b[K") is shown
        assert (err == "") is not shown
