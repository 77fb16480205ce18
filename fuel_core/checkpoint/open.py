"""Finds the checkpoint a user means: a folder, a .gguf file, or a Hub id already in the local Hub cache. No network."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fuel_core.checkpoint.base import listed, read_json_object, reading, refuse_lfs_pointer, shown
from fuel_core.errors import CheckpointNotFoundError, UnsupportedCheckpointError

if TYPE_CHECKING:
    from fuel_core.checkpoint.base import Checkpoint

__all__ = ["hub_cache_folder", "open_checkpoint"]

_HUB_ID: Final = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w.-]+))?")
_FILE_SUFFIXES: Final = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_ADAPTER: Final = "adapter_config.json"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint, reading headers only.

    `path` is a Hugging Face folder, a .gguf file, a folder with one .gguf file, or a Hub id ("org/name", with
    "@revision" for another one than main) that is in the local Hub cache. A path that exists wins over a Hub id.

    Raises CheckpointNotFoundError (nothing there, or not all of it), CheckpointCorruptError (the bytes contradict
    themselves), UnsupportedCheckpointError (a form that is refused by name) or ConfigError.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise CheckpointNotFoundError(
            f"path: expected a folder, a .gguf file or a Hub id, as text or Path, found {text!r:.80}; name one of these"
        )
    if not text.strip():
        # Path("") is the current folder, which nobody means who passes a variable that was never set.
        raise CheckpointNotFoundError(
            f"path: expected a folder, a .gguf file or a Hub id, found the empty text {text!r:.80}; name the "
            "checkpoint ('.' is the current folder)"
        )
    with reading(listed([text])):
        return _open(text)


def _open(text: str) -> Checkpoint:
    try:
        place = Path(text).expanduser()
    except RuntimeError:  # "~name" of nobody
        place = Path(text)
    if place.is_dir():
        return _open_folder(place)
    if place.is_file():
        return _open_file(place)
    if place.is_symlink():
        raise CheckpointNotFoundError(
            f"{place}: expected a checkpoint, found a link to nothing; download the checkpoint again"
        )
    return _open_folder(_hub_snapshot(text))


def hub_cache_folder() -> Path:
    """Folder of the local Hub cache: HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME or ~/.cache below it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        explicit = os.environ.get(name)
        if explicit:
            return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _open_file(path: Path) -> Checkpoint:
    from fuel_core.checkpoint.gguf_file import GgufCheckpoint

    refuse_lfs_pointer(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    with path.open("rb") as f:
        if f.read(4) == b"GGUF":
            return GgufCheckpoint(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise UnsupportedCheckpointError(
            f"{path}: expected a folder or a .gguf file, found one file of a folder; name its folder {path.parent}"
        )
    raise UnsupportedCheckpointError(
        f"{path}: expected a Hugging Face folder or a .gguf file, found another kind of file; name the model's folder"
    )


def _open_folder(folder: Path) -> Checkpoint:
    from fuel_core.checkpoint.huggingface import HuggingFaceCheckpoint, partial_downloads

    has_config = (folder / "config.json").is_file()
    safetensors = any(not f.name.startswith("adapter_") for f in folder.glob("*.safetensors*"))
    ggufs = sorted(f for f in folder.glob("*.gguf") if not f.name.startswith("mmproj"))
    broken = sorted(
        f.name for f in (folder / "config.json", *folder.glob("*.gguf")) if f.is_symlink() and not f.exists()
    )
    if broken:
        raise CheckpointNotFoundError(
            f"{folder}: expected the files of a checkpoint, found links to nothing: {listed(broken)}; download the "
            "checkpoint again"
        )
    if (folder / _ADAPTER).is_file() and not safetensors:
        base = read_json_object(folder / _ADAPTER).get("base_model_name_or_path")
        raise UnsupportedCheckpointError(
            f"{folder}: expected a whole model, found a LoRA adapter for {shown(base)}; merge it into that model first "
            "(peft: merge_and_unload) and open the result"
        )
    if ggufs and not safetensors:
        from fuel_core.checkpoint.gguf_file import GgufCheckpoint, shard_paths

        if len(ggufs) > 1 and not set(ggufs) <= set(shard_paths(ggufs[0])):
            raise CheckpointNotFoundError(
                f"{folder}: expected one .gguf file, found {len(ggufs)} "
                f"({listed((f.name for f in ggufs), 4)}); name the file you mean"
            )
        return GgufCheckpoint(ggufs[0])
    if has_config:
        return HuggingFaceCheckpoint(folder)
    snapshots = _snapshots(folder)
    if snapshots:
        raise CheckpointNotFoundError(
            f"{folder}: expected a checkpoint, found the Hub cache's outer folder of one; name {snapshots[0]} "
            f"or the Hub id {_repo_of(folder)}"
        )
    cached = sorted(f for f in folder.iterdir() if f.is_dir() and f.name.startswith("models--"))
    if cached:
        raise CheckpointNotFoundError(
            f"{folder}: expected a checkpoint, found a Hub cache with {len(cached)} "
            f"{'model' if len(cached) == 1 else 'models'}; name one by its Hub id, such as {_repo_of(cached[0])}"
        )
    partial = partial_downloads(folder)
    if partial:
        raise CheckpointNotFoundError(
            f"{folder}: expected config.json or a .gguf file, found an unfinished download ({listed(partial)}); let it "
            "finish, or start it again"
        )
    inside = sorted(f.name for f in folder.iterdir())
    below = [folder / name for name in inside if (folder / name / "config.json").is_file()]
    raise CheckpointNotFoundError(
        f"{folder}: expected config.json or a .gguf file, found "
        f"{listed(inside, 4) or 'an empty folder'}; "
        f"name {' or '.join(map(str, below[:3])) if below else 'the folder that holds config.json'}"
    )


def _snapshots(folder: Path) -> list[Path]:
    place = folder / "snapshots"
    return sorted(f for f in place.iterdir() if f.is_dir()) if place.is_dir() else []


def _repo_of(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _hub_snapshot(text: str) -> Path:
    """Folder of a Hub id's snapshot in the local cache."""
    match = _HUB_ID.fullmatch(text)
    if match is None or text.endswith(_FILE_SUFFIXES):
        raise CheckpointNotFoundError(
            f"{listed([text])}: expected a Hugging Face folder, a .gguf file or a Hub id, found nothing at that path; "
            "check it"
        )
    repo, revision = match["repo"], match["revision"] or "main"
    cache = hub_cache_folder()
    folder = cache / f"models--{repo.replace('/', '--')}"
    command = f"hf download {repo}" + (f" --revision {match['revision']}" if match["revision"] else "")
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"{text}: expected a folder, a .gguf file or a Hub id in the local cache, found no such path and no "
            f"{folder.name} in {cache}; check the path, or download it with: {command}"
        )
    ref = folder / "refs" / revision
    if ref.is_file():
        commit = ref.read_text(encoding="utf-8", errors="replace").strip()
    else:
        commit = revision
        snapshots = _snapshots(folder)
        if match["revision"] is None and len(snapshots) == 1:
            commit = snapshots[0].name
    snapshot = folder / "snapshots" / commit
    if not re.fullmatch(r"[\w.-]+", commit) or commit in (".", "..") or not snapshot.is_dir():
        raise CheckpointNotFoundError(
            f"{text}: expected revision {revision!r} in the local Hub cache {folder}, found none; "
            f"download it with: {command}"
        )
    return snapshot
