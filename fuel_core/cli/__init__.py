"""The `fuel` command: one module per verb; each parses, calls the library and prints.

This module turns outcomes into exit codes: 0 done, 1 a fault of ours, 2 the user's to mend, 130 interrupted, 143 ended
by SIGTERM (129 by SIGHUP). Importing it imports no torch, so `--help` and `families` answer at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

__all__ = ["main"]

_INTERNAL, _USER, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fuel` with `argv` (without the program's name; default: the process's) and return the exit code.

    Errors become one line on stderr. With FUEL_DEBUG=1 the traceback stands above it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _ending() as ending:
        try:
            code = _run(arguments)
        except _Ended:
            # A pipe that nobody reads would hold up the interpreter's own flush.
            _discard_stdout()
            code = 0
        except KeyboardInterrupt:  # while the command was still being imported
            code = _INTERRUPTED
    return 128 + ending.number if ending.number else code


class _Ended(BaseException):
    """SIGTERM or SIGHUP came: what is open is closed on the way out."""


class _Ending:
    number = 0
    """The signal that ended the command; 0 for none."""


@contextmanager
def _ending() -> Iterator[_Ending]:
    """Within, SIGTERM and SIGHUP end the command as an exception does: builds, files and the terminal are seen to.

    A second one ends the process at once. Signals that somebody handles or ignores (nohup) are left alone.
    """
    ending, ours = _Ending(), []

    def handle(number: int, frame: FrameType | None) -> None:
        ending.number = number
        signal.signal(number, signal.SIG_DFL)
        raise _Ended

    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        try:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handle)
                ours.append(number)
        except ValueError:  # not the main thread, which is the only one that signals reach
            break
    try:
        yield ending
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: Sequence[str]) -> int:
    from typer import Abort, Exit, TyperException

    from fuel_core.cli.app import command
    from fuel_core.errors import FuelError

    try:
        try:
            with _warnings_in_one_line(), command().make_context("fuel", arguments) as context:
                context.command.invoke(context)
        finally:
            # Text that is still buffered belongs to this run, and so does a pipe that turns out to be closed.
            sys.stdout.flush()
    except Exit as done:
        return done.exit_code
    except BrokenPipeError:
        _discard_stdout()
        return 0
    except SystemExit as leaving:
        # rich ends the process with 1 when the pipe it prints to is closed.
        if isinstance(leaving.__context__, BrokenPipeError):
            return 0
        raise
    except (KeyboardInterrupt, Abort):
        return _INTERRUPTED
    except TyperException as error:
        return _complain(error.format_message(), error.exit_code, hint=True)
    except OSError as error:
        # What is read, and what is saved to a named file, names the file; only the output has none.
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _discard_stdout()
            return _complain(
                f"output: expected room for it, found {error.strerror!r}; free some, or send it elsewhere", _USER
            )
        return _complain(str(error), _USER)
    except FuelError as error:
        return _complain(str(error), _USER)
    except Exception as error:
        if _is_out_of_memory(error):
            found = " ".join(str(error).split())[:200] or "none left"
            return _complain(
                f"memory: expected room for the model and its work, found {found}; close other programs, or use "
                "--weights int8 or a smaller --max-seq-len",
                _USER,
            )
        text = f"internal error, {type(error).__name__}: {error} (FUEL_DEBUG=1 shows where)"
        return _complain(text, _INTERNAL)
    return 0


def _is_out_of_memory(error: Exception) -> bool:
    # torch says it as a RuntimeError on a CPU, and as a kind of its own elsewhere; neither is worth importing it for. A
    # library that finds no room to be mapped is an ImportError.
    said = ("can't allocate memory", "cannot allocate memory", "failed to map segment")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError)
        and (type(error).__name__ == "OutOfMemoryError" or any(words in str(error).lower() for words in said))
    )


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Our own warnings are for whoever runs the command: one line, without the line of code that they came from."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("fuel_core."):
            print(f"fuel: warning: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


def _complain(message: str, code: int, *, hint: bool = False) -> int:
    if os.environ.get("FUEL_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    line = " ".join(message.split())
    print(f"fuel: {line}{' (--help lists what is accepted)' if hint else ''}", file=sys.stderr)
    return code


def _discard_stdout() -> None:
    """Send what is left to nowhere: the interpreter's own flush at exit would complain once more."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
