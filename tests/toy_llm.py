"""Language models small enough to run by the dozen: a toy backbone behind a byte-level tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiny_tokenizers import CHATML, byte_level_json, folder_source
from toy_backbone import ToyBackbone, ToyConfig, fill

from fuel_core.llm import LanguageModel
from fuel_core.text import Tokenizer, load_tokenizer

BOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class ServedConfig(ToyConfig):
    max_position_embeddings: int | None = 64
    dtype: str = "float32"


def byte_level(**changes: Any) -> Tokenizer:
    fields: dict[str, Any] = {"template": CHATML, "special_tokens": {"bos": BOS}} | changes
    return load_tokenizer(folder_source(byte_level_json(), **fields))


def make(tokenizer: Tokenizer | None = None, *, limit: int | None = 64, **options: Any) -> LanguageModel:
    tokenizer = tokenizer or byte_level()
    backbone = ToyBackbone(ServedConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=limit))
    fill(backbone)
    return LanguageModel(backbone, tokenizer=tokenizer, plan="recorded", **options)
