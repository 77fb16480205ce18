"""`fuel generate`: continue a text as it stands."""

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
from fuel_core.cli.output import note
from fuel_core.cli.reply import print_completions, print_reply, prompt_text, show_progress

__all__ = ["generate"]


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The text to continue; without it, or as -, stdin (less one newline at its end)."
        ),
    ] = None,
    file: PromptFile = None,
    max_new_tokens: MaxNewTokens = 128,
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
    """Continue a text as given, greedily unless told otherwise. No chat template is applied."""
    from fuel_core.llm import load

    text = prompt_text(prompt, file)
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
    hint = "This checkpoint has a chat template: `fuel chat` applies it, `fuel generate` continues the text as it is."
    # After what may be refused: an error stands alone.
    if completions is not None:
        done = llm.generate(text, max_new_tokens, n=completions, **options)
        if llm.tokenizer.chat_template is not None:
            note(hint)
        print_completions(llm, done, json=json, explain_plan=explain_plan)
    else:
        stream = llm.stream(text, max_new_tokens, **options)
        if llm.tokenizer.chat_template is not None:
            note(hint)
        print_reply(llm, stream, json=json, explain_plan=explain_plan)
