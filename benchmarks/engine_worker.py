"""One engine in a process of its own, told what to run by `compare.py` over a pipe.

    python engine_worker.py fuel|transformers|llama.cpp

Reads one JSON object a line from standard input (`{"do": "load", ...}`) and answers each with one line: `{"ok": ...}`,
or `{"missing": why}` for what this installation lacks, or `{"error": why}`. Every engine is timed by the same code, and
chooses the largest logit itself: choosing a token is part of what a token costs.

Imports nothing but the standard library until it is told to, so that a first token can be timed from there.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any


class MissingError(Exception):
    """What was asked for is not in this installation; the message says what would bring it."""


def _import(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingError(f"{error.name} is not installed (pip install {distribution})") from None


class Engine(ABC):
    """A model that continues token ids greedily, one call a token.

    A prompt is computed from nothing, unless `reuse` says that what the cache shares with it may stay: then all but its
    last token does.
    """

    distributions: Sequence[str] = ()
    """Packages whose versions belong into a result."""

    def base(self) -> None:  # noqa: B027 - most of an engine's imports are its own
        """Import what any user of the stack has imported; time and memory of it are reported apart."""

    @abstractmethod
    def load(self, model: str, weights: str, mode: str, threads: int) -> None:
        """Read the model. Raises MissingError where this installation cannot do `weights` or `mode`."""

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def reserve(self, capacity: int) -> None:
        """Make, or pick up again, the KV cache of `capacity` positions that the next prompt goes into."""

    @abstractmethod
    def start(self, prompt: list[int], reuse: bool) -> int:
        """Run the prompt and return the first token after it."""

    @abstractmethod
    def step(self, token: int) -> int:
        """Run one token and return the next."""

    def about(self) -> dict[str, Any]:
        """What is worth keeping beside the numbers."""
        versions = {}
        for name in self.distributions:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "not installed"
        return {"python": sys.version.split()[0], "versions": versions}


class _Torch(Engine):
    def base(self) -> None:
        self.torch = _import("torch", "torch")


class Fuel(_Torch):
    """`mode` is the plan: off, recorded or compiled."""

    distributions = ("fuel-core", "torch")

    def load(self, model: str, weights: str, mode: str, threads: int) -> None:
        self.fuel = fuel = _import("fuel_core", "fuel-core")
        try:
            self.llm = fuel.load(model, weights=weights, plan=mode, threads=threads)
        except fuel.FuelError as error:
            raise MissingError(str(error)) from None
        self.mode = mode
        self.sessions: dict[int, tuple[Any, Any]] = {}

    def encode(self, text: str) -> list[int]:
        return list(self.llm.tokenizer.encode(text))

    def reserve(self, capacity: int) -> None:
        if capacity not in self.sessions:
            specs = self.llm.backbone.layer_state_specs()
            cache = self.fuel.KvCache.with_capacity(specs, max_seq_len=capacity, dtype=self.llm.dtype)
            self.sessions[capacity] = (self.fuel.InferenceContext("cpu", plan=self.mode), cache)
        self.ctx, self.cache = self.sessions[capacity]

    def start(self, prompt: list[int], reuse: bool) -> int:
        self.generation = self.fuel.Generation(
            self.llm.backbone,
            prompt,
            self.cache,
            self.ctx,
            max_new_tokens=self.cache.max_seq_len,
            reuse_cache=reuse,
        )
        return self.step(-1)

    def step(self, token: int) -> int:
        # The generation remembers the token itself.
        return int(self.generation.step().token_id)

    def about(self) -> dict[str, Any]:
        formats = sorted({str(p.dtype).removeprefix("torch.") for p in self.llm.backbone.parameters()})
        return super().about() | {
            "activations": str(self.llm.dtype).removeprefix("torch."),
            "parameters": formats,
            "plan": self.ctx.stats.as_dict(),
        }


class Transformers(_Torch):
    """`mode`: eager has a cache that grows; compiled has a static one, and `torch.compile` around the decode step."""

    distributions = ("transformers", "torch")

    def load(self, model: str, weights: str, mode: str, threads: int) -> None:
        transformers = _import("transformers", "transformers")
        torch = self.torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.transformers, self.mode = transformers, mode
        dtype = {"auto": "auto", "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}.get(weights)
        if dtype is None:
            raise MissingError(f"no weights {weights!r} here: auto, f32, bf16 or f16")
        if mode not in ("eager", "compiled"):
            raise MissingError(f"no mode {mode!r} here: eager or compiled")
        self.folder = model
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.forward = self.model.forward
        if mode == "compiled":
            self.forward = torch.compile(self.model.forward, fullgraph=True, dynamic=False)
        self.caches: dict[int, Any] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.transformers.AutoTokenizer.from_pretrained(self.folder)(text)["input_ids"]
        return ids

    def reserve(self, capacity: int) -> None:
        if capacity not in self.caches:
            config = self.model.config
            if self.mode == "compiled":
                cache = self.transformers.StaticCache(config=config, max_cache_len=capacity)
            else:
                cache = self.transformers.DynamicCache(config=config)
            self.caches[capacity] = [cache, []]
        self.held = self.caches[capacity]

    def start(self, prompt: list[int], reuse: bool) -> int:
        cache, held = self.held
        keep = len(prompt) - 1 if reuse and held[: len(prompt) - 1] == prompt[:-1] else 0
        if keep:
            # A negative number is how many to take away; zero means something else.
            if len(held) > keep:
                cache.crop(keep - len(held))
        elif held and self.mode == "compiled":
            cache.reset()
        elif held:
            cache = self.held[0] = self.transformers.DynamicCache(config=self.model.config)
        self.held[1] = held = prompt[:keep]
        # A prompt runs eagerly in either mode, as in transformers' own generate().
        return self._run(self.model.forward if keep == 0 else self.forward, prompt[keep:])

    def step(self, token: int) -> int:
        return self._run(self.forward, [token])

    def _run(self, forward: Any, ids: list[int]) -> int:
        torch, (cache, held) = self.torch, self.held
        tokens = torch.tensor([ids])
        positions = torch.arange(len(held), len(held) + len(ids))[None]
        done = forward(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        held.extend(ids)
        return int(done.logits[0, -1].argmax())


class LlamaCpp(Engine):
    """llama.cpp by its C interface, as llama-cpp-python binds it: what that package adds in Python is not timed."""

    distributions = ("llama-cpp-python",)

    def base(self) -> None:
        self.np = _import("numpy", "numpy")

    def load(self, model: str, weights: str, mode: str, threads: int) -> None:
        try:
            self.lib = lib = _import("llama_cpp", "llama-cpp-python")
        except (OSError, RuntimeError) as error:  # the package is there, its library does not load
            raise MissingError(f"llama_cpp cannot be used: {error}") from None
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise MissingError(f"llama.cpp does not read {Path(model).name}")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.threads = threads
        self.contexts: dict[int, list[Any]] = {}

    def encode(self, text: str) -> list[int]:
        raw = text.encode()
        room = (self.lib.llama_token * (len(raw) + 8))()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), room, len(room), True, True)
        return list(room[:count])

    def reserve(self, capacity: int) -> None:
        if capacity not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx = capacity
            params.n_threads = params.n_threads_batch = self.threads
            ctx = self.lib.llama_init_from_model(self.model, params)
            if not ctx:
                raise MissingError(f"llama.cpp makes no context of {capacity} positions")
            self.contexts[capacity] = [ctx, []]
        self.held = self.contexts[capacity]

    def start(self, prompt: list[int], reuse: bool) -> int:
        ctx, held = self.held
        memory = self.lib.llama_get_memory(ctx)
        keep = len(prompt) - 1 if reuse and held[: len(prompt) - 1] == prompt[:-1] else 0
        self.lib.llama_memory_seq_rm(memory, 0, keep, -1)
        self.held[1] = prompt[:keep]
        size, token = 512, -1  # n_batch of a context, unless told otherwise
        for at in range(keep, len(prompt), size):
            token = self._run(prompt[at : at + size])
        return token

    def step(self, token: int) -> int:
        return self._run([token])

    def _run(self, ids: list[int]) -> int:
        lib, (ctx, held) = self.lib, self.held
        room = (lib.llama_token * len(ids))(*ids)
        # A batch without positions follows what is cached, and gives the logits of its last token.
        failed = lib.llama_decode(ctx, lib.llama_batch_get_one(room, len(ids)))
        if failed:
            raise RuntimeError(f"llama_decode answered {failed} at position {len(held)}")
        held.extend(ids)
        pointer = lib.llama_get_logits_ith(ctx, -1)
        logits = self.np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.n_vocab,))
        return int(logits.argmax())

    def about(self) -> dict[str, Any]:
        return super().about() | {"features": self.lib.llama_print_system_info().decode().strip()}


ENGINES: dict[str, type[Engine]] = {"fuel": Fuel, "transformers": Transformers, "llama.cpp": LlamaCpp}


def memory_mib() -> dict[str, float]:
    """Peak resident memory so far, and what of the present one belongs to no file, in MiB."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    # VmHWM, not ru_maxrss: that one starts at what the parent had when it forked.
    return {"peak": int(lines["VmHWM"].split()[0]) / 1024, "anonymous": int(lines["RssAnon"].split()[0]) / 1024}


