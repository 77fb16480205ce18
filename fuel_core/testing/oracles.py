"""Where true logits come from, and the tiny checkpoints they are true of.

An oracle writes a checkpoint folder for a config and gives a function from token ids to logits. It shares no code with
the decode path. The weights are made here, from each tensor's name, shape and a seed, so that they are the same under
every version of torch and numpy: norm gains away from 1, biases away from 0, scores neither flat nor saturated.

The reference library is imported inside the oracle that uses it and nowhere else.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from fuel_core.errors import ConformanceError

if TYPE_CHECKING:
    from torch import Tensor

    from fuel_core.families import Family

__all__ = [
    "Logits",
    "Oracle",
    "golden_oracle",
    "record_golden",
    "reference_oracle",
    "tiny_weights",
    "transformers_oracle",
    "write_checkpoint",
]

Logits: TypeAlias = "Callable[[Sequence[int]], Tensor]"
"""Token ids -> logits ``[T, V]``: row i is what follows ids[: i + 1]."""


class Oracle(Protocol):
    """Writes the checkpoint of a config with the weights of a seed, and says what is true of it."""

    def prepare(self, name: str, config: Mapping[str, Any], folder: Path, family: Family, seed: int) -> Logits:
        """Fill ``folder`` (it exists and is empty) with a Hugging Face checkpoint; return its true logits."""
        ...


def _uniform(name: str, shape: Sequence[int], seed: int) -> Any:
    """Uniform float64 numbers in [-1, 1), a function of name, shape and seed. Philox's raw stream never changes."""
    import numpy as np

    key = (zlib.crc32(name.encode()) << 32) | seed
    raw = np.random.Philox(key=key).random_raw(math.prod(shape))
    return ((raw >> np.uint64(11)).astype(np.float64) / 2**52 - 1.0).reshape(tuple(shape))


def tiny_weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """float32 weights by tensor name that keep activations near 1 and avoid the values that hide bugs."""
    import numpy as np
    import torch

    # A head that shares the embedding is not in the file: its logits would be as large as the embedding is wide.
    tied = not any("head" in name or "output" in name for name in shapes)
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        u = _uniform(name, shape, seed)
        if len(shape) < 2:
            values = 1.0 + 0.4 * u if "norm" in name or "ln_" in name else 0.4 * u
        elif "embed" in name:
            values = 0.5 * u * (3.0 / shape[-1]) ** 0.5 if tied else u
        else:
            scores = any(part in name for part in ("q_proj", "k_proj", "qkv", "query", "key"))
            gain = 1.5 if scores else 0.5 if "head" in name else 1.0
            values = gain * u * (3.0 / shape[-1]) ** 0.5
        made[name] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return made


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A Hugging Face folder: config.json and one safetensors file."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


# -- a class of transformers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TransformersOracle:
    model_class: Any

    def prepare(self, name: str, config: Mapping[str, Any], folder: Path, family: Family, seed: int) -> Logits:
        import torch

        transformers = _import_transformers()
        given = {key: value for key, value in config.items() if key != "model_type"}
        found = self.model_class
        if isinstance(found, str):
            module, _, attribute = found.rpartition(".")
            found = getattr(importlib.import_module(module or "transformers"), attribute)
        if found is None:
            made = transformers.AutoConfig.for_model(config["model_type"], **given)
            made._attn_implementation = "eager"
            model = transformers.AutoModelForCausalLM.from_config(made)
        else:
            made = found.config_class(**given)
            made._attn_implementation = "eager"
            model = found(made)
        model = model.to(torch.float32).eval()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for key, values in tiny_weights({k: tuple(p.shape) for k, p in parameters.items()}, seed).items():
                parameters[key].copy_(values)
        model.save_pretrained(folder)

        def logits(ids: Sequence[int]) -> Tensor:
            with torch.no_grad():
                out: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
            return out

        return logits


def _import_transformers() -> Any:
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        raise ConformanceError(
            "transformers_oracle: transformers is expected beside the family under test, found none; install the "
            "family with its test extra, or give it a golden_oracle"
        ) from error
    found.utils.logging.disable_progress_bar()
    return found


def transformers_oracle(model_class: Any = None) -> Oracle:
    """Truth from transformers, in float32 with eager attention.

    model_class: a class, or its name ("transformers.ZebraForCausalLM"); None takes the one that the config's
    ``model_type`` stands for.
    """
    return _TransformersOracle(model_class)


