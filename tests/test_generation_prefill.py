"""Long prompts in chunks: the same logits, counted as what they are, in memory that does not follow the prompt."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toy_backbone import latent_reference, latent_toy, new_cache, reference, toy

from fuel_core.backbone import DecodeBackbone
from fuel_core.errors import CacheStateError, GenerationError
from fuel_core.generation import Generation, prefill_chunks
from fuel_core.persistent_decode import InferenceContext

PROMPT = [(7 * i * i + 3 * i) % 67 for i in range(45)]


def first_logits(model: DecodeBackbone, chunk: int, prompt: list[int] = PROMPT, n: int = 6) -> tuple[Tensor, list[int]]:
    seen: list[Tensor] = []

    def sampler(logits: Tensor, token_ids: object) -> int:
        seen.append(logits)
        return int(logits.argmax())

    cache, ctx = new_cache(model, max_seq_len=64), InferenceContext(plan="recorded")
    run = Generation(model, prompt, cache, ctx, max_new_tokens=n, sampler=sampler, prefill_chunk=chunk)
    ids = [token.token_id for token in run]
    return torch.stack(seen), ids


@pytest.mark.parametrize("kind", ["window", "dense", "rolling"])
def test_chunks_of_any_size_give_the_same_logits(kind: str) -> None:
    """Measured, relative to the largest logit: 5e-6 and less; with one prompt token left out between chunks, 0.4."""
    if kind == "rolling":
        latent = latent_toy(rolling=True)
        model: DecodeBackbone = latent
    else:
        plain = toy(window=5, windowed_layers=(0, 2)) if kind == "window" else toy()
        model = plain
    whole, ids = first_logits(model, 512)
    oracle = (latent_reference(latent, PROMPT + ids) if kind == "rolling" else reference(plain, PROMPT + ids))[
        len(PROMPT) - 1 : -1
    ]
    bound = 5e-5 * float(oracle.abs().max())
    for chunk in (1, 2, 3, 7, 11, 22, 44, 45):
        logits, tokens = first_logits(model, chunk)
        assert tokens == ids, chunk
        assert float((logits - whole).abs().max()) < bound, chunk
        assert float((logits.double() - oracle).abs().max()) < bound, chunk


def test_no_chunk_is_a_single_token_unless_the_rest_of_the_prompt_is() -> None:
    for n in range(1, 60):
        for chunk in range(1, 20):
            sizes = prefill_chunks(n, chunk)
            assert sum(sizes) == n
            assert n == 1 or min(sizes) > 1, (n, chunk)
            assert max(sizes) <= max(chunk, 2) + 1
    assert prefill_chunks(1, 512) == [1]
    assert prefill_chunks(1025, 512) == [512, 513]
    assert prefill_chunks(0, 512) == []


def test_chunks_count_as_prefill_and_the_plan_is_built_once() -> None:
    model, ctx = toy(), InferenceContext(plan="recorded")
    list(Generation(model, PROMPT, new_cache(model, 64), ctx, max_new_tokens=5, prefill_chunk=11))
    # 45 = 11 + 11 + 11 + 12: four fresh steps, and then as ever one build and rebinds.
    assert (ctx.stats.fresh_steps, ctx.stats.plans_built, ctx.stats.rebinds) == (4, 1, 3)
    assert (ctx.stats.decode_steps, ctx.stats.prompt_tokens) == (4, 45)


def test_chunks_begin_after_what_the_cache_holds() -> None:
    model, ctx = toy(), InferenceContext(plan="recorded")
    cache = new_cache(model, 64)
    list(Generation(model, PROMPT[:20], cache, ctx, max_new_tokens=1))
    seen: list[tuple[int, int]] = []
    run = Generation(
        model, PROMPT, cache, ctx, max_new_tokens=1, prefill_chunk=10, on_progress=lambda *n: seen.append(n)
    )
    run.step()
    assert run.cached_tokens == 20
    assert seen == [(30, 45), (40, 45), (45, 45)]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8", None])
def test_chunk_that_is_no_size_is_refused(bad: object) -> None:
    model = toy()
    with pytest.raises(GenerationError, match="prefill_chunk: a whole number of at least 1"):
        Generation(model, PROMPT, new_cache(model, 64), InferenceContext(), max_new_tokens=1, prefill_chunk=bad)  # type: ignore[arg-type]


def test_interrupted_prefill_goes_on_after_the_chunks_that_are_done() -> None:
    model, ctx = toy(), InferenceContext(plan="recorded")
    _, expected = first_logits(model, 512)

    seen: list[int] = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if seen.count(22) == 1 and done == 22:
            raise KeyboardInterrupt

    cache = new_cache(model, 64)
    run = Generation(model, PROMPT, cache, ctx, max_new_tokens=6, prefill_chunk=11, on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert cache.cached_len == 22
    assert [token.token_id for token in run] == expected
    assert ctx.stats.prompt_tokens == 45, "no position was computed twice"


def test_forked_generations_share_the_prompt_and_refuse_a_cache_that_lost_it() -> None:
    model, ctx = toy(), InferenceContext(plan="recorded")
    cache = new_cache(model, 64)
    run = Generation(model, PROMPT, cache, ctx, max_new_tokens=4)
    run.prefill()
    run.prefill()
    first = [token.token_id for token in run]
    again = run.fork()
    assert [token.token_id for token in again] == first
    assert again.cached_tokens == len(PROMPT)
    assert ctx.stats.fresh_steps == 1
    list(Generation(model, [1, 2, 3], cache, ctx, max_new_tokens=2))
    with pytest.raises(CacheStateError, match="45 positions of the prompt"):
        run.fork()


MEMORY = """
import sys
import torch
sys.path[:0] = [{tests!r}, {root!r}]
from toy_backbone import new_cache, toy
from fuel_core.generation import Generation
from fuel_core.persistent_decode import InferenceContext
torch.set_num_threads(1)
model = toy(vocab_size=20000, hidden_size=96, num_hidden_layers=2)
n = 4000
cache = new_cache(model, max_seq_len=n)
prompt = [(7 * i) % 20000 for i in range(n)]
ctx = InferenceContext(plan="recorded")
Generation(model, prompt[:300], new_cache(model, 300), ctx, max_new_tokens=1).step()  # what a process needs once
for slots in cache._layers:
    for tensor in slots.values():
        tensor.fill_(0.0)

def peak():
    # Not ru_maxrss: that of a child begins with its parent's.
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

before = peak()
Generation(model, prompt, cache, ctx, max_new_tokens=1, prefill_chunk={chunk}).step()
print((peak() - before) / 1024)
"""


def peak_mib(chunk: int) -> float:
    code = textwrap.dedent(MEMORY).format(
        tests=str(Path(__file__).parent), root=str(Path(__file__).parent.parent), chunk=chunk
    )
    # Freed blocks go back at once, so that the peak is what was alive and not what the heap had kept.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process from /proc")
def test_memory_of_a_long_prompt_follows_the_chunk() -> None:
    """Measured for 4000 tokens: 25 MiB in chunks of 256, 121 MiB in one piece, which shows that this can be seen."""
    assert peak_mib(256) < 50
    assert peak_mib(4000) > 90
