"""What a held plan costs to build and what a step through it costs, on one checkpoint.

Prints the time of the first plan of the process (tracing code is imported), of a first plan with that code in place, of
a plan on recordings that exist, and the median step with and without a plan in alternating rounds.

    python benchmarks/plan_costs.py MODEL [--rounds 7] [--tokens 24] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import fuel_core as fuel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    llm = fuel.load(args.model, threads=args.threads)
    backbone = llm.backbone

    def session(plan: str) -> tuple[fuel.InferenceContext, fuel.KvCache]:
        specs = backbone.layer_state_specs()
        cache = fuel.KvCache.with_capacity(specs, max_seq_len=512, dtype=llm.dtype)
        ctx = fuel.InferenceContext("cpu", plan=plan)
        fuel.forward_decode_step(backbone, list(range(1, 33)), cache, ctx)
        return ctx, cache

    def timed_step(ctx: fuel.InferenceContext, cache: fuel.KvCache) -> float:
        started = time.perf_counter()
        fuel.forward_decode_step(backbone, [5], cache, ctx)
        return (time.perf_counter() - started) * 1e3

    off = session("off")
    timed_step(*off)
    fresh = statistics.median(timed_step(*off) for _ in range(5))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(backbone.layer_state_specs())} layers")
    held = session("recorded")
    print(f"first plan of the process: {timed_step(*held) - fresh:.0f} ms beyond a step")
    other = fuel.load(args.model, threads=args.threads)
    started = time.perf_counter()
    cache = fuel.KvCache.with_capacity(other.backbone.layer_state_specs(), max_seq_len=512, dtype=other.dtype)
    fuel.forward_decode_step(other.backbone, [5], cache, fuel.InferenceContext("cpu", plan="recorded"))
    elapsed = (time.perf_counter() - started) * 1e3
    print(f"first plan of another instance, recordings shared: {elapsed - fresh:.0f} ms beyond a step")
    del other

    ratios, fresh_medians, held_medians = [], [], []
    for _ in range(args.rounds):
        a = statistics.median(timed_step(*off) for _ in range(args.tokens))
        b = statistics.median(timed_step(*held) for _ in range(args.tokens))
        fresh_medians.append(a)
        held_medians.append(b)
        ratios.append(a / b)
    print(f"fresh {statistics.median(fresh_medians):.2f} ms, held {statistics.median(held_medians):.2f} ms a token")
    print(f"fresh / held: median {statistics.median(ratios):.3f} of {[round(r, 3) for r in ratios]}")
    print(f"plans built {held[0].stats.plans_built}, rebinds {held[0].stats.rebinds}")


if __name__ == "__main__":
    main()
