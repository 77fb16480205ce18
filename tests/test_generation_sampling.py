"""From logits to a token: every filter against the reference's own, the order, the draw, the edges, the seeds."""

from __future__ import annotations

import copy
import math
import pickle
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as oracle

from fuel_core.errors import GenerationError, NonFiniteLogitsError
from fuel_core.generation import SamplingParams, TokenSampler, distribution, sample, token_logprob
from fuel_core.generation.sampling import seeded_generator

VOCAB = 67


def random_logits(seed: int, vocab: int = 1000, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def by_reference(logits: Tensor, ids: Sequence[int] = (), **p: Any) -> Tensor:
    """The distribution of the reference's processors, in its order, in float64."""
    steps: list[Any] = []
    if p.get("logit_bias"):
        steps.append(oracle.SequenceBiasLogitsProcessor({(i,): float(b) for i, b in p["logit_bias"].items()}))
    if p.get("repetition_penalty"):
        steps.append(oracle.RepetitionPenaltyLogitsProcessor(p["repetition_penalty"]))
    if p.get("temperature", 1.0) != 1.0:
        steps.append(oracle.TemperatureLogitsWarper(p["temperature"]))
    if p.get("top_k"):
        steps.append(oracle.TopKLogitsWarper(p["top_k"]))
    if p.get("top_p") is not None:
        steps.append(oracle.TopPLogitsWarper(p["top_p"]))
    if p.get("min_p"):
        steps.append(oracle.MinPLogitsWarper(p["min_p"]))
    scores = logits.double()[None]
    for step in steps:
        scores = step(torch.tensor([list(ids)], dtype=torch.int64), scores)
    return scores.softmax(-1)[0]


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours > 0, theirs > 0), "the same ids stay"
    # Genuine differences are of rounding, 1e-16; a filter that renormalises in the wrong place is off by 1e-3.
    assert float((ours - theirs).abs().max()) < 1e-6
    assert float(ours.sum()) == pytest.approx(1.0, abs=1e-12)


ONE_BY_ONE: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 999},
    {"top_p": 0.0},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"logit_bias": {3: 4.5, 17: -2.0, 999: 0.25}},
]


@pytest.mark.parametrize("params", ONE_BY_ONE, ids=str)
def test_each_filter_is_the_reference_s(params: dict[str, Any]) -> None:
    given = {"temperature": 1.0} | params
    for seed in range(20):
        logits = random_logits(seed)
        ids = torch.randint(1000, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert_same(distribution(logits, SamplingParams(**given), ids), by_reference(logits, ids, **given))


@pytest.mark.parametrize("seed", range(30))
def test_filters_together_are_the_reference_s_in_its_order(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(6, generator=g).tolist()
    params = {
        "temperature": 0.2 + 2 * u[0],
        "top_k": 1 + int(400 * u[1]),
        "top_p": u[2],
        "min_p": 0.2 * u[3],
        "repetition_penalty": 0.8 + u[4],
        "logit_bias": {int(1000 * u[5]): 3.0, 5: -4.0},
    }
    logits = random_logits(seed)
    ids = torch.randint(1000, (30,), generator=g).tolist()
    assert_same(distribution(logits, SamplingParams(**params), ids), by_reference(logits, ids, **params))


def test_nucleus_wider_than_the_part_that_is_sorted_is_the_reference_s() -> None:
    # Nearly flat over 6000 ids: the kept set is far larger than the first 512.
    for top_p in (0.05, 0.3, 0.9, 0.999):
        logits = random_logits(1, vocab=6000, scale=0.2)
        ours = distribution(logits, SamplingParams(temperature=1.0, top_p=top_p))
        assert_same(ours, by_reference(logits, top_p=top_p))


def test_temperature_comes_before_top_p() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    probabilities = distribution(logits, SamplingParams(temperature=0.5, top_p=0.8))
    assert (probabilities > 0).tolist() == [True, False, False]
    # Temperature last would have kept two: at temperature 1 the first has 0.67.
    assert (distribution(logits, SamplingParams(temperature=1.0, top_p=0.8)) > 0).tolist() == [True, True, False]


def test_top_p_looks_at_what_top_k_left_and_min_p_at_both() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    kept = distribution(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55))
    # 0.4 / 0.7 = 0.57 is enough; of the whole, 0.4 would not have been.
    assert (kept > 0).tolist() == [True, False, False, False]


# -- penalties ---------------------------------------------------------------------------------------


def test_repetition_penalty_never_raises_a_logit_of_either_sign() -> None:
    logits = torch.tensor([-2.0, 3.0, 0.5])
    probabilities = distribution(logits, SamplingParams(temperature=1.0, repetition_penalty=2.0), [0, 1, 1])
    assert torch.allclose(probabilities, torch.tensor([-4.0, 1.5, 0.5], dtype=torch.float64).softmax(0))


def test_repetition_penalty_counts_prompt_and_reply_and_once_each() -> None:
    logits = random_logits(3, VOCAB)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7)
    once = distribution(logits, params, [4, 9], prompt_len=1)
    assert torch.equal(once, distribution(logits, params, [4, 4, 9, 9, 4], prompt_len=3))
    assert not torch.equal(once, distribution(logits, params, [9], prompt_len=0))


