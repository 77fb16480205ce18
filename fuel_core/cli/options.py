"""Arguments and options that several verbs share: one spelling, one meaning, one help text each."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "Device",
    "Dtype",
    "ExplainPlan",
    "FamilyName",
    "Json",
    "MaxNewTokens",
    "MaxSeqLen",
    "Model",
    "Plan",
    "Seed",
    "Stop",
    "Threads",
    "Weights",
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
    str, typer.Option("--weights", help="How parameters are stored: auto (as in the checkpoint), f32, bf16, f16.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Activations and KV cache: auto (the checkpoint's), float32, bfloat16, float16.")
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option("--max-seq-len", min=1, help="Positions of the KV cache.", show_default="grows up to the model's"),
]
Plan = Annotated[str, typer.Option("--plan", help="Which plan to hold: auto, recorded, or off (every step fresh).")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Seed of sampling; greedy decoding draws nothing.", show_default=False)
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
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Stop before this text. May be given again.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
