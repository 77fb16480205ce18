"""Mutates headers and configs and checks that only our errors come out: `make fuzz` runs the full numbers.

    python tests/fuzz_files.py --headers 10000 --configs 2000

Each case is one seed: `python tests/fuzz_files.py --only gguf:1234` runs one again. Configs are the toy's and those
that installed families declare to the conformance kit, as they are and under `text_config`, and are resolved by them;
GGUF files are single and split. What was found once is kept in tests/corpus, and every run starts with it. A case fails
if something else than a FuelError comes out, if the message is longer than a screen line can be or has several lines,
if it takes more than a second, or if memory grows beyond 256 MiB over the run.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoint_writers import TINY, gguf_pair, gguf_string, resolve, write_folder, write_gguf

from fuel_core.checkpoint import ConfigReader, RawConfig, open_checkpoint
from fuel_core.checkpoint.base import read_json_object
from fuel_core.errors import FuelError

SPLIT = "s.gguf"
CORPUS = Path(__file__).parent / "corpus"
MOST_SECONDS = 1.0
_HANG = 20
_MOST_GROWTH = 256 << 20
_LONGEST = 2000

# Numbers at which comparisons turn over.
_EDGES = [
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    33,
    255,
    256,
    4096,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


# -- bytes --------------------------------------------------------------------------------------------------------


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """A few changes of the kinds that broken and hostile files have."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", rng.choice(_EDGES))
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", rng.choice(_EDGES) & 0xFFFFFFFF)
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 5:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        elif kind == 6:
            data[at:at] = rng.randbytes(rng.randrange(1, 16))
        else:
            digits = str(rng.choice((*_EDGES, -1, 0.5, "1e999"))).encode()
            data[at : at + rng.randrange(0, 12)] = digits
    return bytes(data)


def _honest(folder: Path) -> dict[str, list[bytes]]:
    """Honest files to start from."""
    small = {"model.norm.weight": torch.ones(96), "lm_head.weight": torch.zeros(4, 96)}
    write_folder(folder, tensors=small)
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    rope = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    files = [
        write_gguf(folder / "a.gguf", small, metadata=vocabulary, stored=gguf.GGMLQuantizationType.Q8_0),
        write_gguf(
            folder / "b.gguf", metadata=rope, raw_tensors={"rope_freqs.weight": np.ones(16, "f4")}, alignment=64
        ),
        write_gguf(folder / SPLIT, small, split={"split_max_tensors": 1}),
    ]
    pair = gguf_pair("a", 9, struct.pack("<IQ", 9, 2) + (struct.pack("<IQ", 8, 1) + gguf_string("x")) * 2)
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair
    return {
        "gguf": [*(f.read_bytes() for f in files), nested],
        "safetensors": [(folder / "model.safetensors").read_bytes()],
    }


# -- configs ------------------------------------------------------------------------------------------------------

_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "su", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0, "beta_fast": 32, "mscale": 1.0, "truncate": False},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"),
    2**31, 2**53, 2**62, 2**63, 2**64, 10**400, 10**5000, "", "a", "1", "\n", "\ud800", "x" * 10_000, "torch.bfloat16",
    "float8", "banana", "linear", "default", [], [[]], [1], [1.0] * 16, [None] * 16, ["a"], [10**400], {}, {"a": {}},
    {"rope_type": "yarn"}, {"quant_method": "fp8"}, {"full_attention": {"rope_theta": 1e4}}, {"": 1}, {"type": 7},
]  # fmt: skip
_KEYS = [
    *TINY, "rope_scaling", "rope_parameters", "text_config", "dtype", "torch_dtype", "tie_word_embeddings",
    "quantization_config", "quantization", "partial_rotary_factor", "original_max_position_embeddings", "eos_token_id",
    "sliding_window", "layer_types", "hidden_act", "rope_local_base_freq", "attn_logit_softcapping", "architectures",
    "attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers", "no_rope_layers", "query_pre_attn_scalar",
    "num_experts", "num_experts_per_tok", "norm_topk_prob",
]  # fmt: skip


