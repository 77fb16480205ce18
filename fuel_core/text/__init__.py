"""Text in, text out: tokenizer, chat template, incremental detokenizer.

Knows nothing of models, caches or plans; it is fed by `checkpoint.TokenizerSource` and used by `llm`.
"""

from __future__ import annotations

from fuel_core.text.chat_template import ChatTemplate
from fuel_core.text.detokenizer import IncrementalDetokenizer
from fuel_core.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "load_tokenizer"]