def test_frequency_and_presence_count_the_reply_alone() -> None:
    logits = random_logits(4, VOCAB)
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5, presence_penalty=-0.25)
    expected = logits.double()
    for token_id, times in {5: 3, 8: 1}.items():
        expected[token_id] -= 0.5 * times - 0.25
    ids = [5, 5, 7, 8, 5, 5, 5]
    probabilities = distribution(logits, params, ids, prompt_len=3)
    assert torch.allclose(probabilities, expected.softmax(0), rtol=0, atol=1e-12)
    assert torch.equal(distribution(logits, params, ids, prompt_len=7), logits.double().softmax(0))


def test_penalties_and_bias_move_a_greedy_choice_too() -> None:
    logits = torch.tensor([1.0, 2.0, 1.9])
    assert TokenSampler(SamplingParams(), vocab=3)(logits, [1]) == 1
    assert TokenSampler(SamplingParams(repetition_penalty=1.5), vocab=3)(logits, [1]) == 2
    assert TokenSampler(SamplingParams(presence_penalty=0.5), vocab=3, prompt_len=0)(logits, [1]) == 2
    assert TokenSampler(SamplingParams(presence_penalty=0.5), vocab=3, prompt_len=1)(logits, [1]) == 1
    assert TokenSampler(SamplingParams(logit_bias={0: 9.0}), vocab=3)(logits, []) == 0


def test_bias_of_minus_infinity_bans_an_id_and_all_of_them_is_an_error() -> None:
    logits = random_logits(5, 3)
    assert float(distribution(logits, SamplingParams(temperature=1.0, logit_bias={1: -math.inf}))[1]) == 0.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(3), -math.inf))
        with pytest.raises(GenerationError, match="finite logit expected, found none left"):
            TokenSampler(params, vocab=3)(logits, [])


def test_logits_are_not_written() -> None:
    logits = random_logits(6, VOCAB)
    before = logits.clone()
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={1: 5}
    )
    distribution(logits, params, [1, 2, 3], prompt_len=1)
    double = logits.double()
    distribution(double, params, [1, 2, 3], prompt_len=1)
    assert torch.equal(logits, before)
    assert torch.equal(double, before.double())


# -- edges -------------------------------------------------------------------------------------------


def test_temperature_zero_is_greedy_and_uses_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("a random number was asked for")

    for name in ("rand", "multinomial", "Generator"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr("secrets.randbits", refuse)
    state = torch.get_rng_state()
    logits = torch.zeros(1000)
    logits[[17, 400, 999]] = 2.0
    for params in (SamplingParams(), SamplingParams(seed=5, top_k=3, top_p=0.1), SamplingParams(logit_bias={4: 1.0})):
        sampler = TokenSampler(params, vocab=1000)
        assert sampler(logits, []) == 17
        assert sampler.seed is None
    assert torch.equal(distribution(logits, SamplingParams()).nonzero(), torch.tensor([[17]]))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e300])
