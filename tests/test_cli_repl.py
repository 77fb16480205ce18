"""`fuel chat` as a conversation: through a pipe, at a terminal (a real one, by the pty module), and its commands."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_site import Site
from terminal import SLOW_PLUGIN, terminal_of
from toy_family import TURNS, install_toy_family, write_toy_checkpoint

from fuel_core import cli
from fuel_core.cli.repl import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    install_toy_family(site)
    return str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str) -> Any:
    """Run `fuel chat MODEL` with given stdin; returns (exit code, stdout, stderr)."""

    def run(stdin: str | bytes, *options: str) -> tuple[int, str, str]:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = cli.main(["chat", model, "-n", "5", "--temperature", "0", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _report(piped: Any, stdin: str, *options: str) -> dict[str, Any]:
    code, out, _ = piped(stdin, "--json", *options)
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert isinstance(report, dict)
    return report


# -- through a pipe ----------------------------------------------------------------------------------


def test_pipe_answers_one_turn_a_line_with_replies_alone_on_stdout(
    piped: Any, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", model, "w5 w6", "-n", "5", "--temperature", "0"]) == 0
    single = capsys.readouterr().out
    code, out, err = piped("w5 w6\n\nw7\n")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0] + "\n" == single
    assert out.endswith("\n")
    assert "\x1b" not in out
    assert ">" not in out
    # The last line need not end in a newline, and lines may end as on Windows.
    assert piped("w5 w6\r\nw7")[1] == out


def test_four_turns_compute_only_what_is_new_in_each(piped: Any) -> None:
    report = _report(piped, "w5 w6\nw7\nw8 w9 w10\nw11\n")
    held = 0
    for number, turn in enumerate(report["turns"]):
        usage = turn["usage"]
        assert usage["cached_tokens"] == max(0, held - 1)
        assert (turn["stats"]["plans_built"], turn["stats"]["fresh_steps"]) == (int(number == 0), 1)
        held = usage["prompt_tokens"] + usage["completion_tokens"]
    assert [turn["message"] for turn in report["turns"]] == ["w5 w6", "w7", "w8 w9 w10", "w11"]
    # The last id of a reply, its end, the user's marker, words and end, and the reply's marker.
    new = [turn["usage"]["prompt_tokens"] - turn["usage"]["cached_tokens"] for turn in report["turns"]]
    assert new == [5, 6, 8, 6]
    assert report["usage"]["prompt_tokens"] - report["usage"]["cached_tokens"] == sum(new)
    assert report["usage"]["completion_tokens"] == 20
    assert report["stats"]["plans_built"] == 1


def test_json_is_one_object_a_session_with_turns_and_messages(piped: Any) -> None:
    report = _report(piped, "w5\nw6\n", "--system", "w9", "--explain-plan")
    assert [message["role"] for message in report["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn["text"] for turn in report["turns"]] == [m["content"] for m in report["messages"][2::2]]
    assert [len(turn["token_ids"]) for turn in report["turns"]] == [5, 5]
    assert report["refused"] == 0
    assert report["plan_events"]
    assert _report(piped, "")["turns"] == []


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_logprobs_of_a_conversation_are_said_to_be_left_out(piped: Any, options: tuple[str, ...]) -> None:
    code, _, err = piped("w1\n", "--logprobs", "1", *options)
    assert code == 0
    assert err.count("--logprobs: not reported in a conversation; give a PROMPT and --json\n") == 1


def test_messages_of_several_lines(piped: Any) -> None:
    report = _report(
        piped, 'w1\\\nw2\\\nw3\n"""w4\nw5"""\n"""\n\n w6 \n\n"""\n"""w7"""\n//w8\n"""/reset"""\nw9\\\n', "-n", "1"
    )
    told = ["w1\nw2\nw3", "w4\nw5", "\n w6 \n", "w7", "/w8", "/reset", "w9"]
    assert [turn["message"] for turn in report["turns"]] == told


def test_input_that_ends_inside_quotes_is_not_sent(piped: Any) -> None:
    code, out, err = piped('"""w1\nw2\n')
    assert (code, out) == (2, "")
    assert err == 'fuel: input: """ expected at the end of the message, found the end of the input; nothing was sent\n'


