"""Parses the header of a GGUF file against the bytes that are really there.

Every count, length, offset and size in a GGUF header is a claim of the file. Each is checked against the bytes left
before anything is read or allocated for it, so a hostile file is refused in time proportional to its own size. Layout:
magic, version, tensor count, key count, keys, tensor table, padding, tensor data; little-endian throughout.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol

from fuel_core.checkpoint.base import shown
from fuel_core.errors import CheckpointCorruptError, UnsupportedCheckpointError

__all__ = ["GgufHeader", "GgufTensor", "parse_header"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_MAX_DIMS: Final = 4
_MAX_NAME: Final = 1 << 16
# What a file may ask to be turned into Python objects, over all its keys: several times what any published file has,
# and read within a second. The limits on claims are the bytes themselves; these are for files as long as they claim.
_MAX_PAIRS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 16
_MAX_ITEMS: Final = 1 << 22
_MAX_STRINGS: Final = 1 << 21
_MAX_DEPTH: Final = 2

_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
# Value type id -> struct code of one little-endian value.
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    _BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
# Fewest bytes one key-value pair and one tensor entry can take.
_MIN_PAIR: Final = 8 + 4 + 1
_MIN_TENSOR: Final = 8 + 4 + 8 + 4 + 8


class Buffer(Protocol):
    """Bytes with a length: `bytes`, `mmap` or `memoryview`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is in row-major order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    """First byte, from the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor table of one file, checked."""

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    alignment: int = _DEFAULT_ALIGNMENT
    array_types: Mapping[str, int] = field(default_factory=dict, repr=False)


class _Cursor:
    """A position in the buffer that refuses to pass the end."""

    def __init__(self, data: Buffer, origin: str) -> None:
        self.data = data
        self.end = len(data)
        self.at = 0
        self.origin = origin
        self.items_left = _MAX_ITEMS
        self.strings_left = _MAX_STRINGS

    def corrupt(self, expected: str, found: object) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self.origin}: expected {expected}, found {found} (byte {self.at} of {self.end}); "
            "incomplete download? Download the file again"
        )

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.at:
            raise self.corrupt(f"{what} to fit in the {self.end - self.at} bytes left", f"{count} bytes")

    def unpack(self, code: str, what: str) -> Any:
        size = struct.calcsize(f"<{code}")
        self.need(size, what)
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)  # type: ignore[arg-type]
        self.at += size
        return value

    def string(self, what: str, limit: int | None = None) -> bytes:
        length = self.unpack("Q", f"the length of {what}")
        self.need(length, what)
        if limit is not None and length > limit:
            raise self.corrupt(f"{what} of at most {limit} bytes", f"{length} bytes")
        raw = bytes(self.data[self.at : self.at + length])
        self.at += length
        return raw

    def text(self, what: str, limit: int | None = None) -> str:
        raw = self.string(what, limit)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} in UTF-8", f"{raw[:20]!r}") from None


