"""Where machine code that was built here is kept between processes, and how it is trusted.

The files are loaded into the process, so they are code: the folder belongs to the user and to nobody else, every file
has its SHA-256 beside it that is checked before it is loaded, and a file is written aside, synced and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from fuel_core.errors import CodeCacheError

__all__ = ["cache_root", "owned_folder", "publish", "remove", "verified"]

_SUM = ".sha256"


def cache_root() -> Path:
    """``FUEL_CACHE``, or ``fuel`` in the user's cache folder. Not created here."""
    named = os.environ.get("FUEL_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fuel"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuel"


def owned_folder(name: str) -> Path:
    """The folder ``name`` of the cache, created if needed, for the user alone.

    Raises CodeCacheError where it cannot be made, belongs to somebody else, or others may write into it.
    """
    folder = cache_root() / name
    try:
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat(follow_symlinks=False)
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise CodeCacheError(
                f"{folder}: a folder of this user expected, found one of user {found.st_uid} or no folder; set "
                "FUEL_CACHE to a folder of your own"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise CodeCacheError(
            f"{folder}: a writable folder for built code expected, found {error.strerror}; set FUEL_CACHE"
        ) from error
    return folder


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(path: Path) -> bool:
    """Whether ``path`` is there, whole and this user's. One that is there and is not gets removed."""
    try:
        expected = path.with_name(path.name + _SUM).read_text().strip()
        found = path.stat()
    except OSError:
        return False
    if found.st_uid == os.getuid() and _digest(path) == expected:
        return True
    remove(path)
    return False


def publish(made: Path, path: Path) -> None:
    """Move a file that was built aside to ``path``, with its sum. Safe beside another process that does the same.

    Raises OSError where the disk is full or read-only; nothing that could be trusted is left then.
    """
    total = _digest(made)
    with made.open("rb") as file:
        os.fsync(file.fileno())
    handle, aside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(total)
            file.flush()
            os.fsync(file.fileno())
        # The code first: a sum without its code is only a miss.
        os.replace(made, path)
        os.replace(aside, path.with_name(path.name + _SUM))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def remove(path: Path) -> None:
    """Remove a file and its sum; not being able to is no failure."""
    for gone in (path.with_name(path.name + _SUM), path):
        with contextlib.suppress(OSError):
            gone.unlink()