def test_line_that_is_no_text_costs_itself_alone(piped: Any) -> None:
    code, out, err = piped(b"w1\n\xff\xfe\nw2\n")
    assert code == 2
    assert len(out.splitlines()) == 2
    assert err == "fuel: stdin: UTF-8 text expected, found byte 0xff; convert the line\n"


def test_message_that_is_too_long_costs_one_line_and_changes_nothing(piped: Any) -> None:
    code, out, err = piped("w1\n" + "w2 " * 200 + "\nw3\n")
    assert code == 2
    assert err.count("\n") == 1
    assert "200" not in out
    assert re.search(r"prompt has 2\d\d tokens, the limit is 128 positions", err)
    assert out == piped("w1\nw3\n")[1]


def test_full_context_drops_whole_turns_and_says_so(piped: Any) -> None:
    code, out, err = piped("w1 w2 w3 w4 w5 w6 w7 w8\n" * 12, "--system", "w9")
    assert code == 0
    assert len(out.splitlines()) == 12
    notices = err.splitlines()
    assert notices
    assert all(re.fullmatch(r"fuel: the context of 128 tokens is full: .* dropped", line) for line in notices)
    report = _report(piped, "w1 w2 w3 w4 w5 w6 w7 w8\n" * 12, "--system", "w9")
    dropped = sum(turn["dropped_turns"] for turn in report["turns"])
    assert len(notices) == sum(turn["dropped_turns"] > 0 for turn in report["turns"])
    assert report["messages"][0] == {"role": "system", "content": "w9"}
    assert len(report["messages"]) == 1 + 2 * (12 - dropped)


