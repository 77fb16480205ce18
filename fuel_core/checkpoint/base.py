"""What a checkpoint on disk offers, whichever format it has. Knows neither families nor modules."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from fuel_core.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedCheckpointError

if TYPE_CHECKING:
    import torch

    from fuel_core.checkpoint.config import RawConfig
    from fuel_core.checkpoint.tokenizer_source import TokenizerSource
    from fuel_core.layers.packed_formats import Rows

__all__ = ["Checkpoint", "TensorInfo", "read_json_object", "refuse_lfs_pointer", "token_ids"]

_LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
_JSON_LIMIT = 256 * 1024 * 1024


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


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointNotFoundError if `path` is a git-lfs pointer instead of the file it stands for."""
    with path.open("rb") as f:
        head = f.read(len(_LFS_MAGIC))
    if head == _LFS_MAGIC:
        raise CheckpointNotFoundError(
            f"{path}: expected the file itself, found a git-lfs pointer to it; run `git lfs pull` in its folder"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse one JSON file that must hold an object. Raises CheckpointCorruptError for anything else."""
    refuse_lfs_pointer(path)
    if path.stat().st_size > _JSON_LIMIT:
        raise CheckpointCorruptError(
            f"{path}: expected at most {_JSON_LIMIT} bytes of JSON, found {path.stat().st_size}; download it again"
        )
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise CheckpointCorruptError(f"{path}: expected valid JSON, found {exc}; download the file again") from exc
    if not isinstance(value, dict):
        raise CheckpointCorruptError(
            f"{path}: expected a JSON object, found {type(value).__name__}; download the file again"
        )
    return value


def token_ids(value: object, place: str) -> tuple[int, ...]:
    """Token ids published as an integer, a list of integers or null. Negative ones mean "none" and are dropped."""
    items = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    ids = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise UnsupportedCheckpointError(
                f"{place}: expected token ids as integers, found {item!r}; correct the file"
            )
        if item >= 0:
            ids.append(item)
    return tuple(ids)


def as_mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
