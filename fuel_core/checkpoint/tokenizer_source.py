"""Everything a checkpoint says about its tokenizer, as read from disk and not yet interpreted.

Holds bytes, strings and integers only: no tokenizer is built here, no template is rendered, and no name is given a
meaning. A Hugging Face folder fills the first group of fields and a GGUF file the second; `stop_ids`, `special_ids`
and `chat_templates` are filled by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["GgufVocabulary", "TokenizerSource"]


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class GgufVocabulary:
    """The `tokenizer.ggml.*` keys of a GGUF file.

    `model_kind` is the published word in lower case ("gpt2", ...); `kind` is the behaviour it stands for:
    "bpe" (byte-level, explicit merges) or "spm" (scored pieces: the adjacent pair whose joined piece has the highest
    score merges first, leftmost on ties; U+2581 for a space, byte pieces `<0xNN>` as fallback).
    `pre_tokenizer` is the published pre-tokenizer name, None where the file has none; its rule is
    `fuel_core.checkpoint.published.pre_tokenizer(name)`.

    `tokens[i]` is the piece of id i, as stored (byte-level pieces are in the printable alphabet; scored pieces use
    U+2581 for a space). `token_types[i]`: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; empty
    where the file has none. `scores[i]` is a log probability or rank; empty where the file has none. `merges` are
    "left right" strings in rank order.

    `add_bos` is `tokenizer.ggml.add_bos_token`, or its default: True for "spm", False for "bpe" unless the
    pre-tokenizer rule says otherwise (and a beginning-of-sequence id must exist as well before one is added).
    `add_eos` is False unless the file says so. `add_space_prefix` is True unless the file says otherwise; it means
    something for "spm" only.
    """

    model_kind: str
    kind: Literal["bpe", "spm"]
    pre_tokenizer: str | None
    tokens: tuple[str, ...]
    token_types: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = True


@dataclass(frozen=True)
class TokenizerSource:
    """What `text/` needs to build a tokenizer, a chat template and a stop set.

    - `format`: "huggingface" or "gguf".
    - `origin`: the folder or file, for messages.
    - `tokenizer_json`: the bytes of `tokenizer.json`, None without one.
    - `tokenizer_config`: `tokenizer_config.json` (with `special_tokens_map.json` filling keys it lacks).
    - `chat_templates`: name -> template text; the unnamed one is "default". `chat_template.jinja` (and
      `additional_chat_templates/NAME.jinja`) win over `tokenizer_config.json`.
    - `generation_config`: `generation_config.json`; without that file, the generation keys found in `config.json`.
    - `special_ids`: role -> id, for the roles the checkpoint publishes as numbers: "bos", "eos", "pad", "unk",
      "eot", "eom". Where a role has several ids, the first.
    - `stop_ids`: every end-of-sequence and end-of-turn id published as a number, by place: {"config.json": (1, 106),
      "generation_config.json": (1,), "tokenizer.ggml.eot_token_id": (5,)}. `published_stop_ids` is their union.
    - `special_tokens`: role -> token text from `tokenizer_config`, for the same roles (their ids are in the
      vocabulary, which is not parsed here).
    - `gguf`: the vocabulary of a GGUF file, None for a folder.
    """

    format: Literal["huggingface", "gguf"]
    origin: str
    tokenizer_json: bytes | None = field(default=None, repr=False)
    tokenizer_config: Mapping[str, Any] = field(default_factory=_empty, repr=False)
    chat_templates: Mapping[str, str] = field(default_factory=_empty, repr=False)
    generation_config: Mapping[str, Any] = field(default_factory=_empty)
    special_ids: Mapping[str, int] = field(default_factory=_empty)
    stop_ids: Mapping[str, tuple[int, ...]] = field(default_factory=_empty)
    special_tokens: Mapping[str, str] = field(default_factory=_empty)
    gguf: GgufVocabulary | None = field(default=None, repr=False)

    @property
    def published_stop_ids(self) -> frozenset[int]:
        """Union of `stop_ids` over every place."""
        return frozenset(i for ids in self.stop_ids.values() for i in ids)

    @property
    def chat_template(self) -> str | None:
        """Text of the template named "default", or the only one there is, or None."""
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        if len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return None
