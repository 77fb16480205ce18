"""Tokenizer files as nobody should write them: whatever stands at a key, a tokenizer comes out or one of our errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_writers import write_folder
from fuzz_files import attempt
from tiny_tokenizers import CHATML, byte_level_json

from fuel_core.checkpoint import open_checkpoint
from fuel_core.errors import FuelError
from fuel_core.testing.hostile import VALUES
from fuel_core.text import load_tokenizer

FILES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "unk_token": None,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "chat_template": CHATML,
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
        "additional_special_tokens": ["<|im_start|>"],
        "extra_special_tokens": {},
        "model_max_length": 1000,
        "tokenizer_class": "X",
    },
    "generation_config.json": {
        "eos_token_id": [1, 2],
        "bos_token_id": 1,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
    },
    "special_tokens_map.json": {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}},
}
MORE: list[Any] = [
    {"content": 7},
    {"content": None},
    {"content": "\ud800"},
    [{"content": "x"}],
    [{"name": 7, "template": 8}],
    [{"name": "default", "template": "{{ x }}"}],
    {"default": 7},
    {"0": 7},
    {"x": {"content": "a"}},
    {"-1": {"content": "a"}},
    {"99999999999": {"content": "a", "special": True}},
    [1, "a"],
    [-1, 2**40],
    "\ud800",
    ["\ud800"],
]


def use(folder: Path, files: dict[str, Any]) -> None:
    with open_checkpoint(write_folder(folder, files=files)) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.tokenizer_files())
    tokenizer.decode(tokenizer.encode("hello world <|im_end|>"))
    assert isinstance(tokenizer.stop_token_ids, frozenset)
    assert isinstance(tokenizer.eos_token_ids, frozenset | tuple)
    with suppress(FuelError):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def honest() -> dict[str, Any]:
    return {"tokenizer.json": json.loads(byte_level_json()), **copy.deepcopy(FILES)}


def as_json(value: object) -> str | None:
    """None for what JSON cannot say."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return None


def test_files_are_honest_to_begin_with(tmp_path: Path) -> None:
    assert attempt(lambda: use(tmp_path, honest()))


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in FILES.items() for key in (*keys, None)])
def test_value_of_any_type_in_a_file_beside_the_tokenizer(tmp_path: Path, name: str, key: str | None) -> None:
    for value in (*VALUES, *MORE):
        files = honest()
        changed = value if key is None else files[name] | {key: value}
        text = as_json(changed)
        if text is not None:
            attempt(lambda files=files | {name: text}: use(tmp_path, files))  # type: ignore[misc]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the first few members of every object and list."""
    if path:
        yield path
    members = list(tree)[:6] if isinstance(tree, dict) else range(min(1, len(tree))) if isinstance(tree, list) else ()
    for member in members:
        yield from places(tree[member], (*path, member))


@pytest.mark.parametrize("value", [None, 7, -1, 2**64, "", "\ud800", [], [[]], {}, {"type": "BPE"}], ids=repr)
def test_value_of_any_type_in_the_tokenizer(tmp_path: Path, value: object) -> None:
    for path in places(honest()["tokenizer.json"]):
        files = honest()
        at = files["tokenizer.json"]
        for member in path[:-1]:
            at = at[member]
        at[path[-1]] = value
        attempt(lambda files=files: use(tmp_path, files))  # type: ignore[misc]
