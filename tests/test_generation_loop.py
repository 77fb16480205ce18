"""The loop: which tokens come out, how many steps they cost, when it ends, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from toy_backbone import ToyBackbone, latent_reference, latent_toy, new_cache, reference, toy

from fuel_core.errors import CacheStateError, CapacityError, GenerationError, NonFiniteLogitsError
from fuel_core.generation import GeneratedToken, Generation, greedy
from fuel_core.kv_cache import KvCache
from fuel_core.persistent_decode import InferenceContext

A, B = [3, 14, 15, 9, 26], [53, 5, 8, 9, 7, 9, 3, 2, 38]


def greedy_reference(model: ToyBackbone, prompt: Sequence[int], n: int) -> list[int]:
    """Greedy tokens from whole-sequence forwards that know no cache and no plan."""
    ids = list(prompt)
    for _ in range(n):
        row = reference(model, ids)[-1]
        top = row.topk(2).values
        assert float(top[0] - top[1]) > 1e-4, "a near tie would make this reference a coin toss; choose another seed"
        ids.append(int(row.argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model() -> ToyBackbone:
    return toy(window=4, windowed_layers=(1,))


def generation(
    model: ToyBackbone, prompt: Sequence[int], n: int, cache: KvCache | None = None, **kw: object
) -> Generation:
    ctx = kw.pop("ctx", None) or InferenceContext(plan="recorded")
    return Generation(model, prompt, cache or new_cache(model), ctx, max_new_tokens=n, **kw)  # type: ignore[arg-type]


def test_generation_second_prompt_owes_nothing_to_the_first(model: ToyBackbone) -> None:
    ctx, cache = InferenceContext(plan="recorded"), new_cache(model)
    for prompt in (A, B, A):
        done = generation(model, prompt, 20, cache, ctx=ctx)
        assert [token.token_id for token in done] == greedy_reference(model, prompt, 20)
    assert ctx.stats.plans_built == 1, "the plan was kept over all three prompts"


def test_generation_costs_one_prefill_and_a_step_less_than_tokens(model: ToyBackbone) -> None:
    ctx = InferenceContext(plan="recorded")
    n = 6
    assert len(list(generation(model, A, n, ctx=ctx))) == n
    assert (ctx.stats.fresh_steps, ctx.stats.plans_built, ctx.stats.rebinds) == (1, 1, n - 2)
    assert ctx.stats.decode_steps == n - 1


def test_generation_leaves_the_last_token_out_of_the_cache(model: ToyBackbone) -> None:
    cache = new_cache(model)
    done = generation(model, A, 3, cache)
    ids = [token.token_id for token in done]
    assert cache.token_ids == [*A, *ids[:-1]]
    assert done.token_ids == ids


def test_generation_takes_over_what_the_cache_shares_with_the_prompt(model: ToyBackbone) -> None:
    cache = new_cache(model)
    list(generation(model, A, 4, cache))
    longer = [*cache.token_ids[:6], 1, 2]
    again = generation(model, longer, 4, cache)
    ids = [token.token_id for token in again]
    assert again.cached_tokens == 6
    assert ids == greedy_reference(model, longer, 4)


def test_generation_always_computes_the_last_prompt_token(model: ToyBackbone) -> None:
    cache = new_cache(model)
    first = [token.token_id for token in generation(model, A, 3, cache)]
    again = generation(model, A, 3, cache)
    assert [token.token_id for token in again] == first
    assert again.cached_tokens == len(A) - 1


def test_generation_state_that_cannot_go_back_is_computed_again() -> None:
    rolling = latent_toy(rolling=True)
    cache, ctx = new_cache(rolling), InferenceContext(plan="recorded")
    list(Generation(rolling, A, cache, ctx, max_new_tokens=4))
    other = [*A[:3], 1, 2]
    done = Generation(rolling, other, cache, ctx, max_new_tokens=1)
    token = done.step()
    assert token is not None
    assert done.cached_tokens == 0
    assert token.token_id == int(latent_reference(rolling, other)[-1].argmax())


# -- the end -----------------------------------------------------------------------------------------


def test_generation_ends_at_any_stop_id_and_includes_it(model: ToyBackbone) -> None:
    expected = greedy_reference(model, A, 8)
    stop = expected[3]
    at = expected.index(stop)
    done = generation(model, A, 8, stop_token_ids={stop, 66})
    tokens = list(done)
    assert [token.token_id for token in tokens] == expected[: at + 1]
    assert [token.finish_reason for token in tokens] == [None] * at + ["stop"]
    assert done.step() is None


def test_generation_ends_at_the_token_limit(model: ToyBackbone) -> None:
    done = generation(model, A, 2)
    assert done.finish_reason is None
    assert [token.finish_reason for token in done] == [None, "length"]
    assert done.finish_reason == "length"


def test_generation_ends_with_length_when_the_cache_is_full(model: ToyBackbone) -> None:
    cache = new_cache(model, max_seq_len=16)
    prompt = list(range(1, 11))
    tokens = list(generation(model, prompt, 100, cache))
    # Ten positions hold the prompt, six more hold generated tokens, and the last token needs none.
    assert len(tokens) == 7
    assert tokens[-1].finish_reason == "length"
    assert cache.cached_len == 16


def test_generation_prompt_that_fills_the_cache_gives_one_token(model: ToyBackbone) -> None:
    tokens = list(generation(model, list(range(1, 17)), 100, new_cache(model, max_seq_len=16)))
    assert [token.finish_reason for token in tokens] == ["length"]


def test_generation_continues_in_a_larger_cache(model: ToyBackbone) -> None:
    grown: list[int] = []

    def grow(cache: KvCache) -> KvCache | None:
        if cache.max_seq_len >= 24:
            return None
        larger = new_cache(model, max_seq_len=cache.max_seq_len + 8)
        larger.copy_prefix_from(cache, cache.cached_len)
        grown.append(larger.max_seq_len)
        return larger

    ctx = InferenceContext(plan="recorded")
    done = generation(model, A, 100, new_cache(model, max_seq_len=8), grow=grow, ctx=ctx)
    ids = [token.token_id for token in done]
    assert grown == [16, 24]
    assert len(ids) == 24 - len(A) + 1
    assert ids == greedy_reference(model, A, len(ids))
    assert ctx.stats.replans == {"capacity": 2}
    assert done.finish_reason == "length"


def test_generation_can_be_finished_from_outside(model: ToyBackbone) -> None:
    done = generation(model, A, 5)
    done.step()
    done.finish("stop")
    assert done.step() is None
    assert done.finish_reason == "stop"


# -- refusals ----------------------------------------------------------------------------------------


def test_generation_prompt_longer_than_the_cache_names_both_numbers(model: ToyBackbone) -> None:
    cache = new_cache(model, max_seq_len=16)
    with pytest.raises(CapacityError, match=r"17 tokens.*capacity 16"):
        generation(model, [1] * 17, 4, cache)
    assert cache.cached_len == 0


def test_generation_empty_prompt_is_refused(model: ToyBackbone) -> None:
    with pytest.raises(GenerationError, match="at least one token id"):
        generation(model, [], 4)


@pytest.mark.parametrize("bad", [-1, 67, 10**9])
def test_generation_id_outside_the_vocabulary_is_refused(model: ToyBackbone, bad: int) -> None:
    with pytest.raises(GenerationError, match=rf"0\.\.66 expected, found {bad} at position 1"):
        generation(model, [1, bad], 4)


def test_generation_id_that_is_no_number_is_refused(model: ToyBackbone) -> None:
    with pytest.raises(GenerationError, match="found 'x' at position 0"):
        generation(model, ["x"], 4)  # type: ignore[list-item]


@pytest.mark.parametrize("limit", [0, -3, 2.5, "4", True, None])
def test_generation_limit_that_is_no_count_is_refused(model: ToyBackbone, limit: object) -> None:
    with pytest.raises(GenerationError, match="max_new_tokens"):
        generation(model, A, limit)  # type: ignore[arg-type]


def test_generation_notices_that_its_cache_was_used_elsewhere(model: ToyBackbone) -> None:
    cache = new_cache(model)
    first = generation(model, A, 9, cache)
    first.step()
    list(generation(model, B, 2, cache))
    with pytest.raises(CacheStateError, match="a cache of its own"):
        first.step()


# -- choosing a token --------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(1000)
    assert greedy(logits, []) == 0
    logits[[17, 400, 999]] = 2.0
    assert greedy(logits, []) == 17


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 33, 66, slice(None)])
def test_greedy_refuses_logits_that_are_not_finite(value: float, place: int | slice) -> None:
    logits = torch.randn(67)
    logits[place] = value
    with pytest.raises(NonFiniteLogitsError, match="of 67 NaN or infinite"):
        greedy(logits, [])


def test_greedy_accepts_logits_whose_spread_overflows() -> None:
    logits = torch.tensor([-3.0e38, 3.0e38, 0.0])
    assert greedy(logits, []) == 1


def test_generation_with_broken_weights_says_so(model: ToyBackbone) -> None:
    broken = toy()
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteLogitsError):
        generation(broken, A, 3).step()


def test_generation_asks_its_sampler_with_float32_logits_and_all_ids(model: ToyBackbone) -> None:
    seen: list[tuple[torch.Size, torch.dtype, list[int]]] = []

    def sampler(logits: Tensor, token_ids: Sequence[int]) -> int:
        seen.append((logits.shape, logits.dtype, list(token_ids)))
        return 7

    done = generation(model, A, 2, sampler=sampler)
    assert list(done) == [GeneratedToken(7, 0), GeneratedToken(7, 1, "length")]
    assert seen == [(torch.Size([67]), torch.float32, A), (torch.Size([67]), torch.float32, [*A, 7])]
