"""`fuel generate`: continue a text as it stands."""

from __future__ import annotations

from typing import Annotated

import typer

from fuel_core.cli.options import (
    Device,
    Dtype,
    ExplainPlan,
    FamilyName,
    Json,
    MaxNewTokens,
    MaxSeqLen,
    Model,
    Plan,
    Seed,
    Stop,
    Threads,
    Weights,
)
from fuel_core.cli.output import note
from fuel_core.cli.reply import print_reply, prompt_text

__all__ = ["generate"]


def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The text to continue; without it, or as -, stdin.")
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    stop: Stop = None,
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
    """Continue a text as given, greedily. No chat template is applied."""
    from fuel_core.llm import load

    text = prompt_text(prompt)
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
    if llm.tokenizer.chat_template is not None:
        note(
            "This checkpoint has a chat template: `fuel chat` applies it, `fuel generate` continues the text as it is."
        )
    stream = llm.stream(text, max_new_tokens=max_new_tokens, stop=stop, seed=seed)
    print_reply(llm, stream, json=json, explain_plan=explain_plan)
