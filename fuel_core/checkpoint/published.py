"""Looks up published format words in `published_names.toml`. Code asks here for a behaviour and never spells a word."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fuel_core.errors import TokenizerError

__all__ = [
    "PreTokenizerRule",
    "family_package",
    "known_rope_types",
    "permuted_architectures",
    "pre_tokenizer",
    "rope_behaviour",
    "table",
    "tokenizer_kind",
    "turn_end_tokens",
]


@dataclass(frozen=True)
class PreTokenizerRule:
    """How text is cut before byte-pair merging.

    Apply each regex of `splits` in order to every piece so far; matches and the gaps between them both stay pieces
    (the tokenizers library calls this `Split(Regex(s), behavior="isolated")`), then map bytes to the printable
    alphabet without a further regex and without adding a space in front. `ignore_merges`: a piece that is a token as a
    whole is taken as it is. `add_bos`: what a file without `tokenizer.ggml.add_bos_token` means.
    """

    name: str
    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads((files("fuel_core.checkpoint") / "published_names.toml").read_text(encoding="utf-8"))


def table(name: str) -> Mapping[str, Any]:
    """One table of the data file, as parsed."""
    found: Mapping[str, Any] = _tables()[name]
    return found


def family_package(word: str, *, gguf: bool) -> str | None:
    """Package that serves a `model_type`, or with `gguf` a `general.architecture`; None if none is known to."""
    claims = "gguf_architectures" if gguf else "model_types"
    return next((package for package, names in table("families").items() if word in names[claims]), None)


def rope_behaviour(word: str) -> str | None:
    """Behaviour a published RoPE type stands for ("default", "linear", "dynamic", "banded", "yarn", "longrope")."""
    found: str | None = table("rope_types").get(word)
    return found


def known_rope_types() -> tuple[str, ...]:
    """Every published RoPE type that is known, sorted."""
    return tuple(sorted(table("rope_types")))


def tokenizer_kind(word: str) -> str | None:
    """Kind of vocabulary a GGUF `tokenizer.ggml.model` word stands for: "bpe" or "spm"; None if unknown."""
    found: str | None = table("tokenizer_models").get(word)
    return found


def permuted_architectures() -> frozenset[str]:
    """GGUF architectures whose query and key rows are stored in interleaved order."""
    return frozenset(table("gguf")["permuted_query_key"])


def turn_end_tokens() -> tuple[str, ...]:
    """Token texts that end a turn in published vocabularies."""
    return tuple(table("turn_end")["tokens"])


@cache
def _pre_tokenizers() -> Mapping[str, PreTokenizerRule]:
    rules = {}
    for entry in table("pre_tokenizers").values():
        for name in entry["names"]:
            rules[name] = PreTokenizerRule(
                name, tuple(entry["splits"]), entry.get("ignore_merges", False), entry.get("add_bos", False)
            )
    return rules


def pre_tokenizer(name: str | None) -> PreTokenizerRule:
    """Rule for a GGUF `tokenizer.ggml.pre` name; a file without one means "default".

    Raises TokenizerError for an unknown name: cutting text another way gives other ids without any sign of it.
    """
    rules = _pre_tokenizers()
    rule = rules.get(name or "default")
    if rule is None:
        raise TokenizerError(
            f"unknown GGUF pre-tokenizer {name!r}: expected one of {', '.join(sorted(rules))}; "
            "use the Hugging Face folder of this model, which carries its own tokenizer.json"
        )
    return rule