class Worker:
    """Answers requests about one engine; each method named `do_...` is one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cpu_before_idle: float | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, which is left as it is."""
        name, arguments = request["do"], {key: value for key, value in request.items() if key != "do"}
        # CPU time spent since the last answer: an engine that spins while another is measured would show here.
        idle = 0.0 if self.cpu_before_idle is None else time.process_time() - self.cpu_before_idle
        try:
            done = getattr(self, f"do_{name}")(**arguments)
        except MissingError as error:
            return {"missing": _one_line(error)}
        except Exception as error:
            if os.environ.get("FUEL_DEBUG") == "1":
                raise
            return {"error": f"{type(error).__name__}: {_one_line(error)}"}
        finally:
            self.cpu_before_idle = time.process_time()
        return {"ok": done, "idle_cpu_s": idle}

    def do_load(self, model: str, weights: str, mode: str, threads: int, capacity: int) -> dict[str, Any]:
        self.engine.base()
        began = time.perf_counter()
        self.engine.load(model, weights, mode, threads)
        self.engine.reserve(capacity)
        return {"load_s": time.perf_counter() - began}

    def do_encode(self, text: str) -> list[int]:
        return self.engine.encode(text)

    def do_about(self) -> dict[str, Any]:
        return self.engine.about()

    def do_run(self, prompt: list[int], tokens: int, capacity: int, reuse: bool = False) -> dict[str, Any]:
        """`tokens` greedy tokens after `prompt`, each timed; the first includes the prompt. Times are in ms."""
        self.engine.reserve(capacity)
        ids: list[int] = []
        ms: list[float] = []
        for index in range(tokens):
            began = time.perf_counter()
            ids.append(self.engine.step(ids[-1]) if index else self.engine.start(prompt, reuse))
            ms.append((time.perf_counter() - began) * 1e3)
        return {"token_ids": ids, "prompt_ms": ms[0], "step_ms": ms[1:]}

    def do_cold(
        self, model: str, weights: str, mode: str, threads: int, prompt: list[int], tokens: int, capacity: int
    ) -> dict[str, Any]:
        """From a fresh process to its tokens, counted from when the engine's base (torch, numpy) is imported."""
        began = time.perf_counter()
        self.engine.base()
        imported = time.perf_counter()
        base = memory_mib()
        self.engine.load(model, weights, mode, threads)
        loaded = time.perf_counter()
        self.engine.reserve(capacity)
        token = self.engine.start(prompt, False)
        first = time.perf_counter()
        for _ in range(tokens - 1):
            token = self.engine.step(token)
        last = time.perf_counter()
        return {
            "import_ms": (imported - began) * 1e3,
            "load_ms": (loaded - imported) * 1e3,
            "first_token_ms": (first - imported) * 1e3,
            "all_tokens_ms": (last - imported) * 1e3,
            "tokens": tokens,
            "base_mib": base,
            "mib": memory_mib(),
        }


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def serve(engine: Engine, requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    worker = Worker(engine)
    for line in requests:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit(f"one of {', '.join(ENGINES)} expected, found {' '.join(sys.argv[1:]) or 'nothing'}")
    # Libraries print to standard output as they please; the answers keep a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(ENGINES[sys.argv[1]](), sys.stdin, answers)


if __name__ == "__main__":
    main()
