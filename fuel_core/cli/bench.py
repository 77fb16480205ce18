"""`fuel bench`: decoding with a held plan (D2) against every step fresh (D1), on the same prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli.options import (
    Device,
    Dtype,
    ExplainPlan,
    FamilyName,
    Json,
    MaxSeqLen,
    Model,
    Plan,
    Seed,
    Threads,
    Weights,
)
from fuel_core.cli.output import print_json, stdout_console, table
from fuel_core.cli.reply import explain, plan_text

if TYPE_CHECKING:
    from fuel_core.kv_cache import KvCache
    from fuel_core.llm import LanguageModel
    from fuel_core.persistent_decode import InferenceContext

__all__ = ["bench"]

_PROMPT = "A plan that is held fits the next token as well as the last, because nothing it was built from has changed:"


@dataclass
class _Side:
    """One way of decoding, with a context and a cache of its own."""

    ctx: InferenceContext
    cache: KvCache
    token_ids: list[int] = field(default_factory=list)
    seconds_per_token: list[float] = field(default_factory=list)

    def run(self, llm: LanguageModel, prompt: list[int], tokens: int) -> float:
        """Generate `tokens` after `prompt` and return the median seconds of a decode step.

        Stop ids are not heeded, so that both sides take the same number of steps.
        """
        from fuel_core.generation import Generation

        generation = Generation(llm.backbone, prompt, self.cache, self.ctx, max_new_tokens=tokens)
        generation.step()  # the prompt, and the first token after it
        steps = []
        while True:
            began = time.perf_counter()
            if generation.step() is None:
                break
            steps.append(time.perf_counter() - began)
        self.token_ids = generation.token_ids
        return median(steps)


def bench(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", help="The text both sides continue.")] = _PROMPT,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=3, help="Tokens generated a run.")] = 64,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Pairs of runs, D1 and D2 by turns.")] = 5,
    threads: Threads = None,
    device: Device = "cpu",
    weights: Weights = "auto",
    dtype: Dtype = "auto",
    max_seq_len: MaxSeqLen = None,
    plan: Plan = "auto",
    seed: Seed = None,
    family: FamilyName = None,
    explain_plan: ExplainPlan = False,
    json: Json = False,
) -> None:
    """Measure decoding with a held plan (D2) and without (D1); report both, their ratio and the counters."""
    from fuel_core.errors import ConfigError
    from fuel_core.llm import load

    if plan == "off":
        raise ConfigError(
            "bench compares --plan with every step fresh: expected auto or a plan backend, found 'off'; leave it out"
        )
    llm = load(
        model,
        weights=weights,
        dtype=dtype,
        max_seq_len=max_seq_len,
        plan=plan,
        device=device,
        family=family,
        threads=threads,
    )
    report, held = _measure(llm, prompt, tokens, pairs, max_seq_len)
    if json:
        print_json(report)
    else:
        _print(report, held)
    if explain_plan:
        explain(held.ctx)


def _measure(
    llm: LanguageModel, prompt: str, tokens: int, pairs: int, max_seq_len: int | None
) -> tuple[dict[str, Any], _Side]:
    from fuel_core.kv_cache import KvCache
    from fuel_core.persistent_decode import InferenceContext

    ids = llm.tokenizer.encode(prompt)
    capacity = max_seq_len or len(ids) + tokens

    def side(plan: str) -> _Side:
        specs = llm.backbone.layer_state_specs()
        cache = KvCache.with_capacity(specs, max_seq_len=capacity, dtype=llm.dtype, device=llm.device)
        return _Side(InferenceContext(llm.device, plan=plan), cache)

    fresh, held = side("off"), side(llm.plan)
    # One unmeasured run each: first-touch memory, and D2's recording, are not what a token costs.
    fresh.run(llm, ids, tokens)
    held.run(llm, ids, tokens)
    for turn in range(pairs):
        # By turns, each first as often as the other: a machine that slows down slows both.
        for each in (fresh, held) if turn % 2 == 0 else (held, fresh):
            each.seconds_per_token.append(each.run(llm, ids, tokens))
    ratios = [d1 / d2 for d1, d2 in zip(fresh.seconds_per_token, held.seconds_per_token, strict=True)]
    report = {
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "pairs": pairs,
        "d1_tokens_per_second": 1 / median(fresh.seconds_per_token),
        "d2_tokens_per_second": 1 / median(held.seconds_per_token),
        "d2_over_d1": median(ratios),
        "tokens_equal": fresh.token_ids == held.token_ids,
        "d1_stats": fresh.ctx.stats.as_dict(),
        "d2_stats": held.ctx.stats.as_dict(),
    }
    return report, held


def _print(report: dict[str, Any], held: _Side) -> None:
    shown = table("", "tokens/s")
    shown.add_row("D1, every step fresh", f"{report['d1_tokens_per_second']:.1f}")
    shown.add_row("D2, plan held", f"{report['d2_tokens_per_second']:.1f}")
    console = stdout_console()
    console.print(shown)
    equal = "equal" if report["tokens_equal"] else "NOT EQUAL"
    console.print(
        f"D2 / D1: {report['d2_over_d1']:.2f} (median of {report['pairs']} pairs of {report['tokens']} tokens "
        f"after {report['prompt_tokens']}); tokens {equal}"
    )
    console.print(plan_text(held.ctx.stats))