def test_extreme_temperatures_give_numbers(temperature: float) -> None:
    probabilities = distribution(torch.tensor([3e38, -3e38, 0.0]), SamplingParams(temperature=temperature))
    assert bool(torch.isfinite(probabilities).all())
    assert float(probabilities.sum()) == pytest.approx(1.0)
    if temperature < 1:
        assert probabilities.tolist() == [1.0, 0.0, 0.0]
    else:
        assert probabilities.tolist() == pytest.approx([1 / 3] * 3)


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    logits = random_logits(7, 64)
    everything = distribution(logits, SamplingParams(temperature=1.0))
    for k in (64, 65, 9999999, 0, -1, None):
        assert torch.equal(distribution(logits, SamplingParams(temperature=1.0, top_k=k)), everything), k
    assert int((distribution(logits, SamplingParams(temperature=1.0, top_k=63)) > 0).sum()) == 63


def test_ties_at_a_border_are_kept_by_top_k_and_cut_by_id_by_top_p() -> None:
    logits = torch.zeros(8)
    logits[5] = 1.0
    assert int((distribution(logits, SamplingParams(temperature=1.0, top_k=3)) > 0).sum()) == 8
    # e/(e+7) = 0.28, then seven of 0.103: the third id in front of the border is the second of the ties.
    kept = distribution(logits, SamplingParams(temperature=1.0, top_p=0.45)) > 0
    assert kept.nonzero().flatten().tolist() == [0, 1, 5]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, "1", True, [1.0])],
        *[("top_k", v) for v in (-2, 1.5, "4", True, math.nan)],
        *[("top_p", v) for v in (-0.1, 1.1, math.nan, "x", True)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("repetition_penalty", v) for v in (0.0, -1.0, math.inf, math.nan)],
        *[(name, v) for name in ("frequency_penalty", "presence_penalty") for v in (math.inf, math.nan, "x")],
        *[("logit_bias", v) for v in ([1], {"a": 1.0}, {1: math.nan}, {1: math.inf}, {1: "x"}, {True: 1.0})],
        *[("seed", v) for v in (-1, 2**64, 1.5, "7", True)],
        *[("logprobs", v) for v in (-1, 1.5, True)],
    ],
)
def test_parameter_that_cannot_be_used_is_one_line_that_names_it(field: str, value: Any) -> None:
    with pytest.raises(GenerationError, match=rf"^{field}: .*expected.*found") as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


def test_parameters_mean_the_same_whatever_way_off_is_spelled() -> None:
    assert SamplingParams(top_k=0, top_p=1, min_p=0, repetition_penalty=1, frequency_penalty=0) == SamplingParams()
    assert SamplingParams(temperature=None, top_k=-1, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_parameters_are_values_that_copy_pickle_and_hash() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, seed=4)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert len({params, copy.copy(params)}) == 1
    with pytest.raises(AttributeError):
        params.seed = 5  # type: ignore[misc]


def test_biased_id_outside_the_vocabulary_is_refused() -> None:
    for bad in (-1, 67):
        with pytest.raises(GenerationError, match=rf"logit_bias: ids in 0\.\.66 expected, found {bad}"):
            TokenSampler(SamplingParams(logit_bias={bad: 1.0}), vocab=VOCAB)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("places", "said"), [([0], "found 1 of 67.*at id 0"), ([33, 66], "found 2 of 67.*ids 33, 66"), (None, "found 67")]
)
def test_logits_that_are_not_finite_are_an_error_that_says_where(
    value: float, places: list[int] | None, said: str
) -> None:
    logits = random_logits(8, VOCAB)
    logits[slice(None) if places is None else places] = value
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_k=5), SamplingParams(logit_bias={1: 2.0})):
        with pytest.raises(NonFiniteLogitsError, match=said):
            TokenSampler(params, vocab=VOCAB)(logits, [1])


