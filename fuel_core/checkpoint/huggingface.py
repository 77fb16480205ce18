"""Reads a Hugging Face folder: config, safetensors shards, tokenizer files. Runs no code from it and unpickles nothing.

Tensors come straight from the file mapping. Names, shapes and offsets are checked when the folder is opened, so that
nothing is allocated for a folder that cannot be loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fuel_core.checkpoint.base import (
    Checkpoint,
    TensorInfo,
    as_mapping,
    read_json_object,
    refuse_lfs_pointer,
    token_ids,
)
from fuel_core.checkpoint.config import RawConfig
from fuel_core.checkpoint.tokenizer_source import TokenizerSource
from fuel_core.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    UnsupportedCheckpointError,
)

if TYPE_CHECKING:
    import torch

__all__ = ["HuggingFaceCheckpoint"]

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
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
        self._config = read_json_object(path / "config.json")
        self._files: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._open: dict[Path, Any] = {}
        files, indexed = _weight_files(path)
        for file in files:
            self._add_file(file)
        absent = [name for name in indexed if name not in self._files]
        if absent:
            raise CheckpointCorruptError(
                f"{path / _INDEX}: expected every tensor it names in the files it names, found {len(absent)} in none: "
                f"{', '.join(absent[:5])}; download the folder again"
            )
        raw = RawConfig.from_config(self._config)
        if raw.dtype_key is None:
            stored = _usual_dtype(self._infos)
            if stored is not None:
                raw = raw.with_values({"dtype": stored}, "tensors: the usual stored dtype")
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
        try:
            handle = self._open.get(path)
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

    def close(self) -> None:
        self._open.clear()

    def tokenizer_files(self) -> TokenizerSource:
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
        _check_header_length(path)
        try:
            # The numpy flavour of the reader checks the same header and needs no torch.
            with safe_open(path, framework="numpy") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    if name in self._files:
                        raise CheckpointCorruptError(
                            f"{path}: expected every tensor once, found {name!r} in {self._files[name].name} as well; "
                            "remove the file that does not belong to this checkpoint"
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
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE], []
    if (folder / _INDEX).is_file():
        return _indexed_files(folder)
    found = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("adapter_"))
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
        pickles = sorted(
            f.name for f in folder.iterdir() if f.suffix in _PICKLE_SUFFIXES and not f.name.startswith(_TRAINING_FILES)
        )
        if pickles:
            raise UnsupportedCheckpointError(
                f"{folder}: expected safetensors files, found only {', '.join(pickles[:3])} (pickle files can run code "
                "when read, so they are refused); convert them to safetensors or use a checkpoint that has them"
            )
    return found, []


def _indexed_files(folder: Path) -> tuple[list[Path], list[str]]:
    index = folder / _INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointCorruptError(f"{index}: expected an object under 'weight_map', found none; download it again")
    names: dict[str, None] = {}
    for tensor, name in weight_map.items():
        if not _is_plain_name(name):
            raise CheckpointCorruptError(
                f"{index}: expected a plain file name for tensor {tensor!r}, found {name!r}; "
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
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return CheckpointNotFoundError(
        f"{folder}: expected every shard on disk, found {len(missing)} missing: {shown}; "
        "incomplete download? Download the folder again"
    )


def _check_header_length(path: Path) -> None:
    """Refuse a header length that the file cannot hold before anything reads it."""
    size = path.stat().st_size
    with path.open("rb") as f:
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
    return " ".join(str(exc).split()) or type(exc).__name__