def test_dash_reads_one_message_from_all_of_stdin(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\nw6\n"))
    assert cli.main(["chat", model, "-", "-n", "5", "--temperature", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == 5


# -- commands ----------------------------------------------------------------------------------------


def test_help_names_every_command_and_nothing_reaches_stdout(piped: Any) -> None:
    code, out, err = piped("/help\n/stats\n/system\n/reset\n/exit\nw1\n")
    assert (code, out) == (0, "")
    assert all(line in err for line in COMMANDS.values())
    assert "0 turns, 0 of 128 positions" in err
    assert "No system message." in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/nope", "/nope: one of /reset, /system, /save, /load, /stats, /help, /exit expected"),
        ("/Reset", "/Reset: one of"),
        ("/", "/: one of"),
        ("/save", "/save: a file expected, found none"),
        ("/load  ", "/load: a file expected, found none"),
        ("/reset everything", "/reset: nothing expected after it, found 'everything'"),
        ("/load no-such-file", "no-such-file: expected a saved conversation, found no such file"),
        ("/save no-such-folder/x", "no-such-folder/x: expected a place"),
    ],
)
def test_refused_command_is_one_line_and_the_session_goes_on(
    line: str, told: str, piped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = piped(f"w1\n{line}\nw2\n")
    assert code == 2
    assert err.startswith(f"fuel: {told}")
    assert err.count("\n") == 1
    assert out == piped("w1\nw2\n")[1]


def test_system_reset_save_and_load(piped: Any, tmp_path: Path) -> None:
    file = tmp_path / "with space.json"
    report = _report(piped, f"/system w9\nw1\n/save {file}\n/reset\nw2\n/load {file}\nw1\n")
    first, second, third = report["turns"]
    saved = json.loads(file.read_text())["messages"]
    assert [m["content"] for m in saved] == ["w9", "w1", first["text"]]
    assert report["messages"][:3] == saved
    # w2, w9, </s>: the system message stays through a reset; w0, w2, </s>, w1.
    assert second["usage"]["prompt_tokens"] == 7
    assert third["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] + 5 + 1 + 4
    without = _report(piped, '/system w9\n/system ""\nw1\n')
    assert without["messages"][0]["role"] == "user"


def test_bad_file_leaves_the_conversation(piped: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"messages": [{"role": "user"')
    code, out, err = piped(f"w1\n/load {file}\nw2\n")
    assert code == 2
    assert "bad.json: expected a saved conversation in JSON" in err
    assert err.count("\n") == 1
    assert out == piped("w1\nw2\n")[1]


def test_stats_count_what_came_from_the_cache(piped: Any) -> None:
    _, _, err = piped("w5 w6\nw7\n/stats\n")
    assert "2 turns, 20 of 128 positions; prompts of 20 tokens, 9 of them from the cache; 10 tokens generated" in err
    assert "built 1" in err


# -- at a terminal -----------------------------------------------------------------------------------


def test_terminal_prompts_keeps_history_and_ctrl_c_ends_the_reply_alone(site: Site, tmp_path: Path) -> None:
    site.install("fuel-toy", family="toy", module="fuel_toy", source=SLOW_PLUGIN)
    model = str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))
    file = tmp_path / "talk.json"
    options = ["-n", "100", "--temperature", "0", "--plan", "off", "--ignore-eos"]
    with terminal_of(site, ["chat", model, *options]) as terminal:
        terminal.wait_for(r"/help lists the commands, Ctrl-D leaves\.\s+> ")
        terminal.type("w5 w6\n")
        terminal.wait_for(r"w5 w6\s+w\d+")
        terminal.type("\x03")
        terminal.wait_for(r"\(interrupted; the reply stays as far as it came\)\s+> ")
        terminal.type("\x03")
        # Python's line editing sleeps through a signal that comes after it printed the prompt and before it waits.
        terminal.wait_for(r"\(Ctrl-D leaves\)\s+> ", again="\x03")
        terminal.type(f"/save {file}\n")
        terminal.wait_for(r"Saved 1 turn to .*> ")
        partial = json.loads(file.read_text())["messages"]
        assert [message["role"] for message in partial] == ["user", "assistant"]
        assert 1 <= len(partial[1]["content"].split()) < 100
        # Up three times: past two commands to the message.
        terminal.type("/nope\n")
        terminal.wait_for(r"fuel: /nope: one of .*> ")
        terminal.type("\x1b[A\x1b[A\x1b[A\n")
        terminal.wait_for(r"w5 w6\s+w\d+")
        terminal.type("\x03")
        terminal.wait_for(r"\(interrupted.*> ")
        terminal.type("/stats\n")
        terminal.wait_for(r"2 turns.*> ")
        terminal.type('"""w1\n')
        terminal.wait_for(r"\. ")
        terminal.type("\x04")
        terminal.wait_for(r"found the end of the input; nothing was sent\s+> ")
        terminal.type("\x04")
        assert terminal.ends() == 0
        assert "\x1b[3" not in terminal.seen


def test_terminal_input_with_stdout_elsewhere_writes_replies_alone_there(site: Site, tmp_path: Path) -> None:
    install_toy_family(site)
    model = str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))
    out = tmp_path / "out.txt"
    with terminal_of(site, ["chat", model, "-n", "5", "--temperature", "0"], stdout=out) as terminal:
        terminal.wait_for(r"> ")
        terminal.type("w5\n")
        terminal.wait_for(r"\(--max-new-tokens 5 reached\)\s+> ")
        terminal.type("/exit\n")
        assert terminal.ends() == 0
    assert re.fullmatch(r"w\d+( w\d+){4}\n", out.read_text())


def test_interrupt_through_a_pipe_ends_everything(site: Site, tmp_path: Path) -> None:
    site.install("fuel-toy", family="toy", module="fuel_toy", source=SLOW_PLUGIN)
    model = str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))
    path = os.pathsep.join([str(site.folder), str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "fuel_core", "chat", model, "--plan", "off", "--ignore-eos", "--temperature", "0"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"w5 w6\nw7\n")
        process.stdin.flush()
        assert process.stdout.read(1) == b"w"
        process.send_signal(2)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""
        assert process.stdout.read().count(b"\n") == 1
