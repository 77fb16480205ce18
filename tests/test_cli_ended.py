"""Whole commands that are ended, cut off, or run out of room: what is said, what is left, and what is whole."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from plugin_site import Site
from terminal import SLOW_PLUGIN, terminal_of
from toy_family import TURNS, install_toy_family, write_toy_checkpoint

from fuel_core.code_cache import CodeCache

ROOT = Path(__file__).resolve().parent.parent
LONG = ["-n", "100", "--temperature", "0", "--plan", "off", "--ignore-eos"]

# Whatever a command was doing, a process of its own shows how it ends.
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def model(site: Site, tmp_path: Path) -> str:
    """A checkpoint of a family that takes 20 ms a token."""
    site.install("fuel-toy", family="toy", module="fuel_toy", source=SLOW_PLUGIN)
    write_toy_checkpoint(tmp_path / "plain")
    return str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))


@pytest.fixture
def plain(model: str) -> str:
    """The same, without a chat template, of which `fuel generate` would remind."""
    return str(Path(model).with_name("plain"))


@pytest.fixture
def start(site: Site, tmp_path: Path) -> Iterator[Start]:
    """Start `fuel` with these arguments, with a code cache of its own."""
    started: list[subprocess.Popen[bytes]] = []
    path = os.pathsep.join([str(site.folder), str(ROOT), str(ROOT / "tests")])

    def run(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fuel_core", *arguments],
            stdin=subprocess.PIPE,
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def first_of(process: subprocess.Popen[bytes]) -> None:
    """Wait for the first byte of a reply."""
    assert process.stdout is not None
    assert process.stdout.read(1) in (b"w", b" ")


def processes_of(folder: Path) -> list[int]:
    """Living processes that were started with this folder as their code cache."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            number = int(entry.name)
            if f"FUEL_CACHE={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found.append(number)
    return found


def wait_until(what: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# -- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_reply_that_is_ended_says_nothing_and_stays_as_far_as_it_came(
    verb: str, number: signal.Signals, model: str, plain: str, start: Start
) -> None:
    process = start(verb, plain if verb == "generate" else model, "w5 w6", *LONG)
    first_of(process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, b"")
    assert 0 <= out.count(b" ") < 99


@pytest.mark.parametrize("arguments", [["generate", "w5", *LONG, "--json"], ["bench", "-n", "50", "--json"]])
def test_a_report_that_is_ended_is_none(arguments: list[str], plain: str, start: Start, tmp_path: Path) -> None:
    verb, *rest = arguments
    begun = tmp_path / "begun"
    process = start(verb, plain, *rest, env={"TOY_BEGUN": str(begun)})
    wait_until(begun.exists)
    process.terminate()
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 143


def test_a_conversation_through_a_pipe_that_is_ended_says_nothing(model: str, start: Start) -> None:
    process = start("chat", model, *LONG)
    assert process.stdin is not None
    process.stdin.write(b"w5 w6\n")
    process.stdin.flush()
    first_of(process)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, b"")


def test_a_conversation_at_a_prompt_that_is_ended_leaves_the_terminal_as_it_was(site: Site, tmp_path: Path) -> None:
    """Line editing turns off echo and lines; whoever gets the terminal next has to find them on."""
    install_toy_family(site)
    folder = str(write_toy_checkpoint(tmp_path / "toy", template=TURNS))
    with terminal_of(site, ["chat", folder]) as terminal:
        usual = termios.tcgetattr(terminal.master)
        terminal.wait_for(r"/help lists the commands, Ctrl-D leaves\.\s+> ")
        wait_until(lambda: termios.tcgetattr(terminal.master) != usual)
        terminal.type("w5")
        terminal.wait_for("w5")
        terminal.process.terminate()
        assert terminal.ends() == 143
        assert "Traceback" not in terminal.seen
        assert termios.tcgetattr(terminal.master)[3] == usual[3]


def test_a_second_signal_does_not_wait_for_the_first(start: Start, site: Site, tmp_path: Path) -> None:
    stubborn = SLOW_PLUGIN.replace("time.sleep(0.02)", "STUBBORN()") + (
        "\nimport pathlib\n"
        "def STUBBORN():\n"
        f"    pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        except BaseException:\n"
        f"            pathlib.Path({str(tmp_path / 'first')!r}).touch()\n"
    )
    site.install("fuel-toy", family="toy", module="fuel_toy", source=stubborn)
    process = start("generate", str(write_toy_checkpoint(tmp_path / "toy")), "w5", *LONG)
    wait_until((tmp_path / "begun").exists)
    process.terminate()
    wait_until((tmp_path / "first").exists)
    process.terminate()
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_a_signal_that_is_ignored_stays_ignored(plain: str, start: Start) -> None:
    """As under nohup."""
    process = start(
        "generate", plain, "w5", *LONG, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None
    )
    first_of(process)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.count(b" ") > 90


# -- builds -------------------------------------------------------------------------------------------------------

# What is written before there is code: the recorded step, and which code is wanted for it.
NOT_CODE = ("recording", "index")


