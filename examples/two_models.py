"""Two models in one process, token by token in turn: each keeps its own plan, and no plan serves the other model.

    python examples/two_models.py MODEL [OTHER_MODEL]

Without OTHER_MODEL the same checkpoint is loaded twice. That is the harder case: the two have equal structure and equal
weights, and a plan of one would give plausible logits for the other. They are told apart by their instance ids.
"""

import sys

import fuel_core as fuel

PROMPT, STEPS = "Once upon a time", 6


def show(title: str, context: fuel.InferenceContext) -> None:
    """Print what the context did about plans first, and why: equal decisions in a row are one line."""
    stats = context.stats
    print(f"{title}: plans built {stats.plans_built}, rebinds {stats.rebinds}, recordings {stats.recordings}")
    for event in list(context.plan_events)[:6]:
        print(f"    {event}")


def separate_contexts(a: fuel.LanguageModel, b: fuel.LanguageModel) -> None:
    """The usual way: a LanguageModel has a cache and a context of its own, so alternating costs nothing."""
    streams = [llm.stream(PROMPT, max_new_tokens=STEPS, ignore_eos=True) for llm in (a, b)]
    for of_a, of_b in zip(*streams, strict=True):  # a token of one, a token of the other
        print(f"{of_a.text!r} {of_b.text!r}", end="  ")
    print()
    show("first model", a.context)
    show("second model", b.context)


def one_shared_context(a: fuel.LanguageModel, b: fuel.LanguageModel, max_sessions: int) -> None:
    """A level lower: one context for both. It holds several plans and finds the right one for each step."""
    context = fuel.InferenceContext("cpu", max_sessions=max_sessions)
    turns = []
    for llm in (a, b):
        cache = fuel.KvCache.with_capacity(
            llm.backbone.layer_state_specs(), max_seq_len=64, dtype=llm.dtype, device="cpu"
        )
        turns.append((llm.backbone, llm.tokenizer.encode(PROMPT), cache))
    for _ in range(STEPS):
        for i, (backbone, ids, cache) in enumerate(turns):
            # A prompt runs fresh. The first single token builds the plan, and every later one is bound to it.
            logits = fuel.forward_decode_step(backbone, ids, cache, context)
            turns[i] = (backbone, [int(logits.argmax())], cache)
    show(f"one context, max_sessions={max_sessions}", context)


def main(path: str, other: str | None = None) -> None:
    with fuel.load(path, plan="recorded") as a, fuel.load(other or path, plan="recorded") as b:
        separate_contexts(a, b)
        one_shared_context(a, b, max_sessions=4)  # the default: two plans, both kept
        one_shared_context(a, b, max_sessions=1)  # room for one: every turn drops the other's plan and builds anew


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except fuel.FuelError as error:  # one line: expected, found, next step
        sys.exit(str(error))