def mutated_config(base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A config with a few keys changed, gone, or moved to another level."""
    config = copy.deepcopy(base)
    if rng.random() < 0.5:
        config[rng.choice(("rope_scaling", "rope_parameters"))] = copy.deepcopy(rng.choice(_SCALINGS))
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        places = [config, *(v for v in config.values() if isinstance(v, dict))]
        place, kind = rng.choice(places), rng.randrange(5)
        key = rng.choice([*place, rng.choice(_KEYS)])
        if kind == 0:
            place.pop(key, None)
        elif kind == 1:
            config = {"model_type": config.get("model_type", "toy"), "text_config": config}
        elif kind == 2 and isinstance(place.get(key), (int, float)) and not isinstance(place[key], bool):
            place[key] = rng.choice((-place[key], place[key] + 1, place[key] - 1, "1", [place[key]]))
        elif kind == 3:
            place[rng.choice(_KEYS)] = copy.deepcopy(place.get(key))
        else:
            place[key] = copy.deepcopy(rng.choice(_VALUES))
    return config


# -- running one case ---------------------------------------------------------------------------------------------


class Failure(AssertionError):
    """A case that did something else than work or raise one of our errors."""


@contextmanager
def _watched() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise Failure(f"no end after {_HANG} s")

    usual = signal.signal(signal.SIGALRM, hang)
    signal.alarm(_HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)


def attempt(what: Callable[[], object]) -> bool:
    """Whether it worked; False for one of our errors. Raises Failure for everything else."""
    with _watched():
        try:
            what()
        except FuelError as error:
            text = str(error)
            if "\n" in text or not 0 < len(text) < _LONGEST:
                raise Failure(f"a message of {len(text)} characters: {text[:200]!r}") from error
            return False
        except Failure:
            raise
        except BaseException as error:
            raise Failure(f"{type(error).__name__}: {str(error)[:200]}") from error
    return True


def read_all(path: Path) -> None:
    """Open a checkpoint and look at everything that loading would look at."""
    with open_checkpoint(path) as ck:
        for name, info in ck.iter_info():
            if info.numel < 1 << 16:
                ck.tensor(name)
        ck.tokenizer_files()
        resolve(ck.raw, {"rope_theta": 1e4})


class Fuzzer:
    """Runs cases by name: "gguf:SEED", "safetensors:SEED", "config:SEED"."""

    def __init__(self, folder: Path, *, installed: bool = False) -> None:
        """installed: with the families of this environment, so that it is another run where others are installed."""
        self.folder = folder
        self.seeds = _honest(folder / "honest")
        self.bases: list[dict[str, Any]] = [TINY]
        families = []
        for family, configs in _installed() if installed else ():
            self.bases += configs
            families.append(family)
        self.resolvers = [
            lambda raw: resolve(raw, {"rope_theta": 1e4}),
            _ask_everything,
            lambda raw: [f.resolve_config(raw) for f in families if raw.model_type in f.model_types],
        ]

    def content(self, case: str) -> Any:
        kind, number = case.split(":")
        rng = random.Random(case)
        if kind == "config":
            return mutated_config(self.bases[int(number) % len(self.bases)], rng)
        seeds = self.seeds[kind]
        return mutated(seeds[int(number) % len(seeds)], rng)

    def run(self, case: str) -> bool:
        kind, content = case.split(":")[0], self.content(case)
        return self.run_content(kind, content)

    def run_content(self, kind: str, content: Any) -> bool:
        if kind == "config":
            results = [attempt(lambda r=r: r(RawConfig.from_config(content))) for r in self.resolvers]
            return all(results)
        return attempt(lambda: read_all(self.placed(kind, content)))

    def placed(self, kind: str, content: bytes) -> Path:
        """The content where a user would have it."""
        if kind == "gguf":
            # A part of a split model meets its honest other half.
            split = b"split.count" in content
            path = self.folder / "honest" / "s-00001-of-00002.gguf" if split else self.folder / "m.gguf"
            path.write_bytes(content)
            return path
        folder = self.folder / kind
        folder.mkdir(exist_ok=True)
        if kind == "safetensors":
            (folder / "config.json").write_text(json.dumps(TINY))
            (folder / "model.safetensors").write_bytes(content)
        else:
            (folder / "config.json").write_bytes(content)
        return folder


def _installed() -> list[tuple[Any, list[dict[str, Any]]]]:
    """Every installed family that declares itself to the kit, with its configs."""
    import importlib_metadata

    from fuel_core.testing.declaration import family_of
    from fuel_core.testing.locate import GROUP, declaration_of

    found = []
    for point in sorted(importlib_metadata.entry_points(group=GROUP), key=lambda point: point.name):
        declared = declaration_of(point.name)
        found.append((family_of(declared), [dict(config) for config in declared.configs.values()]))
    return found


def _ask_everything(raw: RawConfig) -> None:
    """Every getter, as families ask: for keys they may have, per layer type, and for the model as a whole."""
    reader = ConfigReader(raw, {"rope_theta": 1e4, "rope_local_base_freq": 1e4}, "toy")
    for ask in (
        lambda: reader.optional_int("sliding_window"),
        lambda: reader.optional_float("attn_logit_softcapping"),
        lambda: reader.bool("attention_bias", False),
        lambda: reader.str("hidden_act", "silu", choices=("silu", "gelu")),
        lambda: reader.ids("eos_token_id"),
        lambda: reader.list("layer_types", length=2),
        lambda: reader.rope(layer_type="full_attention"),
        lambda: reader.rope(layer_type="sliding_attention", theta_key="rope_local_base_freq", scaled=False),
        lambda: reader.rope(kinds=("default",), allow=("a",)),
        reader.dtype,
        reader.common,
        raw.reject_quantized,
    ):
        attempt(ask)
    raw.source("dtype"), raw.dtype, raw.model_type, repr(raw)


def corpus() -> list[Path]:
    """Saved files that were hard once: NAME.KIND."""
    return sorted(p for p in CORPUS.iterdir() if p.suffix in (".gguf", ".safetensors", ".config"))


def run_corpus(fuzzer: Fuzzer, path: Path) -> None:
    """One saved file; a config is read as the file it is."""
    kind = path.suffix.removeprefix(".")
    if kind != "config":
        fuzzer.run_content(kind, path.read_bytes())
        return

    def whole() -> None:
        folder = fuzzer.placed(kind, path.read_bytes())
        raw = RawConfig.from_config(read_json_object(folder / "config.json", once=True))
        for resolver in fuzzer.resolvers:
            resolver(raw)

    attempt(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--headers", type=int, default=10_000, help="mutated headers, half of each format")
    parser.add_argument("--configs", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="one case, such as gguf:12")
    options = parser.parse_args()
    cases = [f"{kind}:{options.first + i}" for i in range(options.headers // 2) for kind in ("gguf", "safetensors")]
    cases += [f"config:{options.first + i}" for i in range(options.configs)]
    worked = failed = 0
    slowest = (0.0, "")
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), installed=True)
        if options.only:
            print("worked" if fuzzer.run(options.only) else "refused")
            return 0
        for path in corpus():
            run_corpus(fuzzer, path)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in cases:
            started = time.process_time()
            try:
                worked += fuzzer.run(case)
            except Failure as failure:
                failed += 1
                print(f"{case}: {failure}", file=sys.stderr)
            slowest = max(slowest, (time.process_time() - started, case))
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(
        f"{len(cases)} cases: {worked} worked, {len(cases) - worked - failed} refused, {failed} failed; slowest "
        f"{slowest[1]} with {slowest[0]:.3f} s of CPU; peak memory grew by {growth >> 20} MiB"
    )
    return int(failed > 0 or slowest[0] > MOST_SECONDS or growth > _MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