def parse_header(data: Buffer, origin: str, *, alignment_of_set: int | None = None) -> GgufHeader:
    """Parse and check one GGUF header. `origin` names the file in messages.

    `alignment_of_set`: what the first file of a split model declares, for a file that declares nothing itself. Some
    writers use it throughout and others only where it is declared; the size of the file says which.

    Raises CheckpointCorruptError for every claim the bytes do not support, UnsupportedCheckpointError for a version or
    byte order that is valid but not read here.
    """
    cursor = _Cursor(data, origin)
    cursor.need(24, "a GGUF header")
    if bytes(data[:4]) != _MAGIC:
        raise cursor.corrupt("the magic bytes 'GGUF'", repr(bytes(data[:4])))
    cursor.at = 4
    version = cursor.unpack("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "a big-endian file" if swapped in _VERSIONS else f"version {version}"
        raise UnsupportedCheckpointError(
            f"{origin}: expected a little-endian GGUF file of version {' or '.join(map(str, _VERSIONS))}, "
            f"found {what}; convert it again with a current converter"
        )
    tensor_count = cursor.unpack("Q", "the tensor count")
    pair_count = cursor.unpack("Q", "the key count")
    _check_count(cursor, tensor_count, _MIN_TENSOR, "tensors")
    _check_count(cursor, pair_count, _MIN_PAIR, "keys")
    for count, most, what in ((tensor_count, _MAX_TENSORS, "tensors"), (pair_count, _MAX_PAIRS, "keys")):
        if count > most:
            raise cursor.corrupt(f"at most {most} {what}", f"{count}")

    metadata: dict[str, Any] = {}
    array_types: dict[str, int] = {}
    for _ in range(pair_count):
        key = cursor.text("a key", _MAX_NAME)
        if not key:
            raise cursor.corrupt("a key", "an empty one")
        if key in metadata:
            raise cursor.corrupt("every key once", f"{key!r} twice")
        kind = cursor.unpack("I", f"the type of {key!r}")
        if kind == _ARRAY:
            array_types[key], metadata[key] = _array(cursor, key, 0)
        else:
            metadata[key] = _scalar(cursor, kind, key)

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        isinstance(alignment, bool)
        or not isinstance(alignment, int)
        or not 8 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.corrupt(f"general.alignment to be a power of two from 8 to {_MAX_ALIGNMENT}", shown(alignment))
    entries: dict[str, _Entry] = {}
    for _ in range(tensor_count):
        entry = _tensor_entry(cursor)
        if entry.name in entries:
            raise cursor.corrupt("every tensor once", f"{entry.name!r} twice")
        entries[entry.name] = entry
    if alignment_of_set is not None and "general.alignment" not in metadata:
        alignment = _alignment_by_size(cursor, entries, alignment_of_set)
    start = _aligned(cursor.at, alignment)
    tensors = {name: _place_tensor(cursor, entry, start, alignment) for name, entry in entries.items()}
    _check_overlap(cursor, tensors)
    return GgufHeader(version, metadata, tensors, alignment, array_types)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _alignment_by_size(cursor: _Cursor, entries: Mapping[str, _Entry], of_set: int) -> int:
    """The format's default or that of the set, whichever makes the tensors end where the file ends."""
    if _aligned(cursor.at, of_set) == _aligned(cursor.at, _DEFAULT_ALIGNMENT) or not entries:
        return _DEFAULT_ALIGNMENT
    extent = max(entry.offset + entry.nbytes for entry in entries.values())
    fits = [
        alignment
        for alignment in (_DEFAULT_ALIGNMENT, of_set)
        # The last tensor may be padded or not.
        if cursor.end in ((end := _aligned(cursor.at, alignment) + extent), _aligned(end, alignment))
    ]
    if len(fits) != 1:
        raise cursor.corrupt(
            f"general.alignment in this file, or a size that tells {_DEFAULT_ALIGNMENT} from {of_set}", "neither"
        )
    return fits[0]


def _check_count(cursor: _Cursor, count: int, least: int, what: str) -> None:
    if count * least > cursor.end - cursor.at:
        raise cursor.corrupt(
            f"at most {(cursor.end - cursor.at) // least} {what} in the {cursor.end - cursor.at} bytes left", f"{count}"
        )


def _scalar(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string(f"the value of {key!r}").decode("utf-8", errors="replace")
    code = _SCALARS.get(kind)
    if code is None:
        raise cursor.corrupt(f"a known value type for {key!r}", f"type {kind}")
    value = cursor.unpack(code, f"the value of {key!r}")
    if kind == _BOOL:
        if value not in (0, 1):
            raise cursor.corrupt(f"{key!r} to be 0 or 1", value)
        return bool(value)
    return _shortest(value) if code == "f" else value


def _array(cursor: _Cursor, key: str, depth: int) -> tuple[int, list[Any]]:
    kind = cursor.unpack("I", f"the item type of {key!r}")
    count = cursor.unpack("Q", f"the item count of {key!r}")
    if kind == _STRING:
        least = 8
    elif kind == _ARRAY:
        if depth + 1 >= _MAX_DEPTH:
            raise cursor.corrupt(f"arrays in {key!r} nested at most {_MAX_DEPTH} deep", "deeper ones")
        least = 12
    elif kind in _SCALARS:
        least = struct.calcsize(f"<{_SCALARS[kind]}")
    else:
        raise cursor.corrupt(f"a known item type for {key!r}", f"type {kind}")
    _check_count(cursor, count, least, f"items of {key!r}")
    simple = kind in _SCALARS
    most = cursor.items_left if simple else cursor.strings_left
    if count > most:
        raise cursor.corrupt(f"at most {most} more items in {key!r}", f"{count}")
    if simple:
        cursor.items_left -= count
    else:
        cursor.strings_left -= count
    if kind == _ARRAY:
        return kind, [_array(cursor, key, depth + 1)[1] for _ in range(count)]
    if kind == _STRING:
        return kind, _strings(cursor, key, count)
    code = _SCALARS[kind]
    values = list(struct.unpack_from(f"<{count}{code}", cursor.data, cursor.at))  # type: ignore[arg-type]
    cursor.at += count * least
    if kind == _BOOL:
        return kind, [bool(v) for v in values]
    return kind, values


def _strings(cursor: _Cursor, key: str, count: int) -> list[str]:
    # Spelled out rather than through `string`: vocabularies have half a million of these.
    data, at, end = cursor.data, cursor.at, cursor.end
    lengths = struct.Struct("<Q")
    items = []
    for _ in range(count):
        if end - at < 8:
            cursor.at = at
            raise cursor.corrupt(f"an item of {key!r}", "the end of the file")
        (length,) = lengths.unpack_from(data, at)  # type: ignore[arg-type]
        at += 8
        if length > end - at:
            cursor.at = at
            raise cursor.corrupt(f"an item of {key!r} to fit in the {end - at} bytes left", f"{length} bytes")
        items.append(bytes(data[at : at + length]).decode("utf-8", errors="replace"))
        at += length
    cursor.at = at
    return items


@dataclass(frozen=True)
class _Entry:
    """A row of the tensor table, with the size that its shape and type come to."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    """From the start of the tensor data."""
    nbytes: int


def _tensor_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor name", _MAX_NAME)
    dims = cursor.unpack("I", f"the dimension count of {name!r}")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.corrupt(f"1 to {_MAX_DIMS} dimensions for tensor {name!r}", dims)
    shape = tuple(reversed([cursor.unpack("Q", f"a dimension of {name!r}") for _ in range(dims)]))
    type_id = cursor.unpack("I", f"the type of {name!r}")
    offset = cursor.unpack("Q", f"the offset of {name!r}")
    known = _tensor_types().get(type_id)
    if known is None:
        raise cursor.corrupt(f"a published tensor type for {name!r}", f"type {type_id}")
    type_name, block, size = known
    numel = 1
    for n in shape:
        numel *= n
    if numel == 0 or shape[-1] % block:
        raise cursor.corrupt(
            f"rows of a positive multiple of {block} numbers in tensor {name!r} ({type_name})", f"shape {list(shape)}"
        )
    return _Entry(name, shape, type_id, type_name, offset, numel // block * size)


@cache
def _tensor_types() -> Mapping[int, tuple[str, int, int]]:
    """Type id -> name, numbers of a block, bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}


def _place_tensor(cursor: _Cursor, entry: _Entry, start: int, alignment: int) -> GgufTensor:
    name, first = entry.name, start + entry.offset
    if entry.offset % alignment:
        raise cursor.corrupt(f"tensor {name!r} at a multiple of {alignment}", f"offset {entry.offset}")
    if first + entry.nbytes > cursor.end:
        raise cursor.corrupt(
            f"tensor {name!r} inside the {cursor.end} bytes of the file", f"bytes {first} to {first + entry.nbytes}"
        )
    return GgufTensor(name, entry.shape, entry.type_id, entry.type_name, first, entry.nbytes)


def _check_overlap(cursor: _Cursor, tensors: Mapping[str, GgufTensor]) -> None:
    last: GgufTensor | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if last is not None and tensor.offset < last.offset + last.nbytes:
            raise cursor.corrupt("tensors that do not overlap", f"{last.name!r} and {tensor.name!r} sharing bytes")
        last = tensor


def _shortest(value: float) -> float:
    """The shortest decimal that reads back as the same float32: 1e-05 rather than 9.999999747378752e-06.

    Converters stored a float64 from config.json as float32; this gives back the number the config had.
    """
    import numpy as np

    return float(str(np.float32(value)))
