"""The process that makes code: takes recordings on its stdin, leaves entries in the cache.

A process of its own, because the compiler stack holds the interpreter for seconds at a time and a decoding process
must not wait for it. It outlives the one that started it: what it makes serves the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO, Any

from fuel_core import __version__
from fuel_core.code_cache import CacheUnusable, CodeCache
from fuel_core.plan_backends.graph_text import read_graph, write_graph
from fuel_core.plan_backends.recording import Layout, Recording, TensorLayout

__all__ = ["Job", "main", "part", "start"]

_CPU_SECONDS = 1800
"""A build that computes longer than this is ended by the system."""
_SECONDS_TO_END = 5
_CODE_FOLDER = "code"


class Job:
    """A running build process."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], keys: Sequence[str]) -> None:
        self.process, self.keys, self._log = process, tuple(keys), log
        self._said: str | None = None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> None:
        """Wait for the end. Interrupted, it ends the build and the compilers that it started."""
        try:
            self.process.wait()
        except BaseException:
            self._end(signal.SIGTERM)
            try:
                # Its folder is its own to remove.
                self.process.wait(_SECONDS_TO_END)
            except BaseException:
                self._end(signal.SIGKILL)
                self.process.wait()
            self._log.close()
            raise

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, number)

    def failure(self) -> str | None:
        """Why the process failed, in one line; None where it did not."""
        if self.running:
            return None
        if not self._log.closed:
            self._log.seek(0)
            lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
            self._log.close()
            if self.process.returncode:
                self._said = lines[-1][:300] if lines else f"exit status {self.process.returncode}"
        return self._said


def part(key: str, recording: Recording) -> dict[str, Any]:
    """One recording of a request. Raises UnwritableGraph."""
    assert recording.layout is not None
    return {
        "key": key,
        "graph": write_graph(recording.graph_module),
        "tensors": recording.tensors,
        "symbols": recording.symbols,
        "layout": asdict(recording.layout),
    }


def start(cache: CodeCache, parts: Sequence[dict[str, Any]], *, background: bool) -> Job:
    """Start building, in a session of its own, which no Ctrl-C reaches. background: at the lowest priority.

    Raises OSError where no process can be started.
    """
    request = {"root": str(cache.root), "limit": cache.limit_bytes, "background": background, "parts": list(parts)}
    # Files, not pipes: neither side ever waits for the other.
    given, log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - the child reads the one, we the other
    given.write(json.dumps(request).encode())
    given.seek(0)
    # Settings of the compiler stack that this process runs under would change what is built under the same key.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_LOGS", "AOT_INDUCTOR", "TORCHDYNAMO"))
    }
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; sys.exit(main())"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
    finally:
        given.close()
    return Job(process, log, [part["key"] for part in parts])


# -- in the process itself --------------------------------------------------------------------------------------------


def main() -> int:
    """Build what stdin asks for. The last line on stderr says why, where it returns 1.

    SIGTERM ends it as an error does: what it was building in is removed.
    """

    def ended(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit("ended by SIGTERM")

    signal.signal(signal.SIGTERM, ended)
    request = json.load(sys.stdin)
    if request["background"]:
        with contextlib.suppress(OSError):
            os.nice(19)
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    cache = CodeCache(Path(request["root"]), request["limit"])
    try:
        with cache.workshop() as folder:
            # Everything that compiling leaves behind is in here, and goes with it.
            os.environ["TMPDIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
            tempfile.tempdir = None
            for wanted in request["parts"]:
                with cache.lock(wanted["key"]):
                    if cache.find(wanted["key"]) is None:
                        build(cache, wanted, folder)
    except (CacheUnusable, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def build(cache: CodeCache, wanted: dict[str, Any], folder: Path) -> None:
    """Make one entry: verified code, or the reason why there is none (so that nobody tries again).

    Raises OSError or CacheUnusable for what another try may mend.
    """
    from fuel_core import native
    from fuel_core.plan_backends.lowering import LoweringError, bound_of, load, lower, worst_error

    # What was recorded on the kernels is lowered and compared on them; nobody waits for this process.
    native.build.shared_object(patience=None)
    native.is_active()
    began = time.perf_counter()
    about: dict[str, Any] = {"core": __version__, "kind": "code"}
    files: dict[str, bytes] = {}
    try:
        recording = read_recording(wanted)
        files = lower(recording, folder)
        unpacked = folder / wanted["key"]
        for name, content in files.items():
            (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
            (unpacked / name).write_bytes(content)
        bound = bound_of(recording)
        error = worst_error(load(unpacked), recording)
        about |= {"error": error if error == error else None, "bound": bound}
        if not error <= bound:
            raise LoweringError(f"differs from the recording by {error:.2g}, where {bound:.2g} is rounding")
    except LoweringError as error:
        files, about["refused"] = {}, str(error)
    about["seconds"] = round(time.perf_counter() - began, 2)
    cache.store(wanted["key"], {f"{_CODE_FOLDER}/{name}": content for name, content in files.items()}, about)


def activation_dtype(recording: Recording) -> str:
    """Dtype of the hidden state, without ``torch.``"""
    assert recording.layout is not None
    return next((t.dtype for t in recording.layout.tensors if t.name == "h"), "float32")


def read_recording(wanted: dict[str, Any]) -> Recording:
    """The recording that ``part`` wrote."""
    written = wanted["layout"]
    layout = Layout(tuple(map(_tensor, written["tensors"])), tuple(map(_tensor, written["weights"])))
    module = read_graph(wanted["graph"])
    return Recording(module, wanted["tensors"], wanted["symbols"], len(layout.weights), layout)


def _tensor(written: dict[str, Any]) -> TensorLayout:
    stride = written["stride"]
    return TensorLayout(**{**written, "shape": tuple(written["shape"]), "stride": stride and tuple(stride)})
