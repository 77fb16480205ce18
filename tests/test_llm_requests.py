"""What a request may ask for: sampling and where its defaults come from, copies, log-probabilities, an end, a stop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from tiny_tokenizers import CHATML, byte_level_json
from toy_backbone import latent_toy
from toy_llm import BOS, byte_level, make

from fuel_core.checkpoint.tokenizer_source import TokenizerSource
from fuel_core.conversation import Conversation
from fuel_core.errors import (
    BackendUnavailableError,
    ChatTemplateError,
    ConfigError,
    GenerationError,
    NonFiniteLogitsError,
)
from fuel_core.generation import SamplingParams
from fuel_core.llm import LanguageModel
from fuel_core.text import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent


def published(**generation_config: Any) -> LanguageModel:
    source = TokenizerSource(
        "huggingface",
        "folder",
        tokenizer_json=byte_level_json(),
        chat_templates={"default": CHATML},
        special_tokens={"bos": BOS},
        generation_config=generation_config,
    )
    return make(load_tokenizer(source))


# -- sampling ----------------------------------------------------------------------------------------


class _Third:
    """Takes the third highest logit, and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        self.seen.append([*token_ids])
        return int(logits.topk(3).indices[2])


def test_sampler_of_ones_own_chooses_every_token_of_every_kind_of_request() -> None:
    llm = published(do_sample=True, temperature=5.0)
    third = _Third()
    done = llm.generate("hello", 5, sampler=third, logprobs=3)
    prompt = llm.tokenizer.encode("hello")
    assert third.seen == [[*prompt, *done.token_ids[:i]] for i in range(5)]
    assert done.logprobs is not None
    assert [told.top[2].token_id for told in done.logprobs] == done.token_ids
    assert done.token_ids != llm.generate("hello", 5).token_ids
    assert done.seed is None
    assert [piece.token_id for piece in llm.stream("hello", 5, sampler=third)] == done.token_ids
    assert [one.token_ids for one in llm.generate("hello", 5, n=2, sampler=third)] == [done.token_ids] * 2
    # What a chat would draw with is published, and gives way as well.
    asked = llm._request(5, {"sampler": third}, whole=True)
    assert asked.sampling == SamplingParams()
    assert asked.sampler is third
    talk = Conversation(llm)
    assert talk.send("hello", 5, sampler=third).token_ids == llm.chat("hello", 5, sampler=third).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": 3}, r"^sampler: a function of \(logits, token_ids\) expected, found 3; pass one$"),
        ({"sampler": _Third(), "temperature": 1.0, "seed": 0}, "expected to choose alone, found seed, temperature"),
        ({"sampler": _Third(), "sampling": SamplingParams()}, "expected to choose alone, found sampling beside it"),
        ({"sampler": lambda logits, ids: None}, "^sampler: a token id expected, found None; return an int$"),
        ({"sampler": lambda logits, ids: 0.5}, "a token id expected, found 0.5"),
        ({"sampler": lambda logits, ids: -1}, r"a token id in 0\.\.\d+ expected, found -1; return one of these"),
        ({"sampler": lambda logits, ids: logits.numel()}, "expected, found"),
        ({"sampler": lambda logits, ids: logits[3] < 0}, r"a token id expected, found tensor\((True|False)\)"),
        ({"sampler": lambda logits, ids: True}, "a token id expected, found True"),
        ({"sampler": lambda logits, ids: next(iter(()))}, "sampler: a return expected, found StopIteration"),
        ({"on_progress": lambda done, total: next(iter(()))}, "on_progress: a return expected, found StopIteration"),
    ],
)
def test_sampler_that_cannot_choose_is_named_and_costs_the_model_nothing(options: Any, message: str) -> None:
    llm = published()
    with pytest.raises(GenerationError, match=message):
        llm.generate("hello", 5, **options)
    assert len(llm.generate("hello", 5).token_ids) == 5


