"""Several replies at once in an event loop, each token by token; one of them is given up on.

    python examples/streaming.py MODEL

Every step runs in the loop's thread pool, so the loop never waits for the model. Requests without a thread of their own
share a few caches, each with its plans.
"""

import asyncio
import sys

import fuel_core as fuel


async def follow(llm: fuel.LanguageModel, name: str, prompt: str) -> str:
    """Print each piece as it comes. `completion` is set once the last one is out."""
    async with llm.astream(prompt, max_new_tokens=12, ignore_eos=True) as reply:
        async for piece in reply:
            print(f"[{name}] {piece.text!r}")
    assert reply.completion is not None
    return reply.completion.text


async def give_up(llm: fuel.LanguageModel, prompt: str) -> None:
    """Leaving the block (or cancelling the task) ends a reply, after the step it is in the middle of."""
    async with llm.astream(prompt, max_new_tokens=1000, ignore_eos=True) as reply:
        async for piece in reply:
            print(f"[gave up] {piece.text!r}")
            break


async def serve(llm: fuel.LanguageModel) -> None:
    a, b, _ = await asyncio.gather(
        follow(llm, "first", "Once upon a time"), follow(llm, "second", "In the beginning"), give_up(llm, "Far away")
    )
    print(f"first: {a!r}\nsecond: {b!r}")


def main(path: str) -> None:
    with fuel.load(path, plan="recorded", max_seq_len=128) as llm:
        asyncio.run(serve(llm))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except fuel.FuelError as error:  # one line: expected, found, next step
        sys.exit(str(error))