# -- the draw ----------------------------------------------------------------------------------------


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable of `degrees` exceeds `statistic`."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


def test_draws_follow_the_distribution() -> None:
    """A right sampler fails this with probability 1e-6 a seed; one whose temperature is off by 15 % always does."""
    params = SamplingParams(temperature=1.3, top_k=30, min_p=0.01)
    probabilities = distribution(random_logits(9, VOCAB, scale=1.5), params)
    generator, n = seeded_generator(11), 40_000
    counts = Counter(sample(probabilities, generator) for _ in range(n))
    live = probabilities.nonzero().flatten().tolist()
    assert set(counts) <= set(live), "nothing that was filtered is drawn"
    expected = {i: n * float(probabilities[i]) for i in live}
    assert min(expected.values()) > 5, "few enough draws of one id would spoil the statistic"
    statistic = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    assert chi_square_tail(statistic, len(live) - 1) > 1e-6
    # The statistic can tell: against a neighbouring temperature it is off the scale.
    other = distribution(random_logits(9, VOCAB, scale=1.5), SamplingParams(temperature=1.5, top_k=30, min_p=0.01))
    wrong = sum((counts[i] - n * float(other[i])) ** 2 / (n * float(other[i])) for i in live)
    assert chi_square_tail(wrong, len(live) - 1) < 1e-6


def test_draw_never_takes_an_id_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0, 0.0], dtype=torch.float64)
    for point, drawn in ((0.0, 1), (0.2999, 1), (0.3001, 3), (1 - 2**-53, 3), (1.0, 3)):
        monkeypatch.setattr(torch, "rand", lambda *_, p=point, **__: torch.tensor(p, dtype=torch.float64))
        assert sample(weights, seeded_generator(0)) == drawn, point
        assert sample(3 * weights, seeded_generator(0)) == drawn, point


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [-1.0, 2.0], [math.inf, 1.0]])
def test_draw_from_no_distribution_is_refused(weights: list[float]) -> None:
    with pytest.raises(GenerationError, match="non-negative probabilities"):
        sample(torch.tensor(weights), seeded_generator(0))


def run(sampler: TokenSampler, n: int = 12) -> list[int]:
    ids: list[int] = []
    for step in range(n):
        ids.append(sampler(random_logits(100 + step, VOCAB, scale=0.5), ids))
    return ids


def test_seed_gives_the_same_tokens_whatever_ran_before_and_in_any_thread() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    first = run(TokenSampler(params, vocab=VOCAB))
    torch.manual_seed(99)
    run(TokenSampler(SamplingParams(temperature=1.0, seed=8), vocab=VOCAB))
    state = torch.get_rng_state()
    assert run(TokenSampler(params, vocab=VOCAB)) == first
    assert torch.equal(torch.get_rng_state(), state), "nobody else's generator moves"
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(run(TokenSampler(params, vocab=VOCAB))))
    thread.start()
    thread.join()
    assert got == [first]


def test_default_device_of_the_caller_is_not_the_sampler_s() -> None:
    params = SamplingParams(
        temperature=1.0, seed=7, top_k=9, top_p=0.9, repetition_penalty=1.2, presence_penalty=1.0, logit_bias={3: 1.0}
    )
    logits = random_logits(14, VOCAB)
    expected = TokenSampler(params, vocab=VOCAB)(logits, [1, 2])
    with torch.device("meta"):
        assert TokenSampler(params, vocab=VOCAB)(logits, [1, 2]) == expected


def test_requests_side_by_side_draw_what_they_draw_alone() -> None:
    params = [SamplingParams(temperature=1.0, seed=s) for s in (7, 8)]
    alone = [run(TokenSampler(p, vocab=VOCAB)) for p in params]
    samplers = [TokenSampler(p, vocab=VOCAB) for p in params]
    ids: list[list[int]] = [[], []]
    for step in range(12):
        for sampler, so_far in zip(samplers, ids, strict=True):
            so_far.append(sampler(random_logits(100 + step, VOCAB, scale=0.5), so_far))
    assert ids == alone


