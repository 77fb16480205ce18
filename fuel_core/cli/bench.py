"""`fuel bench`: decoding with a held plan (D2) against every step fresh (D1), on the same prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuel_core.cli.bench_plot import check_plot, draw, sparkline
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


_FRESH, _HELD, _RECORDED = "D1", "D2", "D2 recorded"
_MEANING = {_FRESH: "D1, every step fresh", _HELD: "D2, plan held", _RECORDED: "D2, recorded plan held"}


@dataclass
class _Side:
    """One way of decoding, with a context and a cache of its own."""

    ctx: InferenceContext
    cache: KvCache
    token_ids: list[int] = field(default_factory=list)
    seconds_per_token: list[float] = field(default_factory=list)
    step_seconds: list[list[float]] = field(default_factory=list)
    """Of each measured run, the seconds of each step."""

    def measure(self, llm: LanguageModel, prompt: list[int], tokens: int) -> None:
        """Take down what each step of a run costs."""
        steps = self.run(llm, prompt, tokens)
        self.step_seconds.append(steps)
        self.seconds_per_token.append(median(steps))

    def run(self, llm: LanguageModel, prompt: list[int], tokens: int) -> list[float]:
        """Generate `tokens` after `prompt` and return the seconds of each decode step.

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
        return steps

    def ms_per_token(self) -> list[float]:
        """Milliseconds of each decode step, the median over the runs."""
        return [round(1e3 * median(step), 4) for step in zip(*self.step_seconds, strict=True)]


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
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw what each token cost: .png, .svg, .pdf.", show_default=False),
    ] = None,
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
    if plot is not None:
        check_plot(plot)
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
    report, sides = _measure(llm, prompt, tokens, pairs, max_seq_len, each_backend=plot is not None)
    if plot is not None:
        title = f"{Path(model).name}: {tokens} tokens after {report['prompt_tokens']}, median and range of {pairs} runs"
        drawn = {_FRESH: sides[_FRESH], f"D2 {sides[_HELD].ctx.stats.plan_backend}": sides[_HELD], **sides}
        del drawn[_HELD]
        draw(plot, title, {label: side.step_seconds for label, side in drawn.items()}, _FRESH)
        report["plot"] = str(plot)
    if json:
        print_json(report)
    else:
        _print(report, sides)
    if explain_plan:
        explain(sides[_HELD].ctx)


def _measure(
    llm: LanguageModel, prompt: str, tokens: int, pairs: int, max_seq_len: int | None, *, each_backend: bool
) -> tuple[dict[str, Any], dict[str, _Side]]:
    """The report, and the sides by name. each_backend: the recorded plan as well, where D2 runs native code."""
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
    sides = {_FRESH: fresh, _HELD: held}
    if each_backend and held.ctx.stats.plan_backend == "compiled":
        sides[_RECORDED] = side("recorded")
        sides[_RECORDED].run(llm, ids, tokens)
    for turn in range(pairs):
        # By turns, each first as often as the other: a machine that slows down slows both.
        for each in sides.values() if turn % 2 == 0 else reversed(sides.values()):
            each.measure(llm, ids, tokens)
    ratios = [d1 / d2 for d1, d2 in zip(fresh.seconds_per_token, held.seconds_per_token, strict=True)]
    report = {
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "pairs": pairs,
        "d1_tokens_per_second": 1 / median(fresh.seconds_per_token),
        "d2_tokens_per_second": 1 / median(held.seconds_per_token),
        "d2_over_d1": median(ratios),
        "tokens_equal": all(each.token_ids == fresh.token_ids for each in sides.values()),
        "d1_ms_per_token": fresh.ms_per_token(),
        "d2_ms_per_token": held.ms_per_token(),
        "d1_stats": fresh.ctx.stats.as_dict(),
        "d2_stats": held.ctx.stats.as_dict(),
    }
    if _RECORDED in sides:
        report["recorded_ms_per_token"] = sides[_RECORDED].ms_per_token()
    return report, sides


def _print(report: dict[str, Any], sides: dict[str, _Side]) -> None:
    shown = table("", "tokens/s", "ms a token, least to greatest", "over the reply")
    console, held = stdout_console(), sides[_HELD]
    for label, each in sides.items():
        steps = each.ms_per_token()
        bars = sparkline(steps)
        try:
            bars.encode(console.encoding)
        except UnicodeError:
            bars = ""
        rate = f"{1 / median(each.seconds_per_token):.1f}"
        shown.add_row(_MEANING[label], rate, f"{min(steps):.2f} to {max(steps):.2f}", bars)
    console.print(shown)
    equal = "equal" if report["tokens_equal"] else "NOT EQUAL"
    console.print(
        f"D2 / D1: {report['d2_over_d1']:.2f} (median of {report['pairs']} pairs of {report['tokens']} tokens "
        f"after {report['prompt_tokens']}); tokens {equal}"
    )
    console.print(plan_text(held.ctx.stats))
    if "plot" in report:
        console.print(f"drawn: {report['plot']}")
