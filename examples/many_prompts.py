"""Many prompts from one held plan: in a row, through the lower level, and from several threads.

    python examples/many_prompts.py MODEL

A plan belongs to a model and to the geometry of its cache, not to a prompt: the first reply builds it, others use it.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import fuel_core as fuel

PROMPTS = [f"The capital of {country} is" for country in ("France", "Italy", "Japan", "Egypt", "Peru", "Kenya")]


def in_a_row(llm: fuel.LanguageModel) -> list[str]:
    """One LanguageModel, one thread: each request reuses the thread's cache, and the plan with it."""
    replies = [llm.generate(prompt, max_new_tokens=8, ignore_eos=True) for prompt in PROMPTS]
    for number, reply in enumerate(replies, start=1):
        # `stats` of a Completion are what this request added; `cached_tokens` is what it shares with the one before.
        stats, usage = reply.stats, reply.usage
        print(
            f"prompt {number}: {usage.prompt_tokens} tokens, {usage.cached_tokens} from the cache; "
            f"plans built {stats.plans_built}, recordings {stats.recordings}, rebinds {stats.rebinds}"
        )
    print(f"in a row: plans built {sum(reply.stats.plans_built for reply in replies)} for {len(replies)} prompts")
    return [reply.text for reply in replies]


def lower_level(llm: fuel.LanguageModel) -> list[str]:
    """The same with the parts in one's own hands: a cache, a context, and logits to do as one likes with."""
    backbone, tokenizer = llm.backbone, llm.tokenizer
    cache = fuel.KvCache.with_capacity(backbone.layer_state_specs(), max_seq_len=128, dtype=llm.dtype, device="cpu")
    context = fuel.InferenceContext("cpu", plan="recorded")
    texts = []
    for prompt in PROMPTS:
        cache.truncate_to(0)  # the storage stays, so the plan stays attached to it; clear() would let go of both
        # Prompts run fresh (D1), single tokens through the plan (D2); this call knows which is which.
        logits = fuel.forward_decode_step(backbone, tokenizer.encode(prompt), cache, context)
        ids = [int(logits.argmax())]
        while len(ids) < 8:
            logits = fuel.forward_decode_step(backbone, ids[-1:], cache, context)
            ids.append(int(logits.argmax()))
        texts.append(tokenizer.decode(ids))
    print(f"lower level: plans built {context.stats.plans_built}, rebinds {context.stats.rebinds}")
    for event in list(context.plan_events)[:5]:
        print(f"    {event}")
    return texts


def threads(llm: fuel.LanguageModel, workers: int = 2) -> list[str]:
    """Any thread may ask. Each has its own cache and plan, so replies are what they would be alone."""

    def ask(prompt: str) -> fuel.Completion:
        return llm.generate(prompt, max_new_tokens=8, ignore_eos=True)

    with ThreadPoolExecutor(workers) as pool:
        replies = list(pool.map(ask, PROMPTS))
    built, recorded = (sum(getattr(r.stats, name) for r in replies) for name in ("plans_built", "recordings"))
    print(f"{workers} threads: plans built {built} (one a thread at most), recordings {recorded} (structure is shared)")
    return [reply.text for reply in replies]


def main(path: str) -> None:
    with fuel.load(path, plan="recorded", max_seq_len=128) as llm:
        texts = in_a_row(llm)
        print("lower level gives the same text:", lower_level(llm) == texts)
        print("threads give the same text:", threads(llm) == texts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except fuel.FuelError as error:  # one line: expected, found, next step
        sys.exit(str(error))
