"""`fuel` at a terminal (a real one, by the pty module), and a family slow enough to be interrupted."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from plugin_site import Site

ROOT = Path(__file__).resolve().parent.parent

# A toy that takes its time, so that a key pressed during a reply arrives during the reply.
SLOW_PLUGIN = """
import dataclasses, os, pathlib, time
import toy_family
from fuel_core.families import hookimpl

class Slow(toy_family.ToyBackbone):
    def decode_final_norm_and_head(self, h):
        if "TOY_BEGUN" in os.environ:
            pathlib.Path(os.environ["TOY_BEGUN"]).touch()
        time.sleep(0.02)
        return super().decode_final_norm_and_head(h)

@hookimpl
def register_families(register):
    register(dataclasses.replace(toy_family.TOY_FAMILY, build=Slow))
"""
"""It makes the file TOY_BEGUN names, once it computes."""


class Terminal:
    """A process at a terminal of its own. What it prints arrives in `seen`."""

    def __init__(self, arguments: list[str], env: dict[str, str], stdout: Path | None = None) -> None:
        # The process takes the terminal as its own, so that Ctrl-C reaches it.
        code = (
            "import fcntl, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "from fuel_core.cli import main\nsys.exit(main(sys.argv[1:]))"
        )
        self.master, slave = pty.openpty()
        out = slave if stdout is None else os.open(stdout, os.O_WRONLY | os.O_CREAT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=slave,
            stdout=out,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        for descriptor in {slave, out}:
            os.close(descriptor)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, again: str | None = None) -> str:
        """Read until `pattern` shows after what was waited for before; returns everything up to its end.

        `again` is typed once a second for as long as nothing comes.
        """
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            if not select.select([self.master], [], [], 60 if again is None else 1)[0]:
                if again is None or time.monotonic() > deadline:
                    raise AssertionError(f"{pattern!r} did not come; seen: {self.seen!r}")
                self.type(again)
                continue
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {pattern!r}; seen: {self.seen!r}") from None
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def ends(self) -> int:
        # What is left has to be read, or the process waits for somebody to read it.
        with suppress(OSError):
            while select.select([self.master], [], [], 60)[0]:
                data = os.read(self.master, 4096)
                if not data:
                    break
                self.seen += data.decode(errors="replace")
        return self.process.wait(timeout=60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@contextmanager
def terminal_of(site: Site, arguments: list[str], **options: Any) -> Iterator[Terminal]:
    path = os.pathsep.join([str(site.folder), str(ROOT), str(ROOT / "tests")])
    terminal = Terminal(
        arguments, {**os.environ, "PYTHONPATH": path, "TERM": "dumb", "OMP_NUM_THREADS": "1"}, **options
    )
    try:
        yield terminal
    finally:
        terminal.close()
