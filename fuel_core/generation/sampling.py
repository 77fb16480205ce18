"""From logits to a token id: logits, then a distribution, then a draw. Sees ids so far; never the model, never text.

The order is fixed and documented in docs/sampling.md: logit_bias, repetition, frequency and presence penalties,
temperature, top_k, top_p, min_p, draw. Each formula is that of the reference's logits processors; the arithmetic is in
float64, so that neither a tiny temperature nor a vocabulary of 250,000 loses anything.
"""

from __future__ import annotations

import math
import numbers
import operator
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fuel_core.errors import GenerationError, NonFiniteLogitsError

__all__ = [
    "Sampler",
    "SamplingParams",
    "TokenLogprob",
    "TokenSampler",
    "check_finite",
    "distribution",
    "greedy",
    "sample",
    "seeded_generator",
    "token_logprob",
]

_SEEDS = 2**64


class Sampler(Protocol):
    """Chooses the next token.

    `logits`: float32 [vocab], finite. `token_ids`: prompt and generated ids so far, oldest first. A sampler of one's
    own gets copies of both and may write to them. Returns an id in 0..vocab-1.
    """

    def __call__(self, logits: Tensor, token_ids: Sequence[int]) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a token is chosen. The defaults are greedy decoding.

    - `temperature`: logits are divided by it; 0 is greedy (the highest logit, the lowest id on ties; no random number).
    - `top_k`: keep the k highest (and what ties with the last of them); 0, -1 and None keep all, as does a k beyond
      the vocabulary.
    - `top_p`: keep the most probable tokens up to and including the one that reaches this mass; 1 and None keep all, 0
      keeps one.
    - `min_p`: keep what is at least this fraction as probable as the most probable token; 0 and None keep all.
    - `repetition_penalty`: logits of ids in the prompt or the reply are divided by it if positive, multiplied if
      negative; 1 and None do nothing.
    - `frequency_penalty`, `presence_penalty`: subtracted from the logit of an id in the reply, once per occurrence and
      once.
    - `logit_bias`: id -> number added to its logit; -inf bans the id.
    - `seed`: 0..2**64-1; None takes a fresh one per request.
    - `logprobs`: report the log-probability of each chosen token, and of this many most probable ones (0: of none).

    `None` for a number means its default. Raises GenerationError, in one line, for what cannot be used.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        temperature = 0.0 if self.temperature is None else self.temperature
        put(self, "temperature", _number("temperature", temperature, low=0.0))
        put(self, "top_k", _top_k(self.top_k))
        put(self, "top_p", _off_at(1.0, _number("top_p", self.top_p, low=0.0, high=1.0)))
        put(self, "min_p", _off_at(0.0, _number("min_p", self.min_p, low=0.0, high=1.0)))
        penalty = _number("repetition_penalty", self.repetition_penalty, above=0.0)
        put(self, "repetition_penalty", _off_at(1.0, penalty))
        for name in ("frequency_penalty", "presence_penalty"):
            put(self, name, _off_at(0.0, _number(name, getattr(self, name))))
        put(self, "logit_bias", _bias(self.logit_bias))
        if self.seed is not None and not 0 <= _whole("seed", self.seed, "0..2**64-1, or None for a fresh one") < _SEEDS:
            raise GenerationError(
                f"seed: a whole number in 0..2**64-1 expected, found {_shown(self.seed)}; leave it out for a fresh one"
            )
        if self.logprobs is not None and _whole("logprobs", self.logprobs, "0 or more, or None") < 0:
            raise GenerationError(
                f"logprobs: a whole number of 0 or more expected, found {_shown(self.logprobs)}; 0 reports the chosen"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0

    @property
    def reads_ids(self) -> bool:
        """Whether the ids so far matter."""
        return any(p is not None for p in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty))

    def check_vocab(self, vocab: int) -> None:
        """Raise GenerationError for a biased id outside 0..vocab-1."""
        for token_id in self.logit_bias:
            if not 0 <= token_id < vocab:
                raise GenerationError(f"logit_bias: ids in 0..{vocab - 1} expected, found {token_id}; leave it out")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token under the model's own distribution: no temperature, penalty, bias or filter.

    `token`: its text decoded alone (whoever knows a tokenizer fills it in). `top`: the most probable tokens, best
    first, as many as were asked for.
    """

    token_id: int
    logprob: float
    token: str = ""
    top: tuple[TokenLogprob, ...] = ()


def check_finite(logits: Tensor) -> None:
    """Raise NonFiniteLogitsError when any of `logits` [vocab] is NaN or infinite.

    A softmax or an argmax over such a row still returns some token, for ever the same one; nothing downstream shows it.
    """
    # One pass over the row, and NaN reaches both ends.
    low, high = torch.aminmax(logits)
    if not bool(torch.isfinite(high - low)):
        bad = (~torch.isfinite(logits)).nonzero().flatten().tolist()
        if bad:
            where = f"all from id {bad[0]} to {bad[-1]}" if len(bad) == bad[-1] - bad[0] + 1 > 1 else f"at {_some(bad)}"
            raise NonFiniteLogitsError(
                f"finite logits expected, found {len(bad)} of {logits.numel()} NaN or infinite ({where}); "
                "check the weights, or try dtype='float32'"
            )


def greedy(logits: Tensor, token_ids: Sequence[int]) -> int:
    """The id with the highest logit, the lowest id on ties. Uses no random numbers."""
    check_finite(logits)
    # torch.argmax documents the first of several maxima.
    return int(torch.argmax(logits))


def distribution(
    logits: Tensor, params: SamplingParams, token_ids: Sequence[int] = (), *, prompt_len: int = 0
) -> Tensor:
    """The probabilities a token is drawn from: float64 [vocab], summing to 1, exactly 0 where a filter removed an id.

    `token_ids`: prompt and generated ids so far, of which the first `prompt_len` are the prompt. At temperature 0 all
    mass is on one id. Raises NonFiniteLogitsError, and GenerationError where biases and penalties leave no token.
    """
    check_finite(logits)
    scores = _penalized(logits, params, token_ids, prompt_len)
    top = scores.max()
    if not bool(torch.isfinite(top)):
        raise GenerationError(
            "logit_bias: a token with a finite logit expected, found none left; relax biases and penalties"
        )
    if params.is_greedy:
        return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
    # Shifted first: no temperature, however small, can overflow then.
    scores = (scores - top) / params.temperature
    if params.top_k is not None and params.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], -math.inf)
    if params.top_p is not None:
        scores = scores.masked_fill(~_nucleus(scores.softmax(0), params.top_p), -math.inf)
    if params.min_p is not None:
        scores = scores.masked_fill(scores.exp() < params.min_p, -math.inf)
    return scores.softmax(0)


def sample(distribution: Tensor, generator: torch.Generator) -> int:
    """Draw an id from `distribution` [vocab] (it need not sum to 1); never one of probability 0.

    One float64 number of `generator`, a CPU generator, decides: so one seed means one thing on every device. Raises
    GenerationError for weights that are negative, not finite or all zero.
    """
    cumulative = distribution.detach().to("cpu", torch.float64).cumsum(0)
    total = cumulative[-1]
    if not (bool(torch.isfinite(total)) and float(total) > 0 and float(distribution.min()) >= 0):
        raise GenerationError(
            "sample: non-negative probabilities with a positive sum expected, found none such; pass a distribution"
        )
    # The device is named, for a caller may have made another one the default.
    point = torch.rand((), dtype=torch.float64, generator=generator, device="cpu") * total
    # The first id whose mass lies beyond the point. Rounding can put the point on the very end; below it, it draws
    # the last id that has mass.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(cumulative, point, right=True))


def seeded_generator(seed: int) -> torch.Generator:
    """A CPU generator of its own for `seed`, 0..2**64-1."""
    # torch's CPU generator reads the low 32 bits only; spread the rest over them, leaving smaller seeds as they are.
    low = (seed ^ ((seed >> 32) * 0x9E3779B1)) & 0xFFFFFFFF
    return torch.Generator("cpu").manual_seed(low)


class TokenSampler:
    """A Sampler that follows `params` for one reply, with a generator of its own.

    `seed` is the one in use (a fresh one where `params` names none), None for greedy decoding. The first `prompt_len`
    of the ids it is called with are the prompt. Raises GenerationError for biased ids outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, *, vocab: int, prompt_len: int = 0) -> None:
        params.check_vocab(vocab)
        self.params = params
        self.seed: int | None = None
        self._prompt_len = prompt_len
        if not params.is_greedy:
            self.seed = secrets.randbits(32) if params.seed is None else params.seed
            self._generator = seeded_generator(self.seed)

    def distribution(self, logits: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Where the next token is drawn from; see the function of the same name."""
        return distribution(logits, self.params, token_ids, prompt_len=self._prompt_len)

    def __call__(self, logits: Tensor, token_ids: Sequence[int]) -> int:
        if self.params.is_greedy:
            if not self.params.logit_bias and not self.params.reads_ids:
                return greedy(logits, token_ids)
            return int(self.distribution(logits, token_ids).argmax())
        return sample(self.distribution(logits, token_ids), self._generator)


def token_logprob(logits: Tensor, token_id: int, top: int = 0) -> TokenLogprob:
    """Log-probability of `token_id` under `logits` [vocab], and of the `top` most probable ids (lowest id on ties)."""
    logprobs = logits.double().log_softmax(0)
    best: list[tuple[float, int]] = []
    if top:
        least = logprobs.topk(min(top, logprobs.numel())).values[-1]
        ids = (logprobs >= least).nonzero().flatten()
        best = sorted(zip((-logprobs[ids]).tolist(), ids.tolist(), strict=True))[:top]
    return TokenLogprob(token_id, float(logprobs[token_id]), top=tuple(TokenLogprob(i, -value) for value, i in best))


# -- the parts of a distribution ---------------------------------------------------------------------


def _penalized(logits: Tensor, params: SamplingParams, token_ids: Sequence[int], prompt_len: int) -> Tensor:
    """Logits after biases and penalties: float64 [vocab], a copy."""
    scores = logits.to(torch.float64, copy=True)
    device = scores.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float64, device=device)
    if params.repetition_penalty is not None and token_ids:
        seen = torch.tensor(sorted(set(token_ids)), device=device)
        was = scores[seen]
        scores[seen] = torch.where(was < 0, was * params.repetition_penalty, was / params.repetition_penalty)
    replied = token_ids[prompt_len:]
    if replied and (params.frequency_penalty is not None or params.presence_penalty is not None):
        times = Counter(replied)
        counts = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
        scores[torch.tensor(list(times), device=device)] -= counts * (params.frequency_penalty or 0.0) + (
            params.presence_penalty or 0.0
        )
    return scores


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Which ids stay: those with less than `top_p` of mass in front of them, the lowest ids of a tie first."""
    vocab = probabilities.numel()
    size = 512  # sorting a whole vocabulary costs more than a decode step of a small model
    while True:
        size = min(size, vocab)
        best = probabilities.topk(size).values
        in_front = best.cumsum(0) - best
        kept = max(1, int((in_front < top_p).sum()))
        if kept < size or size == vocab:
            break
        size *= 8
    least = best[kept - 1]
    stays = probabilities > least
    ties = (probabilities == least).nonzero().flatten()
    stays[ties[: kept - int(stays.sum())]] = True
    return stays


# -- parameters ----------------------------------------------------------------------------------------


def _some(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:5]))
    return f"id {shown}" if len(ids) == 1 else f"ids {shown}{', ...' if len(ids) > 5 else ''}"


