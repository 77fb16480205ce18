"""`fuel chat`: the answer to a message, or a conversation, through the checkpoint's chat template."""

from __future__ import annotations

from typing import Annotated

import typer

from fuel_core.cli.options import (
    Completions,
    Device,
    Dtype,
    ExplainPlan,
    FamilyName,
    FrequencyPenalty,
    IgnoreEos,
    Json,
    LogitBias,
    Logprobs,
    MaxNewTokens,
    MaxSeqLen,
    MinP,
    Model,
    Plan,
    PresencePenalty,
    PromptFile,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    Threads,
    TopK,
    TopP,
    Weights,
    request_options,
)
from fuel_core.cli.reply import print_completions, print_reply, prompt_text, show_progress
from fuel_core.errors import GenerationError

__all__ = ["chat"]


def chat(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The message; - reads it from stdin; without it, a conversation."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before it.", show_default="the template's")
    ] = None,
    file: PromptFile = None,
    max_new_tokens: MaxNewTokens = 512,
    completions: Completions = None,
    stop: Stop = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    presence_penalty: PresencePenalty = None,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    logprobs: Logprobs = None,
    ignore_eos: IgnoreEos = False,
    threads: Threads = None,
    device: Device = "cpu",
    weights: Weights = "auto",
    dtype: Dtype = "auto",
    max_seq_len: MaxSeqLen = None,
    plan: Plan = "auto",
    family: FamilyName = None,
    explain_plan: ExplainPlan = False,
    json: Json = False,
) -> None:
    """Answer a message, or hold a conversation, through the checkpoint's chat template."""
    from fuel_core.llm import load

    message = None if prompt is None and file is None else prompt_text(prompt, file)
    if message is None and completions is not None:
        raise GenerationError("--completions: a message to answer expected, found none; give PROMPT, or leave it out")
    options = request_options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=logit_bias,
        seed=seed,
        logprobs=logprobs,
        stop=stop,
        ignore_eos=ignore_eos,
        on_progress=show_progress(),
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
    # A conversation is long enough for native code to pay, and what this one begins serves the next as well.
    llm.compile_after = 0
    if message is None:
        from fuel_core.cli.repl import converse

        converse(
            llm, system=system, max_new_tokens=max_new_tokens, options=options, json=json, explain_plan=explain_plan
        )
        return
    messages = [{"role": "user", "content": message}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if completions is not None:
        done = llm.chat(messages, max_new_tokens, n=completions, **options)
        print_completions(llm, done, json=json, explain_plan=explain_plan)
        return
    stream = llm.stream_chat(messages, max_new_tokens, **options)
    print_reply(llm, stream, json=json, explain_plan=explain_plan)
