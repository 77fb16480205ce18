"""Reads a Hugging Face folder: config, safetensors shards, tokenizer files. Runs no code from it and unpickles nothing.

Tensors come straight from the file mapping. Names, shapes and offsets are checked when the folder is opened, so that
nothing is allocated for a folder that cannot be loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fuel_core.checkpoint.base import (
    Checkpoint,
    TensorInfo,
    as_mapping,
    listed,
    read_json_object,
    reading,
    refuse_lfs_pointer,
    shown,
    token_ids,
)
from fuel_core.checkpoint.config import RawConfig
from fuel_core.checkpoint.quantised import undeclared_method
from fuel_core.checkpoint.tokenizer_source import TokenizerSource
from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    UnsupportedCheckpointError,
)

if TYPE_CHECKING:
    import torch

__all__ = ["HuggingFaceCheckpoint", "partial_downloads"]

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_SUFFIXES: Final = (".h5", ".msgpack", ".onnx", ".nemo")
_PARTIAL_SUFFIXES: Final = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download")
# Pickles that training leaves beside a model; no weights are in them.
_TRAINING_FILES: Final = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_HEADER_LIMIT: Final = 100_000_000

_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

# Keys of generation_config.json that older folders keep in config.json instead.
_GENERATION_KEYS: Final = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "max_length",
    "max_new_tokens",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_ROLES: Final = ("bos", "eos", "pad", "unk", "eot", "eom")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder with config.json and, unless only its config is of interest, safetensors files."""

    format = "huggingface"

    def __init__(self, path: Path) -> None:
        """Read the config and every tensor header. See `open_checkpoint` for the errors."""
        self.path = path
        self._config = read_json_object(path / "config.json", once=True)
        self._files: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._states: dict[Path, _State] = {}
        self._open: dict[Path, Any] = {}
        files, indexed = _weight_files(path)
        for file in files:
            self._add_file(file)
        absent = [name for name in indexed if name not in self._files]
        if absent:
            raise CheckpointCorruptError(
                f"{path / _INDEX}: expected every tensor it names in the files it names, found {len(absent)} in none: "
                f"{listed(absent)}; download the folder again"
            )
        raw = RawConfig.from_config(self._config)
        if raw.dtype_key is None:
            stored = _usual_dtype(self._infos)
            if stored is not None:
                raw = raw.with_values({"dtype": stored}, "tensors: the usual stored dtype")
        if raw.quantization is None:
            found = undeclared_method(self._infos)
            if found is not None:
                method, tensor = found
                raw = raw.with_values({"quantization_config": {"quant_method": method}}, f"tensors: {listed([tensor])}")
        self.raw = raw

    @property
    def has_weights(self) -> bool:
        return bool(self._files)

    def tensor_names(self) -> list[str]:
        return sorted(self._files)

    def tensor_info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def tensor(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._files[name]
        handle = self._open.get(path)
        if handle is None or _size(path) < self._states[path].size:  # the common case is one call to the system
            with reading(path):
                self._check_unchanged(path, opened=handle is not None)
        try:
            if handle is None:
                handle = self._open[path] = safe_open(path, framework="pt", device="cpu")
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as exc:
            raise CheckpointCorruptError(
                f"{path}: tensor {name!r} cannot be read ({_one_line(exc)}); download the file again"
            ) from exc
        return tensor

    def is_mapped(self, name: str) -> bool:
        return name in self._files

    def _check_unchanged(self, path: Path, *, opened: bool) -> None:
        """Refuse a file that is not the one whose header was checked, or that was cut since it was mapped.

        A mapped file may be deleted or replaced under its name: the mapping keeps it. Cut in place, what is gone cannot
        be read, and trying ends the process.
        """
        before = self._states[path]
        try:
            now = _State.of(path)
        except FileNotFoundError:
            if opened:
                return
            raise
        replaced = (now.device, now.inode) != (before.device, before.inode)
        if (replaced or now.size >= before.size) if opened else now == before:
            return
        raise CheckpointCorruptError(
            f"{path}: expected the file that was there when the checkpoint was opened ({before.size} bytes), found "
            f"{'another one' if replaced else 'it changed'} ({now.size} bytes); open the checkpoint again"
        )

    def close(self) -> None:
        self._open.clear()

    def tokenizer_files(self) -> TokenizerSource:
        with reading(self.path):
            return self._tokenizer_files()

    def _tokenizer_files(self) -> TokenizerSource:
        config = self._read_optional("tokenizer_config.json")
        for key, value in self._read_optional("special_tokens_map.json").items():
            config.setdefault(key, value)
        generation = self._read_optional("generation_config.json")
        levels = {"config.json": self._config, "config.json: text_config": as_mapping(self._config.get("text_config"))}
        stop: dict[str, tuple[int, ...]] = {}
        if generation:
            stop["generation_config.json"] = token_ids(generation.get("eos_token_id"), "generation_config.json")
        for place, level in levels.items():
            stop[place] = token_ids(level.get("eos_token_id"), place)
        if not (self.path / "generation_config.json").is_file():
            generation = {k: self._config[k] for k in _GENERATION_KEYS if self._config.get(k) is not None}
        special: dict[str, int] = {}
        for role in _ROLES:
            for place, level in (*levels.items(), ("generation_config.json", generation)):
                ids = token_ids(level.get(f"{role}_token_id"), place)
                if ids:
                    special.setdefault(role, ids[0])
        tokenizer_json = self.path / "tokenizer.json"
        data = None
        if tokenizer_json.is_file():
            refuse_lfs_pointer(tokenizer_json)
            data = tokenizer_json.read_bytes()
        return TokenizerSource(
            format="huggingface",
            origin=str(self.path),
            tokenizer_json=data,
            tokenizer_config=config,
            chat_templates=self._chat_templates(config),
            generation_config=generation,
            special_ids=special,
            stop_ids={place: ids for place, ids in stop.items() if ids},
            special_tokens=_special_tokens(config),
        )

    def _chat_templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        templates: dict[str, str] = {}
        published = config.get("chat_template")
        if isinstance(published, str):
            templates["default"] = published
        elif isinstance(published, list):
            for entry in published:
                name, text = as_mapping(entry).get("name"), as_mapping(entry).get("template")
                if isinstance(name, str) and isinstance(text, str):
                    templates[name] = text
        elif isinstance(published, dict):
            templates.update({k: v for k, v in published.items() if isinstance(v, str)})
        old = self.path / "chat_template.json"
        if old.is_file():
            text = read_json_object(old).get("chat_template")
            if isinstance(text, str):
                templates["default"] = text
        extra = self.path / "additional_chat_templates"
        named = sorted(extra.glob("*.jinja")) if extra.is_dir() else []
        for file in (*named, self.path / "chat_template.jinja"):
            if file.is_file():
                refuse_lfs_pointer(file)
                text = file.read_bytes().decode("utf-8-sig", errors="replace")
                templates["default" if file.parent == self.path else file.stem] = text
        return templates

    def _read_optional(self, name: str) -> dict[str, Any]:
        file = self.path / name
        return read_json_object(file) if file.is_file() else {}

    def _add_file(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        refuse_lfs_pointer(path)
        self._states[path] = _State.of(path)
        header = _checked_header(path)
        try:
            # The numpy flavour of the reader checks the same header and needs no torch.
            with safe_open(path, framework="numpy") as handle:
                names = handle.keys()
                if header.count(b'"data_offsets"') != len(names):
                    _refuse_name_twice(path, header)
                for name in names:
                    if name in self._files:
                        raise CheckpointCorruptError(
                            f"{path}: expected every tensor once, found {shown(name)} in {self._files[name].name} as "
                            "well; remove the file that does not belong to this checkpoint"
                        )
                    piece = handle.get_slice(name)
                    stored = piece.get_dtype()
                    self._files[name] = path
                    self._infos[name] = TensorInfo(tuple(piece.get_shape()), _DTYPES.get(stored, stored))
        except (SafetensorError, OSError) as exc:
            raise CheckpointCorruptError(
                f"{path}: expected a safetensors file, found {_one_line(exc)}; download the file again"
            ) from exc


def _weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The safetensors files that together are the model ([] for a folder with only a config), and the tensors an
    index promises in them.
    """
    dangling = sorted(f.name for f in folder.glob("*.safetensors") if f.is_symlink() and not f.exists())
    if _SINGLE in dangling:
        raise _missing_shards(folder, dangling)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE], []
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    found = sorted(f for f in folder.glob("*.safetensors") if f.is_file() and not f.name.startswith("adapter_"))
    shards = [(f, m) for f in found if (m := _SHARD.fullmatch(f.name))]
    if shards:
        stems = Counter(m["stem"] for _, m in shards)
        stem = "model" if "model" in stems else stems.most_common(1)[0][0]
        mine = [(f, m) for f, m in shards if m["stem"] == stem]
        total, digits = int(mine[0][1]["total"]), len(mine[0][1]["number"])
        have = {int(m["number"]) for _, m in mine}
        if total > 100_000:
            raise CheckpointCorruptError(
                f"{folder}: expected a sensible shard count, found {mine[0][0].name}; rename it"
            )
        missing = [
            f"{stem}-{i:0{digits}d}-of-{mine[0][1]['total']}.safetensors" for i in range(1, total + 1) if i not in have
        ]
        if missing:
            raise _missing_shards(folder, missing)
        return [f for f, _ in mine], []
    if len(found) > 1:
        raise UnsupportedCheckpointError(
            f"{folder}: expected model.safetensors or {_INDEX}, found {', '.join(f.name for f in found)}; "
            "keep the one that is the model"
        )
    if not found:
        if dangling:
            raise _missing_shards(folder, dangling)
        partial = partial_downloads(folder)
        if partial:
            raise CheckpointNotFoundError(
                f"{folder}: expected the whole model, found its config and an unfinished download ({listed(partial)}); "
                "let it finish, or start it again"
            )
        pickles = sorted(
            f.name
            for f in folder.iterdir()
            if f.suffix.lower() in _PICKLE_SUFFIXES and not f.name.startswith(_TRAINING_FILES)
        )
        if pickles:
            raise UnsupportedCheckpointError(
                f"{folder}: expected safetensors files, found only {listed(pickles, 3)} (pickle files can run code "
                "when read, so they are refused); convert them to safetensors or use a checkpoint that has them"
            )
        other = sorted(f.name for f in folder.iterdir() if f.suffix.lower() in _OTHER_SUFFIXES)
        if other:
            raise UnsupportedCheckpointError(
                f"{folder}: expected safetensors files, found only {listed(other, 3)}; convert them to safetensors or "
                "use a checkpoint that has them"
            )
    return found, []


def partial_downloads(folder: Path) -> list[str]:
    """Names of what download tools leave beside, or below, the files they have not finished."""
    found = [f.name for f in folder.iterdir() if f.name.endswith(_PARTIAL_SUFFIXES)]
    # Where the Hub's own tool keeps them: for a folder of its own, and for its cache.
    found += [f.name for f in (folder / ".cache" / "huggingface" / "download").glob("**/*.incomplete")]
    if folder.parent.name == "snapshots":
        found += [f.name for f in (folder.parent.parent / "blobs").glob("*.incomplete")]
    return sorted(found)


def _indexed_files(folder: Path) -> tuple[list[Path], list[str]]:
    index = folder / _INDEX
    weight_map = read_json_object(index, once=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointCorruptError(f"{index}: expected an object under 'weight_map', found none; download it again")
    names: dict[str, None] = {}
    for tensor, name in weight_map.items():
        if not _is_plain_name(name):
            raise CheckpointCorruptError(
                f"{index}: expected a plain file name for tensor {shown(tensor)}, found {shown(name)}; "
                "a checkpoint may only name files in its own folder: do not use this one"
            )
        names[name] = None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise _missing_shards(folder, missing)
    return [folder / name for name in names], list(weight_map)


def _is_plain_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.endswith(".safetensors")
        and not any(c in name for c in "/\\:\0")
    )


def _missing_shards(folder: Path, missing: list[str]) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{folder}: expected every shard on disk, found {len(missing)} missing: {listed(missing)}; "
        "incomplete download? Download the folder again"
    )


class _State(NamedTuple):
    """What tells one file, and one state of it, from another."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> _State:
        stat = path.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _size(path: Path) -> int:
    """Bytes of a file, -1 where there is none any more."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _checked_header(path: Path) -> bytes:
    """The header's bytes. Refuses a length that the file cannot hold before anything is read for it."""
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        head = f.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            raise CheckpointCorruptError(
                f"{path}: expected a header within {size} bytes, found a header length of "
                f"{length if len(head) == 8 else 'nothing'}; incomplete download? Download the file again"
            )
        if length > _HEADER_LIMIT:
            raise CheckpointCorruptError(
                f"{path}: expected a header of at most {_HEADER_LIMIT} bytes, found {length}; download the file again"
            )
        return f.read(length)


def _refuse_name_twice(path: Path, header: bytes) -> None:
    """Parsers of JSON keep the last of two entries under one name, and what the first one says is lost."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointCorruptError(
                f"{path}: expected every name once, found {shown(twice)} twice in its header; download the file again"
            )
        return found

    json.loads(header, object_pairs_hook=once)


def _usual_dtype(infos: Mapping[str, TensorInfo]) -> str | None:
    """Stored dtype of most matrix elements, or of most elements without matrices; None without floating tensors."""
    counts: Counter[str] = Counter()
    for wanted in (2, 0):
        for info in infos.values():
            if len(info.shape) >= wanted and info.dtype_name in ("float32", "bfloat16", "float16"):
                counts[info.dtype_name] += info.numel
        if counts:
            return counts.most_common(1)[0][0]
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text; a token is published as a string or as an object with its text under `content`."""
    tokens: dict[str, str] = {}
    for role in _ROLES:
        value = config.get(f"{role}_token")
        with suppress(TypeError, KeyError):
            text = value if isinstance(value, str) else value["content"]  # type: ignore[index]
            if isinstance(text, str):
                tokens[role] = text
    return tokens


def _one_line(exc: BaseException) -> str:
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
