"""`fuel chat`: one answer to one message, through the checkpoint's chat template."""

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
from fuel_core.cli.reply import print_reply, prompt_text

__all__ = ["chat"]


def chat(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The message; without it, or as -, stdin.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before it.", show_default="the template's")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
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
    """Answer one message, through the checkpoint's chat template."""
    from fuel_core.llm import load

    messages = [{"role": "user", "content": prompt_text(prompt)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
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
    stream = llm.stream_chat(messages, max_new_tokens=max_new_tokens, stop=stop, seed=seed)
    print_reply(llm, stream, json=json, explain_plan=explain_plan)
