"""What a long prompt costs beside the weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuel_core import InferenceContext, forward_decode_step, forward_with_kv_context
from tiny_llama import load, new_cache, reference_model, save, token_ids
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuel_llama.llama import LlamaBackbone

VOCAB, PROMPT = 50_000, 2000
LIMIT = 50 * 10**6
"""Bytes over the weights and the cache. One row of the head is 0.2 MB, all rows of the prompt 400 MB."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an op of the block made and that is still alive; ``peak`` is the most.

    It sees what torch allocates as tensors, on any machine and to the byte; work buffers inside a kernel it does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in before | self._known:
                self._watch(leaf.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        pointer, size = storage.data_ptr(), storage.nbytes()
        self._known.add(pointer)
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self._known.discard(pointer)
            self.live -= size

        weakref.finalize(storage, gone)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> LlamaBackbone:
    changes = {"vocab_size": VOCAB, "head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 2}
    return load(save(reference_model(**changes, max_position_embeddings=4096), Path(tmp_path_factory.mktemp("large"))))


def peak_of(step: Callable[[], Tensor]) -> tuple[int, Tensor]:
    gc.collect()
    with LiveBytes() as counter:
        logits = step()
    return counter.peak, logits


@pytest.mark.parametrize("offset_path", ["symbol", "device"])
def test_long_prompt_computes_one_row_of_the_head(backbone: LlamaBackbone, offset_path: str) -> None:
    ids = token_ids(PROMPT, VOCAB)
    ctx = InferenceContext("cpu", plan="recorded", offset_path=offset_path)
    cache = new_cache(backbone, PROMPT + 8)
    peak, logits = peak_of(lambda: forward_decode_step(backbone, ids, cache, ctx))
    assert logits.shape == (VOCAB,)
    assert 4 * VOCAB < peak < LIMIT
    forward_decode_step(
        backbone, [1], cache, ctx
    )  # builds the plan, on tensors without storage that no counter can see
    step, _ = peak_of(lambda: forward_decode_step(backbone, [1], cache, ctx))
    assert step < LIMIT / 10


def test_counter_sees_the_head_on_every_row(backbone: LlamaBackbone) -> None:
    """The control: what the limit forbids is measured when it is asked for."""
    ids = token_ids(PROMPT, VOCAB)
    cache, ctx = new_cache(backbone, PROMPT), InferenceContext("cpu", plan="off")
    peak, logits = peak_of(lambda: forward_with_kv_context(backbone, ids, cache, ctx, all_positions=True))
    assert logits.shape == (PROMPT, VOCAB)
    assert peak > 4 * PROMPT * VOCAB