@pytest.mark.parametrize("options", [{"sampler": lambda logits, ids: next(iter(()))}])
def test_reply_that_a_caller_s_function_stops_does_not_look_whole(options: Any) -> None:
    """StopIteration ends a loop over pieces without a word, and an asyncio future never."""
    llm = published()
    with pytest.raises(GenerationError, match="found StopIteration"):
        list(llm.stream("hello", 5, **options))
    with pytest.raises(GenerationError, match="found StopIteration"):
        asyncio.run(asyncio.wait_for(llm.agenerate("hello", 5, **options), 60))


def test_sampler_may_write_to_what_it_is_given() -> None:
    llm = published()
    plain = llm.generate("hello", 5, logprobs=2)

    def ruthless(logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        chosen = int(logits.argmax())
        logits.fill_(torch.nan)
        assert not hasattr(token_ids, "append")
        return chosen

    assert llm.generate("hello", 5, sampler=ruthless, logprobs=2) == replace(plain, stats=ANY)


def test_sampler_is_not_asked_about_logits_that_are_no_numbers() -> None:
    llm = published()
    with torch.no_grad():
        for parameter in llm.backbone.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(NonFiniteLogitsError, match="finite logits expected, found"):
        llm.generate("hello", 5, sampler=lambda logits, ids: 3)


def test_sampler_may_return_what_torch_returns() -> None:
    llm = published()
    done = llm.generate("hello", 5, sampler=lambda logits, ids: logits.argmax())
    assert done.token_ids == llm.generate("hello", 5).token_ids
    assert all(type(token_id) is int for token_id in done.token_ids)


def test_generate_is_greedy_unless_told_otherwise() -> None:
    llm = published(do_sample=True, temperature=5.0)
    greedy = llm.generate("hello", 12)
    assert greedy.seed is None
    assert llm.generate("hello", 12).token_ids == greedy.token_ids
    assert llm.generate("hello", 12, temperature=5.0, seed=1).token_ids != greedy.token_ids


def test_chat_follows_what_the_checkpoint_publishes_except_for_what_is_given() -> None:
    llm = published(do_sample=True, temperature=0.6, top_k=40, top_p=0.9, repetition_penalty=1.1)
    assert llm.published_sampling == SamplingParams(temperature=0.6, top_k=40, top_p=0.9, repetition_penalty=1.1)
    assert llm.chat("hi", 2).seed is not None
    assert llm.chat("hi", 2, temperature=0.0).seed is None
    request = llm._request(2, {"top_k": 0, "seed": 4}, whole=True)
    assert request.sampling == SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=4)
    base = SamplingParams(temperature=1.0)
    assert llm._request(2, {"sampling": base, "top_p": 0.5}, whole=True).sampling == SamplingParams(
        temperature=1.0, top_p=0.5
    )
    by_hand = published().chat("hi", 8, temperature=0.6, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=3)
    assert llm.chat("hi", 8, seed=3).token_ids == by_hand.token_ids


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}, SamplingParams(top_k=50)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, SamplingParams(temperature=1.0, top_k=64, top_p=0.95)),
        ({"temperature": 0.7}, SamplingParams(temperature=0.7)),
        ({"repetition_penalty": 1.2}, SamplingParams(repetition_penalty=1.2)),
        ({"do_sample": True, "temperature": 0.0}, SamplingParams()),
    ],
    ids=str,
)
def test_published_sampling_reads_the_keys_that_are_there(config: dict[str, Any], expected: SamplingParams) -> None:
    assert published(**config).published_sampling == expected


def test_published_value_that_cannot_be_used_is_named_with_the_way_around_it() -> None:
    llm = published(do_sample=True, temperature="hot")
    with pytest.raises(GenerationError, match=r"published generation config: temperature: .*'hot'; .*sampling="):
        llm.chat("hi", 1)
    assert llm.chat("hi", 1, sampling=SamplingParams()).token_ids


def test_seed_is_reproducible_whatever_the_model_did_before() -> None:
    llm = make()
    expected = llm.generate("hello world", 10, temperature=1.0, seed=0)
    assert expected.seed == 0
    torch.manual_seed(1)
    llm.generate("hello", 5, temperature=1.0)
    llm.generate("hello world fox", 5)
    assert llm.generate("hello world", 10, temperature=1.0, seed=0).token_ids == expected.token_ids
    assert make().generate("hello world", 10, temperature=1.0, seed=0).token_ids == expected.token_ids


