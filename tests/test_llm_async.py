"""Requests of an event loop: the same replies, a loop that never waits, and an end as soon as nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy_llm import make

from fuel_core.errors import CapacityError, GenerationError
from fuel_core.generation import decode_loop
from fuel_core.llm import AsyncTextStream, LanguageModel


class Gate:
    """Lets the model take a step only when told to, and counts the steps it began and finished."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.finished = 0, 0
        self._open = threading.Semaphore(0)
        real = decode_loop.forward_decode_step

        def step(*args: Any, **options: Any) -> torch.Tensor:
            self.begun += 1
            assert self._open.acquire(timeout=60), "the event loop is blocked: it never let this step go on"
            logits = real(*args, **options)
            self.finished += 1
            return logits

        monkeypatch.setattr(decode_loop, "forward_decode_step", step)

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._open.release()


async def reached(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.001)


def free(llm: LanguageModel) -> bool:
    return not any(slot.busy for slot in llm._slots)


def test_astream_gives_the_pieces_and_the_completion_of_stream() -> None:
    llm = make()
    expected = llm.generate("hello", 7)

    async def run() -> tuple[list[int], AsyncTextStream]:
        stream = make().astream("hello", 7)
        return [piece.token_id async for piece in stream], stream

    ids, stream = asyncio.run(run())
    assert ids == expected.token_ids
    assert stream.completion is not None
    assert (stream.completion.text, stream.completion.usage) == (expected.text, expected.usage)


def test_event_loop_goes_on_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make().generate("hello world", 3).token_ids
    gate, llm = Gate(monkeypatch), make()

    async def run() -> list[int]:
        task = asyncio.ensure_future(llm.agenerate("hello world", 3))
        for step in range(3):
            # Only this loop lets the step go on; a loop that waited for it would never come here.
            await reached(lambda step=step: gate.begun == step + 1)  # type: ignore[misc]
            gate.let(1)
        return (await task).token_ids

    assert asyncio.run(run()) == expected


@pytest.mark.parametrize("how", ["agenerate", "astream", "achat"])
def test_cancelled_request_ends_within_its_step_and_leaves_the_model_usable(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    llm = make()
    with monkeypatch.context() as patch:
        gate = Gate(patch)

        async def consume() -> None:
            if how == "astream":
                async for _ in llm.astream("hello world", 50):
                    pass
            else:
                await getattr(llm, how)("hello world", 50, temperature=0.0)

        async def run() -> None:
            task = asyncio.ensure_future(consume())
            gate.let(2)
            await reached(lambda: gate.begun == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # at once: the step is still held at the gate
            assert gate.finished == 2
            gate.let(50)
            await reached(lambda: free(llm))

        asyncio.run(run())
        assert (gate.begun, gate.finished) == (3, 3), "nothing but the step in the middle of which it was"
    done = asyncio.run(llm.agenerate("hello world", 3))
    assert done.token_ids == make().generate("hello world", 3).token_ids
    assert (done.usage.cached_tokens > 0) is (how != "achat"), "the cache is kept"


def test_cancelled_prefill_ends_within_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, llm = Gate(monkeypatch), make(prefill_chunk=8)

    async def run() -> None:
        task = asyncio.ensure_future(llm.agenerate([1] * 50, 5))
        await reached(lambda: gate.begun == 1)
        task.cancel()
        # The cancellation arrives with a turn of the loop; a worker let go before that may begin another chunk.
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.let(50)
        await reached(lambda: free(llm))

    asyncio.run(run())
    assert gate.finished == 1, "of seven chunks"


@pytest.mark.parametrize("how", ["aclose", "with", "drop"])
def test_async_reply_left_early_frees_its_cache_for_the_next(how: str) -> None:
    llm = make()

    async def run() -> None:
        stream = llm.astream("hello world", 50)
        if how == "with":
            async with stream:
                await anext(stream)
        else:
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
                await stream.aclose()
        if how == "drop":
            del stream
        else:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await reached(lambda: free(llm))  # a thread may be about to let go of what it has just done
        assert (await llm.agenerate("hello world", 2)).usage.cached_tokens == 1

    asyncio.run(run())
    assert len(llm._slots) == 1


def test_many_at_once_get_what_each_gets_alone_and_leave_few_caches() -> None:
    prompts = ["hello", "hello world", "fox", "own", "world", "ld", "he", "or"]
    alone = [make().generate(prompt, 6).token_ids for prompt in prompts]
    llm = make()

    async def run() -> list[list[int]]:
        return [done.token_ids for done in await asyncio.gather(*(llm.agenerate(p, 6) for p in prompts))]

    assert asyncio.run(run()) == alone
    assert asyncio.run(run()) == alone
    asyncio.run(llm.agenerate("hello", 1))
    assert len(llm._shared_slots) <= 4


def test_async_errors_are_those_of_the_call() -> None:
    llm = make(limit=16)

    async def pull(stream: AsyncTextStream) -> None:
        async for _ in stream:
            pass

    with pytest.raises(CapacityError, match="17 tokens, the limit is 16"):
        asyncio.run(pull(llm.astream([1] * 17)))
    with pytest.raises(GenerationError, match="top_k"):
        asyncio.run(llm.agenerate("hello", top_k=-5))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="temprature"):
        llm.astream("hello", temprature=1)  # type: ignore[call-arg]
    assert free(llm)


def test_async_stream_serves_one_task_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, llm = Gate(monkeypatch), make()

    async def run() -> None:
        stream = llm.astream("hello", 5)
        first = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
        await reached(lambda: gate.begun == 1)
        with pytest.raises(GenerationError, match="one task at a time"):
            await anext(stream)
        gate.let(5)
        await first

    asyncio.run(run())


def test_async_copies_and_seeds_are_those_of_the_call() -> None:
    several = asyncio.run(make().agenerate("hello world", 4, n=2, temperature=1.0, seed=3))
    assert [r.token_ids for r in several] == [
        r.token_ids for r in make().generate("hello world", 4, n=2, temperature=1.0, seed=3)
    ]