# -- a function of the author's own ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ReferenceOracle:
    function: Callable[[Any, Mapping[str, Tensor], Sequence[int]], Tensor]
    checkpoint_name: Callable[[str], str]

    def prepare(self, name: str, config: Mapping[str, Any], folder: Path, family: Family, seed: int) -> Logits:
        from fuel_core.checkpoint import RawConfig

        spec = family.resolve_config(RawConfig.from_config(config))
        weights = tiny_weights(self._shapes(family, spec), seed)
        write_checkpoint(folder, config, weights)
        return lambda ids: self.function(spec, weights, ids)

    def _shapes(self, family: Family, spec: Any) -> dict[str, tuple[int, ...]]:
        import torch

        with torch.device("meta"):
            backbone = family.build(spec)
        tied = {taker for taker, _ in backbone.tied_weights()}
        return {self.checkpoint_name(key): tuple(p.shape) for key, p in backbone.named_parameters() if key not in tied}


def reference_oracle(
    function: Callable[[Any, Mapping[str, Tensor], Sequence[int]], Tensor],
    checkpoint_name: Callable[[str], str] = str,
) -> Oracle:
    """Truth from ``function(spec, weights by tensor name, ids) -> logits [T, V]``, written apart from the family.

    checkpoint_name: parameter name -> tensor name in a checkpoint, where they differ.
    """
    return _ReferenceOracle(function, checkpoint_name)


# -- a file -----------------------------------------------------------------------------------------------------------


def _key(name: str, seed: int, ids: Sequence[int]) -> str:
    return f"{name}/{seed}/{hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:20]}"


@dataclass(frozen=True)
class _GoldenOracle:
    path: Path

    def prepare(self, name: str, config: Mapping[str, Any], folder: Path, family: Family, seed: int) -> Logits:
        from safetensors import safe_open
        from safetensors.torch import load_file

        if not self.path.exists():
            raise ConformanceError(
                f"golden_oracle: {self.path} expected, found no such file; write it with record_golden"
            )
        with safe_open(self.path, framework="pt") as file:
            held = json.loads(file.metadata()["checkpoints"]).get(f"{name}/{seed}")
        if held is None or held["asked"] != json.loads(json.dumps(dict(config))):
            raise ConformanceError(
                f"golden_oracle: {self.path} holds no config {name!r} as it is declared now; write it anew"
            )
        write_checkpoint(folder, held["config"], tiny_weights(held["shapes"], seed))
        rows = load_file(self.path)

        def logits(ids: Sequence[int]) -> Tensor:
            found = rows.get(_key(name, seed, ids))
            if found is None:
                raise ConformanceError(
                    f"golden_oracle: {self.path} holds no logits of {name!r} for these {len(ids)} ids; write it anew"
                )
            return found

        return logits


def golden_oracle(path: str | Path) -> Oracle:
    """Truth from a file that ``record_golden`` wrote: no reference is needed where the checks run."""
    return _GoldenOracle(Path(path))


class _Recorder:
    """Another oracle, and a note of everything it was asked."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.checkpoints: dict[str, Any] = {}
        self.rows: dict[str, Tensor] = {}

    def prepare(self, name: str, config: Mapping[str, Any], folder: Path, family: Family, seed: int) -> Logits:
        import torch
        from safetensors.torch import load_file

        logits = self.oracle.prepare(name, config, folder, family, seed)
        stored: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            stored |= load_file(file)
        shapes = {key: list(tensor.shape) for key, tensor in stored.items()}
        if any(not torch.equal(stored[key], made) for key, made in tiny_weights(shapes, seed).items()):
            raise ConformanceError(
                f"record_golden: {name}: weights that can be made again from their names expected, found others; "
                "the oracle stores tensors under other names than its parameters have"
            )
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.checkpoints[f"{name}/{seed}"] = {"asked": dict(config), "config": written, "shapes": shapes}

        def noted(ids: Sequence[int]) -> Tensor:
            row = self.rows[_key(name, seed, ids)] = logits(ids).float()
            return row

        return noted


def record_golden(declaration: Any, path: str | Path, only: Sequence[str] = ()) -> int:
    """Run the checks of ``declaration`` and write what its oracle answered to ``path``; returns how many answers.

    only: checks or topics to record for; all without it.

    Raises ConformanceError if a check fails: what is wrong must not become the truth.
    """
    import dataclasses

    from safetensors.torch import save_file

    from fuel_core.testing.runner import run

    recorder = _Recorder(declaration.oracle)
    results = run(dataclasses.replace(declaration, oracle=recorder), only=only)
    failed = [result.name for result in results if result.is_bad]
    if failed:
        raise ConformanceError(
            f"record_golden: every check must pass first, found failures: {', '.join(failed)}; mend these"
        )
    save_file(recorder.rows, path, metadata={"checkpoints": json.dumps(recorder.checkpoints)})
    return len(recorder.rows)
