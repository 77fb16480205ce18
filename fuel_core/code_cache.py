"""Compiled code and recordings on disk, shared between processes and models.

What is loaded from here is executed, so the folder belongs to the user alone, every file is hashed before it is used,
and an entry appears whole or not at all: it is written aside, synced and renamed. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # no such locks on this system, and no compiled code either
    fcntl = None  # type: ignore[assignment]

__all__ = ["CacheUnusable", "CodeCache", "Entry", "compiler"]

_LIMIT_BYTES = 512 * 2**20
_LEFT_OVER_S = 24 * 3600
"""What was written aside and never renamed is removed after this long."""
_FORMAT = "v1"
_DESCRIPTION = "entry.json"


def compiler() -> str | None:
    """The C++ compiler that builds would call: the first word of ``CXX``, else g++; None where there is none."""
    named = os.environ.get("CXX")
    try:
        words = shlex.split(named) if named else ["g++"]
    except ValueError:
        return None
    return shutil.which(words[0]) if words else None


class CacheUnusable(Exception):
    """The cache folder cannot be used; the message is one line that names it and says why."""


@dataclass(frozen=True)
class Entry:
    """One verified entry: its folder and what was stored about it."""

    key: str
    folder: Path
    about: dict[str, Any]
    size: int
    """Bytes of its files."""


class CodeCache:
    """Entries by key in one folder. Every method may be called by several processes at once.

    Least recently used entries go when the files together pass ``limit_bytes``.
    """

    def __init__(self, root: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._folder = root / _FORMAT

    @classmethod
    def of_this_user(cls) -> CodeCache:
        """The cache that ``FUEL_CACHE`` names, or ``fuel`` in the user's cache folder."""
        named = os.environ.get("FUEL_CACHE")
        if named:
            return cls(Path(named).expanduser())
        base = os.environ.get("XDG_CACHE_HOME")
        return cls((Path(base) if base else Path("~/.cache").expanduser()) / "fuel")

    # -- the folder ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CacheUnusable unless the folder is absent, or a folder that this user alone can write to."""
        if fcntl is None:
            raise CacheUnusable(f"{self.root}: file locks expected, found a system without them; use plan='recorded'")
        for folder in (self.root, self._folder):
            try:
                found = folder.stat()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CacheUnusable(
                    f"{folder}: expected a folder, found {_why(error)}; set FUEL_CACHE to another place"
                ) from error
            if not stat.S_ISDIR(found.st_mode):
                raise CacheUnusable(f"{folder}: expected a folder, found a file; set FUEL_CACHE to another place")
            if found.st_uid != os.geteuid():
                raise CacheUnusable(
                    f"{folder}: expected a folder of your own, found one of user {found.st_uid}; code from it will not "
                    "be loaded: set FUEL_CACHE to another place"
                )
            if found.st_mode & 0o022:
                raise CacheUnusable(
                    f"{folder}: expected a folder that only you can write to, found mode "
                    f"{stat.S_IMODE(found.st_mode):04o}; code from it will not be loaded: empty it and chmod 700 it"
                )
            if found.st_mode & 0o077:
                with contextlib.suppress(OSError):
                    folder.chmod(0o700)

    def prepare(self) -> None:
        """Make the folder. Raises CacheUnusable where it cannot be made or written to."""
        self.check()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.chmod(0o700)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise CacheUnusable(
                f"{self.root}: expected a folder to keep code in, found {_why(error)}; set FUEL_CACHE to another place"
            ) from error

    # -- entries ---------------------------------------------------------------------------------------

    def find(self, key: str) -> Entry | None:
        """The entry, hashed just now; None where there is none. One that is damaged is removed.

        Raises CacheUnusable for a folder that others could have written to.
        """
        folder = self._folder / key
        try:
            # Before anything is asked of the folder: most look-ups miss, and they should cost one system call.
            (folder / _DESCRIPTION).stat()
        except OSError:
            if folder.is_dir():
                self.check()
                self.remove(key)
            return None
        self.check()
        try:
            entry = self._verified(key, folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)
        return entry

    def _verified(self, key: str, folder: Path) -> Entry:
        description = json.loads((folder / _DESCRIPTION).read_bytes())
        digest = description.pop("sha256")
        if _hash(_canonical(description)) != digest or description["key"] != key:
            raise ValueError("not what was written")
        for name, expected in description["files"].items():
            if _hash((folder / name).read_bytes()) != expected["sha256"]:
                raise ValueError(f"{name} is not what was written")
        size = sum(expected["size"] for expected in description["files"].values())
        return Entry(key, folder, description["about"], size)

    def look(self, key: str) -> Entry | None:
        """The entry as ``find`` gives it, None where it is missing or damaged; changes nothing, not even its age.

        Raises CacheUnusable for a folder that others could have written to.
        """
        folder = self._folder / key
        if not self.has(key):
            return None
        self.check()
        try:
            return self._verified(key, folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def has(self, key: str) -> bool:
        """Whether there is an entry; says nothing about what is in it."""
        return (self._folder / key / _DESCRIPTION).exists()

    def store(self, key: str, files: Mapping[str, bytes], about: dict[str, Any]) -> None:
        """Add an entry whole, unless one is there. Raises CacheUnusable when it cannot be written.

        files: relative path -> content. about: what JSON can carry.
        """
        self.prepare()
        aside = Path(tempfile.mkdtemp(prefix=".aside-", dir=self._folder))
        try:
            described = {}
            for name, content in files.items():
                _write(aside / name, content)
                described[name] = {"sha256": _hash(content), "size": len(content)}
            description: dict[str, Any] = {"key": key, "files": described, "about": about}
            description["sha256"] = _hash(_canonical(description))
            _write(aside / _DESCRIPTION, json.dumps(description).encode())
            _sync_folder(aside)
            try:
                aside.rename(self._folder / key)
            except OSError:
                if not self.has(key):  # another process was first: its entry is as good
                    raise
            _sync_folder(self._folder)
        except OSError as error:
            raise CacheUnusable(
                f"{self.root}: expected room to keep code in, found {_why(error)}; free some, or set FUEL_CACHE"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._evict(keep=key)

    def remove(self, key: str) -> None:
        """Remove an entry; others never see half of one."""
        gone = self._folder / f".gone-{os.getpid()}-{time.monotonic_ns()}-{key[:8]}"
        with contextlib.suppress(OSError):
            (self._folder / key).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def entries(self) -> list[tuple[str, float, int]]:
        """(key, when last used, bytes) of every entry, least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                with contextlib.suppress(OSError):
                    if not folder.name.startswith("."):
                        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                        found.append((folder.name, folder.stat().st_mtime, size))
        return sorted(found, key=lambda entry: entry[1])

    def _evict(self, keep: str) -> None:
        entries = self.entries()
        total = sum(size for _, _, size in entries)
        for key, _, size in entries:
            if total <= self.limit_bytes:
                break
            if key != keep:
                self.remove(key)
                total -= size
        for folder in self._folder.glob(".*-*"):
            with contextlib.suppress(OSError):
                if folder.is_dir() and time.time() - folder.stat().st_mtime > _LEFT_OVER_S:
                    shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> tuple[int, int]:
        """Remove every entry; returns how many there were, and their bytes."""
        self.check()
        entries = self.entries()
        for key, _, _ in entries:
            self.remove(key)
        return len(entries), sum(size for _, _, size in entries)

    # -- work in progress --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the key's lock, which no other process holds meanwhile; waits for it. Ends with its holder's process."""
        self.prepare()
        folder = self._folder / ".locks"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CacheUnusable(
                f"{folder}: expected a place for locks, found {_why(error)}; set FUEL_CACHE to another place"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def workshop(self) -> Iterator[Path]:
        """A folder to build in, gone afterwards."""
        self.prepare()
        try:
            folder = Path(tempfile.mkdtemp(prefix=".build-", dir=self._folder))
        except OSError as error:
            raise CacheUnusable(
                f"{self.root}: expected room to build in, found {_why(error)}; free some, or set FUEL_CACHE"
            ) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(description: dict[str, Any]) -> bytes:
    return json.dumps(description, sort_keys=True).encode()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