def _whole(name: str, value: object, expected: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise GenerationError(f"{name}: a whole number expected ({expected}), found {value!r}; give one")


def _number(
    name: str, value: object, *, low: float = -math.inf, high: float = math.inf, above: float | None = None
) -> float | None:
    """`value` as a float, None for None; GenerationError for what is no finite number in the range."""
    if value is None:
        return None
    if above is not None:
        want = f"above {above:g}"
    elif high < math.inf:
        want = f"in {low:g}..{high:g}"
    else:
        want = f"of at least {low:g}" if low > -math.inf else ""
    number = _float(value)
    outside = number is None or not math.isfinite(number) or not low <= number <= high
    if outside or number is None or (above is not None and number <= above):
        raise GenerationError(
            f"{name}: a finite number {want}".rstrip() + f" expected, found {_shown(value)}; give one"
        )
    return number


def _float(value: object) -> float | None:
    """`value` as a float, None where it is no real number or one beyond every float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _shown(value: object) -> str:
    """What was found, for a message: whole numbers may be longer than a line, and longer than Python will print."""
    if isinstance(value, numbers.Real) and _float(value) is None and not isinstance(value, bool):
        return "one beyond every float"
    return f"{value!r:.80}"


def _off_at(off: float, value: float | None) -> float | None:
    return None if value == off else value


def _top_k(value: object) -> int | None:
    if value is None:
        return None
    k = _whole("top_k", value, "1 or more; 0, -1 or None for all")
    if k < -1:
        raise GenerationError(f"top_k: 1 or more expected, found {_shown(k)}; 0, -1 or None keep all")
    return k if k > 0 else None


def _bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise GenerationError(
            f"logit_bias: a mapping from token id to number expected, found {value!r:.80}; write {{42: -1.5}}"
        )
    bias: dict[int, float] = {}
    for token_id, amount in value.items():
        key = _whole("logit_bias", token_id, "a token id")
        number = _float(amount)
        if number is None or not number < math.inf:
            raise GenerationError(
                f"logit_bias: a number below infinity expected for id {key}, found {_shown(amount)}; -inf bans it"
            )
        bias[key] = number
    return bias