def test_a_compile_that_is_ended_ends_its_compilers_and_leaves_no_code(
    site: Site, start: Start, tmp_path: Path
) -> None:
    install_toy_family(site)
    cache = tmp_path / "cache"
    process = start(
        "compile", str(write_toy_checkpoint(tmp_path / "toy")), env={"FUEL_CACHE": str(cache), "FUEL_NATIVE": "0"}
    )
    # The build has begun to write.
    wait_until(lambda: any(path.is_file() for path in cache.glob("v1/.build-*/**/*")))
    assert len(processes_of(cache)) > 1
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"Traceback" not in err
    assert processes_of(cache) == []
    left = {path.name for path in (cache / "v1").iterdir()} - {".locks"}
    kept = CodeCache(cache)
    assert all((entry := kept.find(key)) is not None and entry.about["kind"] in NOT_CODE for key in left), left


def test_a_background_build_outlives_its_command_and_is_not_trusted_when_killed(
    site: Site, start: Start, tmp_path: Path
) -> None:
    """Its code serves the next command; what it has not finished is none."""
    site.install("fuel-toy", family="toy", module="fuel_toy", source=SLOW_PLUGIN)
    cache = tmp_path / "cache"
    settings = {"FUEL_CACHE": str(cache), "FUEL_NATIVE": "0", "FUEL_COMPILE": "1"}
    options = ["-n", "110", "--temperature", "0", "--ignore-eos"]
    folder = str(write_toy_checkpoint(tmp_path / "toy"))
    process = start("generate", folder, "w5", *options, env=settings)
    wait_until(lambda: any(path.is_file() for path in cache.glob("v1/.build-*/**/*")))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode in (0, 143)
    (child,) = [pid for pid in processes_of(cache) if os.getsid(pid) == pid]
    os.killpg(child, signal.SIGKILL)
    wait_until(lambda: not processes_of(cache))
    kept = CodeCache(cache)
    for key, _, _ in kept.entries():
        entry = kept.find(key)
        assert entry is not None
        assert entry.about["kind"] in NOT_CODE
    # The next command finds nothing to trust, and needs nothing.
    again = start("generate", folder, "w5", "-n", "5", "--json", env={**settings, "FUEL_COMPILE": "0"})
    out, err = again.communicate(timeout=60)
    assert (again.returncode, err) == (0, b"")
    assert json.loads(out)["stats"]["plan_backend"] == "recorded"


# -- output that nobody takes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--json"], ["--completions", "2"]])
@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_closed_pipe_is_silent(verb: str, more: list[str], site: Site, start: Start, tmp_path: Path) -> None:
    install_toy_family(site)
    read_end, write_end = os.pipe()
    process = start(
        verb, str(write_toy_checkpoint(tmp_path / "toy", template=TURNS)), "w5 w6", *LONG, *more, stdout=write_end
    )
    os.close(write_end)
    os.close(read_end)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Traceback" not in err
    assert b"Broken pipe" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_is_one_line(more: list[str], site: Site, start: Start, tmp_path: Path) -> None:
    install_toy_family(site)
    with open("/dev/full", "w") as full:
        process = start("generate", str(write_toy_checkpoint(tmp_path / "toy")), "w5", *LONG, *more, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (
        err == b"fuel: output: expected room for it, found 'No space left on device'; free some, or send it elsewhere\n"
    )


# -- files and memory that end ------------------------------------------------------------------------------------


def limited(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


def test_a_cache_without_room_costs_a_line_and_the_reply_comes(site: Site, start: Start, tmp_path: Path) -> None:
    """No file may pass 2 kB: a disk that fills up while a recording is stored, and while code is built."""
    install_toy_family(site)
    folder, cache = str(write_toy_checkpoint(tmp_path / "toy")), tmp_path / "cache"
    settings = {"FUEL_CACHE": str(cache), "FUEL_NATIVE": "0"}
    for plan in ("recorded", "compiled"):
        process = start(
            "generate",
            folder,
            "w5",
            "-n",
            "5",
            "--json",
            "--plan",
            plan,
            env=settings,
            preexec_fn=limited(resource.RLIMIT_FSIZE, 2048),
        )
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out)["stats"]["plan_backend"] == "recorded"
        assert b"Traceback" not in err
    kept = CodeCache(cache)
    assert all(kept.find(key) is not None for key, _, _ in kept.entries())
    assert not list(cache.glob("v1/.aside-*"))


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_memory_that_is_not_there_is_one_line(verb: str, site: Site, start: Start, tmp_path: Path) -> None:
    """The cache asked for is larger than the address space that is left."""
    install_toy_family(site)
    folder = write_toy_checkpoint(tmp_path / "toy")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 40}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["w5"] if verb == "generate" else []
    process = start(
        verb, str(folder), *arguments, "-n", "5", "--max-seq-len", "400000000",
        preexec_fn=limited(resource.RLIMIT_AS, 24 << 30),
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert out == b""
    assert err.count(b"\n") == 1
    assert b"max-seq-len" in err or b"max_seq_len" in err