def test_no_seed_draws_anew_and_says_which_seed_it_was() -> None:
    llm = make()
    replies = [llm.generate("hello", 12, temperature=1.0) for _ in range(3)]
    assert len({tuple(reply.token_ids) for reply in replies}) == 3
    for reply in replies:
        assert llm.generate("hello", 12, temperature=1.0, seed=reply.seed).token_ids == reply.token_ids


def test_seed_in_sixteen_bits_computes_the_prompt_anew() -> None:
    llm = make(dtype=torch.bfloat16)
    llm.backbone.to(torch.bfloat16)
    llm.generate("hello world", 4)
    assert llm.generate("hello world", 4, temperature=1.0).usage.cached_tokens == 1
    assert llm.generate("hello world", 4, temperature=1.0, seed=2).usage.cached_tokens == 0
    assert llm.generate("hello world", 4, seed=2).usage.cached_tokens == 1, "greedy draws nothing"
    full = make()
    full.generate("hello world", 4)
    assert full.generate("hello world", 4, temperature=1.0, seed=2).usage.cached_tokens == 1


def test_keyword_that_no_request_has_is_a_type_error_with_a_hint() -> None:
    llm = make()
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'temprature'"):
        llm.generate("hello", temprature=1.0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'enable_thinking'; what the chat template takes goes into template_kwargs="):
        llm.chat("hello", enable_thinking=False)  # type: ignore[call-overload]


# -- copies ------------------------------------------------------------------------------------------


def test_n_completions_compute_the_prompt_once_and_are_those_of_n_seeds() -> None:
    llm = make()
    prompt = "hello world fox hello"
    replies = llm.generate(prompt, 6, n=3, temperature=1.0, seed=11)
    assert [reply.seed for reply in replies] == [11, 12, 13]
    length = replies[0].usage.prompt_tokens
    assert length > 2
    assert [reply.usage.cached_tokens for reply in replies] == [0, length, length]
    # One prefill, and n - 1 decode steps a reply: the prompt's last token is not run again either.
    assert [(reply.stats.fresh_steps, reply.stats.decode_steps) for reply in replies] == [(1, 5), (0, 5), (0, 5)]
    assert [reply.stats.plans_built for reply in replies] == [1, 0, 0]
    for reply in replies:
        alone = make().generate(prompt, 6, temperature=1.0, seed=reply.seed)
        assert (alone.token_ids, alone.text) == (reply.token_ids, reply.text)
    assert llm.generate(prompt, 2).usage.cached_tokens == length - 1, "the slot is free again"


def test_n_completions_of_a_state_that_cannot_be_rewound_are_right_too() -> None:
    llm = LanguageModel(latent_toy(rolling=True), plan="recorded", max_seq_len=64)
    replies = llm.generate([3, 14, 15, 9], 6, n=3, temperature=1.0, seed=5)
    assert [reply.stats.fresh_steps for reply in replies] == [1, 0, 0]
    for reply in replies:
        alone = LanguageModel(latent_toy(rolling=True), plan="recorded", max_seq_len=64)
        assert alone.generate([3, 14, 15, 9], 6, temperature=1.0, seed=reply.seed).token_ids == reply.token_ids


def test_n_completions_grow_their_cache_and_stop_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuel_core.llm.FIRST_CAPACITY", 8)
    replies = make().generate([1, 2, 3], None, n=2, temperature=0.8, seed=1, ignore_eos=True)
    alone = [make().generate([1, 2, 3], None, temperature=0.8, seed=s, ignore_eos=True) for s in (1, 2)]
    assert [r.token_ids for r in replies] == [r.token_ids for r in alone]
    assert {r.finish_reason for r in replies} == {"length"}


def test_n_of_one_is_a_list_and_chat_has_it_too() -> None:
    llm = make()
    assert [r.token_ids for r in llm.generate("hello", 4, n=1)] == [llm.generate("hello", 4).token_ids]
    assert len(llm.chat("hello", 2, n=2, temperature=1.0)) == 2
    for bad in (0, -1, 1.5, True, "2"):
        with pytest.raises(GenerationError, match="n: a whole number of at least 1"):
            llm.generate("hello", 2, n=bad)  # type: ignore[call-overload]


# -- log-probabilities and stops -------------------------------------------------------------------------


def test_logprobs_come_with_each_token_and_say_its_text() -> None:
    llm = make()
    done = llm.generate("hello world", 5, logprobs=3)
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    for entry in done.logprobs:
        assert entry.token == llm.tokenizer.decode([entry.token_id], skip_special_tokens=False)
        # Greedy: the chosen token is the best one.
        assert (entry.top[0].token_id, entry.top[0].logprob) == (entry.token_id, entry.logprob)
        assert [t.logprob for t in entry.top] == sorted((t.logprob for t in entry.top), reverse=True)
        assert len(entry.top) == 3
    pieces = list(llm.stream("hello world", 5, logprobs=3))
    for piece, entry in zip(pieces, done.logprobs, strict=True):
        assert piece.logprob is not None
        assert (piece.logprob.token_id, piece.logprob.token) == (entry.token_id, entry.token)
        assert piece.logprob.logprob == pytest.approx(entry.logprob, abs=1e-5)
    assert llm.generate("hello world", 5).logprobs is None


def test_logprobs_are_the_model_s_own_under_any_sampling() -> None:
    plain = make().generate("hello world", 1, logprobs=256)
    other = make().generate("hello world", 1, logprobs=0, temperature=2.0, top_k=5, logit_bias={7: 3.0}, seed=1)
    assert plain.logprobs is not None
    assert other.logprobs is not None
    own = {t.token_id: t.logprob for t in plain.logprobs[0].top}
    assert other.logprobs[0].logprob == own[other.token_ids[0]]
    assert other.logprobs[0].top == ()


def test_ignore_eos_goes_on_to_the_limit_or_a_stop_string() -> None:
    llm = make()
    eos = next(iter(llm.stop_token_ids))
    assert llm.generate("hello", 5, logit_bias={eos: 1e6}).finish_reason == "stop"
    going = llm.generate("hello", 5, logit_bias={eos: 1e6}, ignore_eos=True)
    assert (going.finish_reason, going.token_ids) == ("length", [eos] * 5)
    letter = llm.tokenizer.token_id("a") or 0
    stopped = llm.generate("hello", 5, logit_bias={letter: 1e6}, ignore_eos=True, stop="aa")
    assert (stopped.finish_reason, stopped.token_ids, stopped.text) == ("stop", [letter] * 2, "")


# -- its end -------------------------------------------------------------------------------------------


def test_closed_model_gives_back_what_it_held_and_answers_nothing_more() -> None:
    with make() as llm:
        llm.generate("hello", 3)
        stream = llm.stream("hello world", 5)
        next(stream)
        backbone, ctx = weakref.ref(llm.backbone), llm.context
        assert len(ctx.sessions) == 1
    with pytest.raises(GenerationError, match="closed; load it again"):
        next(stream)
    del stream
    gc.collect()
    assert backbone() is None
    assert ctx.sessions == ()
    for refused in (
        lambda: llm.generate("hello"),
        lambda: llm.stream("hello"),
        lambda: llm.chat("hello"),
        lambda: llm.backbone,
        llm.__enter__,
    ):
        with pytest.raises(GenerationError, match="closed"):
            refused()
    llm.close()
    assert repr(llm) == "LanguageModel(closed)"


# -- progress ------------------------------------------------------------------------------------------


def test_progress_counts_the_tokens_of_a_prompt_by_chunks() -> None:
    seen: list[tuple[int, int]] = []
    llm = make(prefill_chunk=8)
    llm.generate([1] * 30, 3, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(8, 30), (16, 30), (24, 30), (30, 30)]
    seen.clear()
    llm.generate([1] * 20 + [2] * 20, 3, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(28, 40), (36, 40), (40, 40)], "what the cache held is done already"


# -- a script of a user ----------------------------------------------------------------------------------

SCRIPT = """
import asyncio
from collections.abc import Iterator
import fuel_core as fuel


def run(path: str) -> Iterator[str]:
    with fuel.load(path, max_seq_len=128) as llm:
        done: fuel.Completion = llm.generate("hello", max_new_tokens=8, temperature=0.7, top_k=40, seed=1)
        text: str = done.text
        several: list[fuel.Completion] = llm.generate("hello", n=2, temperature=1.0, logit_bias={3: -1.0})
        params = fuel.SamplingParams(temperature=0.5, top_p=0.9, logprobs=2)
        for entry in llm.chat([{"role": "user", "content": text}], sampling=params, stop=["x"]).logprobs or []:
            best: float = entry.top[0].logprob
            yield f"{entry.token} {best}"
        for piece in llm.stream("hello", ignore_eos=True, on_progress=lambda done, total: print(done / total)):
            yield piece.text
        with llm.stream_chat("hi", template_kwargs={"enable_thinking": False}) as reply:
            for piece in reply:
                yield piece.text
        yield from (one.text for one in several)
        asyncio.run(later(llm))


async def later(llm: fuel.LanguageModel) -> str:
    async with llm.astream("hello", 8) as stream:
        async for piece in stream:
            print(piece.text, piece.finish_reason)
    one, two = await asyncio.gather(llm.achat("hi", seed=0), llm.agenerate("hi", n=2))
    seed: int | None = two[0].seed
    return one.text + str(seed)
"""
WRONG = '\nbad: str = fuel.load("x").generate("y", temprature=1.0).token_ids\n'


def test_script_of_a_user_passes_strict_type_checks_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(textwrap.dedent(SCRIPT))
    bad.write_text(textwrap.dedent(SCRIPT) + WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(good), str(bad)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        check=False,
    )
    assert "good.py" not in done.stdout, done.stdout
    assert "temprature" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "banana"}, ConfigError, "dtype: .* found 'banana'"),
        ({"dtype": "auto"}, ConfigError, "dtype: .* found 'auto'"),
        ({"device": "banana"}, BackendUnavailableError, "device: .* found 'banana'"),
        ({"device": None}, BackendUnavailableError, "device: .* found 'None'"),
        ({"max_seq_len": 0}, ConfigError, "max_seq_len: .* found 0"),
        ({"max_seq_len": True}, ConfigError, "max_seq_len: .* found True"),
        ({"prefill_chunk": 0}, ConfigError, "prefill_chunk: .* found 0"),
    ],
)
def test_model_refuses_settings_when_it_is_made(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_model_takes_the_words_that_load_takes_for_a_dtype() -> None:
    assert make(dtype="bf16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": 5}, "stop: .* found 5"),
        ({"stop": 0}, "stop: .* found 0"),
        ({"stop": b"x"}, "stop: .* found 120"),
        ({"on_progress": 5}, "on_progress: .* found 5"),
        ({"temperature": 10**400}, "temperature: a finite number of at least 0 expected, found one beyond every float"),
        ({"logit_bias": {1: 10**400}}, "logit_bias: a number below infinity expected for id 1, found one beyond"),
    ],
)
def test_request_refuses_what_is_of_another_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        make().generate("hi", 1, **options)


@pytest.mark.parametrize(
    ("messages", "template_kwargs", "message"),
    [
        ("hi", 5, "template_kwargs: .* found 5"),
        ("hi", {1: 2}, "template_kwargs: .* found"),
        ("hi", {"messages": []}, "template_kwargs: .* found messages"),
        ([{"role": "user", "content": None}], None, "chat message 0 must have a 'content'"),
        ([{"role": "user"}], None, "chat message 0 must have a 'content'"),
    ],
)
def test_chat_refuses_what_no_template_takes(messages: Any, template_kwargs: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        make().chat(messages, 1, template_kwargs=template_kwargs)


def test_chat_message_that_calls_a_tool_needs_no_content() -> None:
    template = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "b"}]}]
    assert make(byte_level(template=template)).chat(messages, 1).usage.prompt_tokens == 2
