"""What a checkpoint on disk offers, whichever format it has. Knows neither families nor modules."""

from __future__ import annotations

import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsupportedCheckpointError,
)

if TYPE_CHECKING:
    import torch

    from fuel_core.checkpoint.config import RawConfig
    from fuel_core.checkpoint.tokenizer_source import TokenizerSource
    from fuel_core.layers.packed_formats import Rows

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "listed",
    "read_json_object",
    "reading",
    "refuse_lfs_pointer",
    "shown",
    "token_ids",
]

_LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
_JSON_LIMIT = 64 * 1024 * 1024


class TensorInfo(NamedTuple):
    """Shape of one stored tensor and the name of its stored type ("bfloat16", "float32", "Q4_K", ...)."""

    shape: tuple[int, ...]
    dtype_name: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n


class Checkpoint(ABC):
    """A model on disk: its config, its tensors under their Hugging Face names, and its tokenizer.

    Opening one reads headers only. Tensors are read one at a time, straight from the file mapping where the stored
    type is one torch has.
    """

    format: ClassVar[Literal["huggingface", "gguf"]]
    path: Path
    raw: RawConfig

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json; None for GGUF."""
        return self.raw.model_type

    @property
    def gguf_architecture(self) -> str | None:
        """`general.architecture` of a GGUF file; None for a folder."""
        return self.raw.gguf_architecture

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """False for a folder that holds only a config."""

    @abstractmethod
    def tensor_names(self) -> list[str]:
        """Names of all stored tensors, sorted."""

    @abstractmethod
    def tensor_info(self, name: str) -> TensorInfo:
        """Shape and stored type of one tensor. Raises KeyError for a name that is not there."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU. It may share memory with the file mapping (private: writes never reach the file)."""

    @abstractmethod
    def is_mapped(self, name: str) -> bool:
        """Whether `tensor(name)` is the file mapping itself rather than a copy."""

    def rows(self, name: str) -> Rows:
        """A matrix to be read some rows at a time; quantised ones are never dequantised as a whole.

        A stack ``[E, N, K]`` reads as ``[E * N, K]``.
        """
        from fuel_core.layers.packed_formats import TensorRows

        return TensorRows(self.tensor(name).flatten(0, -2))

    def matrices(self, name: str) -> list[Rows]:
        """The matrices of a stack ``[E, N, K]``, each to be read some rows at a time."""
        from fuel_core.layers.packed_formats import RowRange

        count, n, _ = self.tensor_info(name).shape
        rows = self.rows(name)
        return [RowRange(rows, first, first + n) for first in range(0, count * n, n)]

    def release(self, name: str) -> None:  # noqa: B027 - optional: most tensors stay mapped
        """Say that a tensor was read for the last time: its pages may leave memory. Reading it again is allowed."""

    @abstractmethod
    def tokenizer_files(self) -> TokenizerSource:
        """What the checkpoint says about its tokenizer, templates and stop ids."""

    def for_family(self, family: object) -> Checkpoint:
        """Apply a family's name overrides; the checkpoint itself where the format has none."""
        return self

    def close(self) -> None:  # noqa: B027 - optional: most formats hold nothing but a mapping
        """Let go of open files. Tensors already handed out stay valid."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = self.model_type or self.gguf_architecture
        return f"{type(self).__name__}({str(self.path)!r}, {what!r})"

    def iter_info(self) -> Iterator[tuple[str, TensorInfo]]:
        """(name, info) of every tensor, by name."""
        for name in self.tensor_names():
            yield name, self.tensor_info(name)


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Turn what the system says about files into our errors; `place` is named where the system names no file."""
    try:
        yield
    except OSError as exc:
        what = exc.filename if exc.filename is not None else place
        said = exc.strerror or type(exc).__name__
        if isinstance(exc, PermissionError):
            raise CheckpointNotFoundError(
                f"{place}: expected a readable checkpoint, found no permission to read {what}; change its mode"
            ) from exc
        if isinstance(exc, FileNotFoundError):
            raise CheckpointNotFoundError(
                f"{place}: expected a complete checkpoint, found that {what} is gone; is it being downloaded or "
                "replaced? Try again afterwards"
            ) from exc
        if exc.errno == errno.ENOMEM:
            raise CheckpointError(
                f"{place}: expected memory to map {what}, found none left; close other programs or use a smaller model"
            ) from exc
        raise CheckpointCorruptError(
            f"{place}: expected to read {what}, found {said!r}; check the disk, or download it again"
        ) from exc


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointNotFoundError if `path` is a git-lfs pointer instead of the file it stands for."""
    with path.open("rb") as f:
        head = f.read(len(_LFS_MAGIC))
    if head == _LFS_MAGIC:
        raise CheckpointNotFoundError(
            f"{path}: expected the file itself, found a git-lfs pointer to it; run `git lfs pull` in its folder"
        )


def read_json_object(path: Path, *, once: bool = False) -> dict[str, Any]:
    """Parse one JSON file that must hold an object. Raises CheckpointCorruptError for anything else.

    `once`: refuse an object that gives one key two values, of which JSON parsers keep the last without a word.
    """
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    if size > _JSON_LIMIT:
        raise CheckpointCorruptError(
            f"{path}: expected at most {_JSON_LIMIT} bytes of JSON, found {size}; download it again"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_each_key_once if once else None)
    except _TwoValues as exc:
        raise CheckpointCorruptError(f"{path}: expected every key once, found {exc}; remove the one not meant") from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointCorruptError(f"{path}: expected valid JSON, found {exc}; download the file again") from exc
    if not isinstance(value, dict):
        raise CheckpointCorruptError(
            f"{path}: expected a JSON object, found {type(value).__name__}; download the file again"
        )
    return value


class _TwoValues(Exception):
    """A key of a JSON object that is there twice with values that differ."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if value != found[key]:
                raise _TwoValues(f"{key!r} as {shown(value)} and as {shown(found[key])}")
    return found


def shown(value: object, most: int = 60) -> str:
    """`value` for a message: its repr, in one line, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a value nested without end
        return f"{type(value).__name__} too long to show"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Iterable[str], most: int = 5) -> str:
    """Names from a file for a message, in one line: those that print as they are, others quoted."""
    every = list(names)
    quoted = (name if name.isprintable() and len(name) <= 200 else shown(name, 200) for name in every[:most])
    return ", ".join(quoted) + (f", ... ({len(every) - most} more)" if len(every) > most else "")


def token_ids(value: object, place: str) -> tuple[int, ...]:
    """Token ids published as an integer, a list of integers or null. Negative ones mean "none" and are dropped."""
    items = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    ids = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise UnsupportedCheckpointError(
                f"{place}: expected token ids as integers, found {shown(item)}; correct the file"
            )
        if item >= 0:
            ids.append(item)
    return tuple(ids)


def as_mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
