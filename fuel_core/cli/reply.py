"""What `generate` and `chat` share: print a reply as it comes, then what it cost and what the plan did."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuel_core.cli.output import note, print_json
from fuel_core.errors import GenerationError

if TYPE_CHECKING:
    from fuel_core.generation import TokenLogprob
    from fuel_core.llm import Completion, LanguageModel, TextStream
    from fuel_core.persistent_decode import DecodeStats, InferenceContext

__all__ = [
    "as_json",
    "explain",
    "per_second",
    "plan_text",
    "print_completions",
    "print_reply",
    "prompt_text",
    "show_progress",
]


_LONG_PROMPT = 2048
"""Tokens still to compute from which on a terminal shows how far a prompt is."""


def prompt_text(prompt: str | None, file: Path | None = None) -> str:
    """The prompt as given, or all of `file`, or all of stdin where there is neither, or the prompt is "-".

    One newline at the end of a file or of stdin is left out: the shell put it there. Raises GenerationError for two
    prompts and for bytes that are not UTF-8, OSError for a file that cannot be read.
    """
    if file is not None:
        if prompt is not None:
            raise GenerationError("prompt: one source expected, found PROMPT and --file; leave one of them out")
        return _without_newline(_utf8(file.read_bytes(), str(file)))
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        note("Reading the prompt from the terminal; end it with Ctrl-D.")
    raw = getattr(sys.stdin, "buffer", None)
    return _without_newline(sys.stdin.read() if raw is None else _utf8(raw.read(), "stdin"))


def _utf8(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise GenerationError(
            f"{origin}: UTF-8 text expected, found byte 0x{data[error.start]:02x} at offset {error.start}; convert it"
        ) from None


def _without_newline(text: str) -> str:
    return text.removesuffix("\n")


def show_progress() -> Callable[[int, int], None] | None:
    """What shows how far a long prompt is, on one line of a terminal's stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        return None
    shown = False

    def show(done: int, total: int) -> None:
        nonlocal shown
        if done == total:
            if shown:
                # The line is the reply's from here on.
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            return
        shown = shown or total - done >= _LONG_PROMPT
        if shown:
            print(f"\rprompt: {done} of {total} tokens", end="", file=sys.stderr, flush=True)

    return show


def print_reply(llm: LanguageModel, stream: TextStream, *, json: bool, explain_plan: bool) -> None:
    """Print a reply: as text while it is generated, or as one JSON object once it is complete.

    With `explain_plan` the decisions about the plan follow on stderr (FUEL_LOG=plan prints each as it is taken).
    """
    arrivals = []
    with stream:
        for piece in stream:
            arrivals.append(time.perf_counter())
            if not json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    done = stream.completion
    assert done is not None, "a stream that ended has a completion"
    if json:
        print_json(as_json(llm, done, per_second(arrivals), explain_plan))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        note(_summary(done, per_second(arrivals)))
        if done.logprobs is not None:
            note("--logprobs: printed with --json only")
    if explain_plan:
        explain(llm.context)


def print_completions(llm: LanguageModel, replies: Sequence[Completion], *, json: bool, explain_plan: bool) -> None:
    """Print several complete replies to one prompt: each text after a line on stderr, or one JSON object."""
    if json:
        report: dict[str, Any] = {"completions": [as_json(llm, done, None, False) for done in replies]}
        if explain_plan:
            report["plan_events"] = [str(event) for event in llm.context.plan_events]
        print_json(report)
    else:
        for index, done in enumerate(replies, 1):
            seed = "" if done.seed is None else f", seed {done.seed}"
            note(f"-- {index} of {len(replies)}{seed}: {_summary(done, None)}")
            sys.stdout.write(done.text + "\n")
            sys.stdout.flush()
        if len(replies) > 1 and replies[0].seed is None:
            note("Nothing was drawn, so the replies are the same; --temperature 1 draws.")
        if any(done.logprobs is not None for done in replies):
            note("--logprobs: printed with --json only")
    if explain_plan:
        explain(llm.context)


def explain(ctx: InferenceContext) -> None:
    """Print what happened to the context's held plans, oldest first."""
    for event in ctx.plan_events:
        note(f"fuel plan: {event}")


def plan_text(stats: DecodeStats) -> str:
    """The plan counters in one line."""
    replans = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.replans.items())) or "none"
    return (
        f"plan {stats.plan_backend}: built {stats.plans_built}, rebinds {stats.rebinds}, "
        f"re-pointed {stats.rebound_kv}, replans {replans}, fresh steps {stats.fresh_steps}"
        + (f", moved to native code {stats.handovers}" if stats.handovers else "")
    )


def per_second(arrivals: list[float]) -> float | None:
    """Tokens a second after the second, None for fewer than three.

    The first token pays for the prompt and the second may pay for building the plan: neither is what a token costs.
    """
    return (len(arrivals) - 2) / (arrivals[-1] - arrivals[1]) if len(arrivals) > 2 else None


def _summary(done: Completion, speed: float | None) -> str:
    usage, stats = done.usage, done.stats
    parts = [f"{usage.completion_tokens} tokens ({done.finish_reason})"]
    if stats.prompt_ms:
        parts.append(f"prompt of {usage.prompt_tokens} in {stats.prompt_ms:.0f} ms")
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    return f"{', '.join(parts)}; {plan_text(stats)}"


def as_json(llm: LanguageModel, done: Completion, speed: float | None, explain_plan: bool) -> dict[str, Any]:
    """A finished reply as `--json` reports it; `speed` in tokens a second."""
    report: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "usage": {**asdict(done.usage), "total_tokens": done.usage.total_tokens},
        "seed": done.seed,
        "tokens_per_second": speed,
        "stats": done.stats.as_dict(),
    }
    if done.logprobs is not None:
        report["logprobs"] = [_logprob_json(entry) for entry in done.logprobs]
    if explain_plan:
        report["plan_events"] = [str(event) for event in llm.context.plan_events]
    return report


def _logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    report: dict[str, Any] = {"token": entry.token, "token_id": entry.token_id, "logprob": entry.logprob}
    return report | {"top": [{"token": t.token, "token_id": t.token_id, "logprob": t.logprob} for t in entry.top]}
