"""Arguments and options that several verbs share: one spelling, one meaning, one help text each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuel_core.errors import GenerationError

if TYPE_CHECKING:
    from fuel_core.llm import RequestOptions

__all__ = [
    "Completions",
    "Device",
    "Dtype",
    "ExplainPlan",
    "FamilyName",
    "FrequencyPenalty",
    "IgnoreEos",
    "Json",
    "LogitBias",
    "Logprobs",
    "MaxNewTokens",
    "MaxSeqLen",
    "MinP",
    "Model",
    "Plan",
    "PresencePenalty",
    "PromptFile",
    "RepetitionPenalty",
    "Seed",
    "Stop",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "Weights",
    "request_options",
]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A Hugging Face folder, a .gguf file, or a Hub id that is in the local Hub cache."
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads for arithmetic.", show_default="torch's choice")
]
Device = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1.")]
Weights = Annotated[
    str,
    typer.Option(
        "--weights", help="How parameters are stored: auto (as wide as in the checkpoint), f32, bf16, f16, int8, int4."
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Activations and KV cache: auto (the checkpoint's), float32, bfloat16, float16.")
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(
        "--max-seq-len", min=1, max=2**31 - 1, help="Positions of the KV cache.", show_default="grows up to the model's"
    ),
]
Plan = Annotated[
    str, typer.Option("--plan", help="Which plan to hold: auto, recorded, compiled, or off (every step fresh).")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of sampling, 0..2**64-1; greedy decoding draws nothing.", show_default="fresh"),
]
FamilyName = Annotated[
    str | None,
    typer.Option(
        "--family",
        help="Family or distribution that serves the model, where several claim it.",
        show_default="by model_type",
    ),
]
ExplainPlan = Annotated[
    bool, typer.Option("--explain-plan", help="Print what happened to the held plan, step by step, on stderr.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")]
Completions = Annotated[
    int | None,
    typer.Option(
        "--completions",
        min=1,
        metavar="N",
        help="That many replies to the prompt, which is computed once.",
        show_default="one, as it is generated",
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop before this text. May be given again.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="PATH", help="Read the prompt from this UTF-8 file.", show_default=False),
]

# The names and meanings of SamplingParams; docs/sampling.md has the formulas and their order. What is left out is the
# verb's default: greedy for `generate`, the checkpoint's published sampling for `chat`.
_SAMPLING = "Sampling"
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0 is greedy.", show_default="0, or what chat reads", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", help="Keep the k most probable; 0 or -1: all.", show_default=False, rich_help_panel=_SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Keep the most probable up to this mass; 1: all.", show_default=False, rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Keep what is at least this fraction as probable as the best; 0: all.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Above 1: make what is in prompt or reply less likely.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty",
        help="Subtracted per occurrence in the reply.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty",
        help="Subtracted once for what is in the reply.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=NUMBER",
        help="Add to the logit of a token id; -inf bans it. May be given again.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="With --json: log-probability of every token, and of the N most probable.",
        show_default=False,
        rich_help_panel=_SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the ids that end a reply.", rich_help_panel=_SAMPLING)
]


def request_options(
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    frequency_penalty: float | None,
    presence_penalty: float | None,
    logit_bias: Sequence[str] | None,
    seed: int | None,
    logprobs: int | None,
    stop: Sequence[str] | None,
    ignore_eos: bool,
    on_progress: Callable[[int, int], None] | None,
) -> RequestOptions:
    """The keywords of a request, as the command line gives them. Raises GenerationError for a malformed bias."""
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "logit_bias": _biases(logit_bias or ()),
        "seed": seed,
        "logprobs": logprobs,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "on_progress": on_progress,
    }


def _biases(given: Sequence[str]) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for entry in given:
        token_id, _, amount = entry.partition("=")
        try:
            biases[int(token_id)] = float(amount)
        except ValueError:
            raise GenerationError(
                f"--logit-bias: ID=NUMBER expected, found {entry!r}; write it as in 42=-1.5"
            ) from None
    return biases or None
