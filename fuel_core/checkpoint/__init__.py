"""Checkpoints on disk: finding them, reading their config, and loading their tensors. Knows no family.

Importing this package imports neither torch nor gguf.
"""

from __future__ import annotations

from fuel_core.checkpoint.base import Checkpoint, TensorInfo
from fuel_core.checkpoint.config import ConfigReader, DecoderConfig, RawConfig, RopeParameters
from fuel_core.checkpoint.open import open_checkpoint
from fuel_core.checkpoint.tokenizer_source import GgufVocabulary, TokenizerSource
from fuel_core.checkpoint.weights import LoadReport, load_weights

__all__ = [
    "Checkpoint",
    "ConfigReader",
    "DecoderConfig",
    "GgufVocabulary",
    "LoadReport",
    "RawConfig",
    "RopeParameters",
    "TensorInfo",
    "TokenizerSource",
    "load_weights",
    "open_checkpoint",
]