def test_no_seed_is_a_fresh_one_and_zero_is_a_seed() -> None:
    # 12 draws from 67 nearly equal ids: two of six runs alike by chance have probability below 1e-18.
    runs = [run(TokenSampler(SamplingParams(temperature=1.0), vocab=VOCAB)) for _ in range(6)]
    assert len({tuple(r) for r in runs}) == 6
    zero = SamplingParams(temperature=1.0, seed=0)
    assert run(TokenSampler(zero, vocab=VOCAB)) == run(TokenSampler(zero, vocab=VOCAB))
    assert TokenSampler(zero, vocab=VOCAB).seed == 0


def test_seed_in_use_gives_the_reply_again() -> None:
    fresh = TokenSampler(SamplingParams(temperature=1.0), vocab=VOCAB)
    assert fresh.seed is not None
    assert run(TokenSampler(SamplingParams(temperature=1.0, seed=fresh.seed), vocab=VOCAB)) == run(fresh)


def test_seeds_that_differ_in_high_bits_alone_differ() -> None:
    runs = {
        tuple(run(TokenSampler(SamplingParams(temperature=1.0, seed=s), vocab=VOCAB)))
        for s in (0, 2**32, 2**33, 2**63, 2**64 - 1, 2**32 - 1)
    }
    assert len(runs) == 6


# -- log-probabilities -------------------------------------------------------------------------------


def test_logprob_is_the_model_s_own_with_the_best_first() -> None:
    logits = random_logits(12, VOCAB)
    expected = logits.double().log_softmax(0)
    got = token_logprob(logits, 5, top=4)
    assert got.token_id == 5
    assert got.logprob == pytest.approx(float(expected[5]), abs=1e-12)
    best = expected.topk(4)
    assert [t.token_id for t in got.top] == best.indices.tolist()
    assert [t.logprob for t in got.top] == pytest.approx(best.values.tolist(), abs=1e-12)


def test_logprob_alternatives_end_at_the_vocabulary_and_ties_go_by_id() -> None:
    assert len(token_logprob(random_logits(13, VOCAB), 0, top=1000).top) == VOCAB
    assert token_logprob(random_logits(13, VOCAB), 0).top == ()
    logits = torch.zeros(50)
    logits[30] = 1.0
    assert [t.token_id for t in token_logprob(logits, 2, top=4).top] == [30, 0, 1, 2]


def test_every_parameter_is_in_the_documented_order() -> None:
    text = (Path(__file__).parent.parent / "docs" / "sampling.md").read_text()
    steps = re.findall(r"^\| \d \| `(\w+)`", text, re.MULTILINE)
    assert steps == [
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
    ]
    assert {*steps, "logprobs"} == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    "beyond", [10**400, -(10**400), 10**5000, Fraction(10**400)], ids=["big", "low", "huge", "ratio"]
)
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"],
)
def test_number_beyond_every_float_is_refused_in_one_short_line(field: str, beyond: object) -> None:
    value = {3: beyond} if field == "logit_bias" else beyond
    with pytest.raises(GenerationError, match=rf"^{field}: .* expected.*, found one beyond every float") as error:
        SamplingParams(**{field: value})
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    ("field", "beyond"),
    [("seed", 10**5000), ("top_k", -(10**5000)), ("logprobs", -(10**5000))],
    ids=["seed", "top_k", "logprobs"],
)
def test_whole_number_too_long_to_print_is_refused_in_one_short_line(field: str, beyond: int) -> None:
    # Python itself refuses to print one of more than 4300 digits.
    with pytest.raises(GenerationError, match=rf"^{field}: .*found one beyond every float") as error:
        SamplingParams(**{field: beyond})  # type: ignore[arg-type]
    assert len(str(error.value)) < 150


def test_whole_numbers_that_a_float_holds_are_taken() -> None:
    params = SamplingParams(temperature=10**300, logit_bias={1: -(10**300)}, top_k=10**5000)
    assert (params.temperature, params.logit_bias, params.top_k) == (1e300, {1: -1e300}, 10**5000)
