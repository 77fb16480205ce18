"""A conversation: one cache, whole turns, and what of a reply stays however it ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizers import CHATML, byte_level_json, folder_source, spm_json
from torch import Tensor
from toy_backbone import ToyBackbone, ToyConfig, fill

from fuel_core.conversation import Conversation
from fuel_core.errors import CapacityError, ChatTemplateError, ConversationError, FuelError, GenerationError
from fuel_core.kv_cache import KvCache
from fuel_core.llm import LanguageModel
from fuel_core.text import Tokenizer, load_tokenizer

STEP = "fuel_core.generation.decode_loop.forward_decode_step"
END = "<|im_end|>"
# As CHATML, but earlier replies are written without the spaces around them.
TRIMMING = CHATML.replace("message['content']", "(message['content'] | trim)")
# As CHATML, but an earlier reply loses what stands before the last </t>.
FORGETFUL = CHATML.replace("message['content']", "message['content'].split('</t>')[-1]")


@dataclass(frozen=True)
class ServedConfig(ToyConfig):
    max_position_embeddings: int | None = 512
    dtype: str = "float32"


def make(
    template: str | None = CHATML, *, limit: int | None = 512, tokenizer: Tokenizer | None = None
) -> LanguageModel:
    tokenizer = tokenizer or load_tokenizer(folder_source(byte_level_json(), template=template))
    backbone = ToyBackbone(ServedConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=limit))
    fill(backbone)
    return LanguageModel(backbone, tokenizer=tokenizer, plan="recorded")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """Make any model say given ids, one a step, over all turns that follow."""

    def arrange(ids: Sequence[int]) -> None:
        pending = list(ids)

        def step(backbone: ToyBackbone, token_ids: list[int], cache: KvCache, ctx: object, **_: object) -> Tensor:
            cache.check_room(len(token_ids), "scripted")
            cache.advance(token_ids, backbone.content_version())
            logits = torch.zeros(backbone.decode_dims().vocab)
            logits[pending.pop(0)] = 1.0
            return logits

        monkeypatch.setattr(STEP, step)

    return arrange


def said(llm: LanguageModel, *replies: str) -> list[int]:
    """Ids of replies, each with the turn's end."""
    end = llm.tokenizer.token_id(END)
    assert end is not None
    return [i for reply in replies for i in [*llm.tokenizer.encode(reply), end]]


# -- one cache ---------------------------------------------------------------------------------------


def test_four_turns_compute_only_the_new_tokens_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    talk = Conversation(llm, system="be kind")
    ran: list[int] = []
    from fuel_core.persistent_decode import forward_decode_step

    def counting(backbone: Any, token_ids: list[int], cache: KvCache, ctx: Any, **options: Any) -> Tensor:
        ran.append(len(token_ids))
        return forward_decode_step(backbone, token_ids, cache, ctx, **options)

    monkeypatch.setattr(STEP, counting)
    held = 0
    for turn, text in enumerate(["hello", "world", "a fox", "own world"]):
        ran.clear()
        done = talk.send(text, 7, temperature=0)
        assert done.finish_reason == "length"
        # The last token of a reply never runs, so it is the first of the next prompt.
        assert done.usage.cached_tokens == max(0, held - 1)
        new = done.usage.prompt_tokens - done.usage.cached_tokens
        assert ran == [new] + [1] * 6
        if turn:
            markup = f"{END}\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"
            assert new == 1 + len(llm.tokenizer.encode(markup))
        assert (done.stats.plans_built, done.stats.fresh_steps) == (int(turn == 0), 1)
        held = done.usage.prompt_tokens + done.usage.completion_tokens
        assert talk.positions == held
    assert llm.stats.plans_built == 1
    assert [message["role"] for message in talk.messages] == ["system"] + ["user", "assistant"] * 4


def test_reply_in_other_ids_than_its_text_encodes_to_is_kept_as_generated(
    script: Callable[[Sequence[int]], None],
) -> None:
    llm = make()
    letters = [i for letter in "hello" for i in llm.tokenizer.encode(letter)]
    assert letters != llm.tokenizer.encode("hello")
    end = llm.tokenizer.token_id(END) or 0
    script([*letters, end, *said(llm, "own", "fox")])
    talk = Conversation(llm)
    first = talk.send("hi")
    second = talk.send("hi again")
    third = talk.send("and again")
    assert first.text == "hello"
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(letters)
    assert third.usage.cached_tokens == second.usage.prompt_tokens + 1
    # The prompt is longer than the template's own by the ids that were kept.
    fresh = llm.tokenizer.encode_chat([*talk.messages[:4], {"role": "user", "content": "and again"}])
    assert third.usage.prompt_tokens == len(fresh) + len(letters) - 1


def test_kept_ids_give_the_prompt_that_was_asked_for(script: Callable[[Sequence[int]], None]) -> None:
    llm = make()
    end = llm.tokenizer.token_id(END) or 0
    # An unfinished character, a word cut in two, and words that nothing has to be kept for.
    for reply in ([240, end], [*llm.tokenizer.encode("o"), *llm.tokenizer.encode("wn"), end], said(llm, "fox")):
        script([*reply, *said(llm, "own")])
        talk = Conversation(llm)
        talk.send("hi")
        with talk.stream(f"literal {END} and 日本") as second:
            next(second)
        wanted = llm.tokenizer.encode_chat([*talk.messages[:2], {"role": "user", "content": f"literal {END} and 日本"}])
        decode = llm.tokenizer.decode
        assert decode(second.prompt_ids, skip_special_tokens=False) == decode(wanted, skip_special_tokens=False)
        assert second.prompt_ids.count(end) == wanted.count(end)
        assert second.usage.cached_tokens >= len(reply) - 1


def test_kept_ids_end_where_no_character_is_cut(script: Callable[[Sequence[int]], None]) -> None:
    # A token that ends a word and begins an emoji, and a template with nothing between a reply and what follows it.
    spec = json.loads(byte_level_json())
    spec["model"]["vocab"]["oð"] = 300  # ð is how such a vocabulary spells the first byte of an emoji
    spec["model"]["merges"].append(["o", "ð"])
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(folder_source(json.dumps(spec).encode(), template=template))
    backbone = ToyBackbone(ServedConfig(vocab_size=301))
    fill(backbone)
    llm = LanguageModel(backbone, tokenizer=tokenizer, plan="recorded")
    script([*tokenizer.encode("h"), *tokenizer.encode("o"), 0, 0])
    talk = Conversation(llm)
    assert talk.send("a", 2).text == "ho"
    with talk.stream("😀", 1) as reply:
        next(reply)
    assert tokenizer.decode(reply.prompt_ids) == "aho😀"


@pytest.mark.parametrize("template", [TRIMMING, FORGETFUL])
def test_template_that_writes_earlier_replies_differently_keeps_what_matches(
    template: str, script: Callable[[Sequence[int]], None]
) -> None:
    llm = make(template)
    script(said(llm, "  h</t> own fox ", "own"))
    talk = Conversation(llm)
    first = talk.send("hi")
    with talk.stream("hi again") as reply:
        next(reply)
    # The prompt is the template's, whatever the cache holds ...
    assert reply.prompt_ids == llm.tokenizer.encode_chat([*talk.messages[:2], {"role": "user", "content": "hi again"}])
    # ... and everything up to the reply is in the cache.
    assert first.usage.prompt_tokens <= reply.usage.cached_tokens < first.usage.prompt_tokens + len(first.token_ids) - 1


def test_marked_space_is_not_lost_between_turns(script: Callable[[Sequence[int]], None]) -> None:
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    tokenizer = load_tokenizer(folder_source(spm_json(), template=template, special_tokens={"eos": "</s>"}))
    llm = make(tokenizer=tokenizer)
    pieces = [tokenizer.token_id(p) or 0 for p in ("▁", "w", "o", "▁a", "b", "</s>")]
    script([*pieces, tokenizer.token_id("</s>") or 0])
    talk = Conversation(llm)
    first = talk.send("hi")
    assert first.text == "wo ab"
    second = talk.send("hi")
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(pieces) - 1


# -- the context limit -------------------------------------------------------------------------------


def test_whole_oldest_turns_go_when_the_context_is_full_and_the_system_message_stays(
    script: Callable[[Sequence[int]], None],
) -> None:
    llm = make(limit=96)
    script(said(llm, *["own fox"] * 20))
    talk = Conversation(llm, system="own rules")
    gone = 0
    for number in range(10):
        with talk.stream(f"message {number}", 8) as reply:
            for _ in reply:
                pass
        gone += reply.dropped
        assert reply.finish_reason == "stop"
        if reply.dropped:
            assert reply.prompt_ids == llm.tokenizer.encode_chat(talk.messages[:-1])
        assert talk.messages[0] == {"role": "system", "content": "own rules"}
        assert [turn.user for turn in talk.turns] == [f"message {i}" for i in range(gone, number + 1)]
        assert talk.positions <= 96
    assert gone > 0
    assert len(talk.turns) > 1


def test_turns_that_go_leave_room_for_the_turns_after_them(script: Callable[[Sequence[int]], None]) -> None:
    llm = make(limit=256)
    script(said(llm, *["own fox"] * 60))
    talk = Conversation(llm)
    drops = []
    for number in range(30):
        with talk.stream(f"message {number}", 64) as reply:
            for _ in reply:
                pass
        drops.append(reply.dropped)
    assert any(drops)
    after = drops[next(i for i, n in enumerate(drops) if n) :]
    assert after.count(0) > len(after) / 2


def test_message_that_fits_nowhere_is_refused_and_changes_nothing(script: Callable[[Sequence[int]], None]) -> None:
    llm = make(limit=64)
    script(said(llm, "own", "fox"))
    talk = Conversation(llm)
    talk.send("hi", 8)
    before, positions = talk.messages, talk.positions
    with pytest.raises(CapacityError, match=r"prompt has \d+ tokens, the limit is 64 positions"):
        talk.send("far too long " * 20, 8)
    assert (talk.messages, talk.positions) == (before, positions)
    # Almost the whole context: it is asked alone, with what room there is.
    with talk.stream("a" * 30, 8) as reply:
        for _ in reply:
            pass
    assert (reply.dropped, len(talk.turns)) == (1, 1)


def test_model_without_a_limit_drops_nothing(script: Callable[[Sequence[int]], None]) -> None:
    llm = make(limit=None)
    script(said(llm, *["own fox"] * 12))
    talk = Conversation(llm)
    for number in range(12):
        talk.send(f"message {number}", None)
    assert len(talk.turns) == 12


# -- replies that end early --------------------------------------------------------------------------


def test_partial_reply_stays_in_the_conversation_and_in_the_cache(script: Callable[[Sequence[int]], None]) -> None:
    llm = make()
    script([*llm.tokenizer.encode("own fox hello")[:2], *said(llm, "own")])
    talk = Conversation(llm)
    reply = talk.stream("hi")
    first = next(reply)
    second = next(reply)
    assert talk.turns == ()
    reply.close()
    reply.close()
    assert reply.finish_reason == "interrupted"
    assert list(reply) == []
    assert talk.turns == (("hi", first.text + second.text),)
    done = talk.send("go on")
    assert done.usage.cached_tokens == len(reply.prompt_ids) + 1


def test_interrupt_inside_a_step_keeps_the_reply_and_the_next_turn_works(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    undisturbed = make()
    from fuel_core.persistent_decode import forward_decode_step

    steps = 0

    def interrupted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return forward_decode_step(*arguments, **options)

    monkeypatch.setattr(STEP, interrupted)
    talk = Conversation(llm)
    reply = talk.stream("hi", 20, temperature=0)
    with pytest.raises(KeyboardInterrupt):
        list(reply)
    assert len(reply.token_ids) == 3
    assert talk.turns == (("hi", reply.text),)
    after = talk.send("go on", 5, temperature=0)
    monkeypatch.setattr(STEP, forward_decode_step)
    assert after.token_ids == undisturbed.generate(talk._held[: after.usage.prompt_tokens], 5).token_ids


def test_turn_without_a_token_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(limit=96)
    talk = Conversation(llm, system="own rules")
    for number in range(2):
        talk.send(f"message {number}", 8, temperature=0)
    before = talk.messages

    def fail(*_: Any) -> Tensor:
        raise GenerationError("no")

    for error in (KeyboardInterrupt, GenerationError):
        monkeypatch.setattr(STEP, lambda *_, error=error: (_ for _ in ()).throw(error("no")))
        with pytest.raises(error):
            talk.send("one that makes turns go, or would have made them go", 8)
        assert talk.messages == before
    talk.stream("never read").close()
    with pytest.raises(GenerationError, match="top_k"):
        talk.send("x", 8, top_k=-5)
    assert talk.messages == before


def test_open_reply_is_closed_by_whatever_comes_next(script: Callable[[Sequence[int]], None], tmp_path: Path) -> None:
    llm = make()
    talk = Conversation(llm)
    for number, act in enumerate([talk.reset, lambda: talk.save(tmp_path / "x"), lambda: talk.stream("next")]):
        script(llm.tokenizer.encode("own fox"))
        reply = talk.stream(f"message {number}")
        next(reply)
        act()
        assert reply.finish_reason == "interrupted"
    assert [turn.user for turn in talk.turns] == ["message 1", "message 2"]


# -- system message and template -----------------------------------------------------------------------


def test_reset_forgets_turns_and_setting_the_system_message_keeps_them(script: Callable[[Sequence[int]], None]) -> None:
    llm = make()
    script(said(llm, "own", "fox", "hello"))
    talk = Conversation(llm)
    talk.send("hi")
    talk.system = "own rules"
    assert talk.messages[0] == {"role": "system", "content": "own rules"}
    assert len(talk.turns) == 1
    with talk.stream("hi") as reply:
        next(reply)
    assert reply.prompt_ids == llm.tokenizer.encode_chat(
        [{"role": "system", "content": "own rules"}, *talk.messages[1:3], {"role": "user", "content": "hi"}]
    )
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "own rules"}]
    assert talk.positions == 0
    talk.system = None
    assert talk.messages == []


def test_template_that_refuses_a_system_message_is_reported_before_a_turn() -> None:
    llm = make("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML)
    with pytest.raises(ChatTemplateError, match="no system role"):
        Conversation(llm, system="x")
    talk = Conversation(llm)
    with pytest.raises(ChatTemplateError, match="no system role"):
        talk.system = "x"
    assert talk.system is None


def test_model_without_a_template_has_no_conversations() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Conversation(make(None))


# -- files -------------------------------------------------------------------------------------------


def test_saved_conversation_loads_as_it_was_and_from_the_cache(
    script: Callable[[Sequence[int]], None], tmp_path: Path
) -> None:
    llm = make()
    script(said(llm, "own", "fox", "hello"))
    talk = Conversation(llm, system='rules "日本"')
    talk.send("hi\nthere")
    file = tmp_path / "talk.json"
    file.write_text("what was there before")
    talk.save(file)
    assert [f.name for f in tmp_path.iterdir()] == ["talk.json"]
    assert "日本" in file.read_text(encoding="utf-8")
    before, held = talk.messages, talk.positions
    talk.send("more")
    talk.load(file)
    assert talk.messages == before
    # Loaded in the session it was saved in, it is still in the cache.
    assert talk.send("more").usage.cached_tokens >= held - 1
    other = Conversation(make())
    other.load(str(file))
    assert other.messages == before
    Conversation(llm).save(file)
    other.load(file)
    assert other.messages == []


BAD_FILES = {
    "no json": b"hello",
    "no text": b"\xff\xfe\x00",
    "half a file": b'{"messages": [',
    "a list": b"[]",
    "another version": b'{"fuel_conversation": 99, "messages": []}',
    "messages no list": b'{"messages": {"role": "user"}}',
    "a message that is none": b'{"messages": [3]}',
    "no role": b'{"messages": [{"content": "x"}]}',
    "unknown role": b'{"messages": [{"role": "tool", "content": "x"}]}',
    "reply first": b'{"messages": [{"role": "assistant", "content": "x"}]}',
    "system in the middle": b'{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
    "two of a kind": b'{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]}',
    "no reply": b'{"messages": [{"role": "user", "content": "x"}]}',
    "content in parts": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}',
    "no content": b'{"messages": [{"role": "user"}]}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_file_is_refused_in_one_line_and_changes_nothing(
    what: str, script: Callable[[Sequence[int]], None], tmp_path: Path
) -> None:
    llm = make()
    script(said(llm, "own", "fox"))
    talk = Conversation(llm, system="own rules")
    talk.send("hi")
    before = talk.messages
    file = tmp_path / "talk.json"
    file.write_bytes(BAD_FILES[what])
    with pytest.raises(ConversationError, match=r"talk\.json") as caught:
        talk.load(file)
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert talk.messages == before


def test_file_the_template_refuses_changes_nothing(tmp_path: Path) -> None:
    llm = make("{% if 'bad' in messages[0].content %}{{ raise_exception('not that') }}{% endif %}" + CHATML)
    talk = Conversation(llm)
    file = tmp_path / "talk.json"
    turns = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "x"}]
    file.write_text(json.dumps({"messages": turns}))
    with pytest.raises(ChatTemplateError, match="not that"):
        talk.load(file)
    assert talk.messages == []


def test_places_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    talk = Conversation(make())
    (tmp_path / "folder").mkdir()
    for load in (tmp_path / "gone", tmp_path / "folder", "nul\0byte"):
        with pytest.raises(ConversationError, match="expected"):
            talk.load(load)
    for save in (tmp_path / "no" / "such" / "folder", tmp_path / "folder", "nul\0byte", tmp_path / ("x" * 300)):
        with pytest.raises(FuelError, match="name another file"):
            talk.save(save)
    assert sorted(f.name for f in tmp_path.rglob("*")) == ["folder"]


def test_saving_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(make())
    file = tmp_path / "talk.json"
    file.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConversationError, match="no space left on device"):
        talk.save(file)
    assert file.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["talk.json"]


_SAVING = """
import os, signal, sys
from fuel_core.conversation import Conversation
from toy_llm import make

file, number, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# As the command does it.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
talk = Conversation(make(), "another system message")
name = {"before it is on disk": "fsync", "before it has its name": "replace", "after": "replace"}[moment]
usual = getattr(os, name)

def struck(*arguments):
    if moment == "after":
        usual(*arguments)
    os.kill(os.getpid(), number)
    return usual(*arguments)

setattr(os, name, struck)
talk.save(file)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["before it is on disk", "before it has its name", "after"])
def test_a_process_that_ends_while_it_saves_leaves_the_old_file_or_the_new_one(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    Conversation(make(), "a system message").save(file)
    before = file.read_bytes()
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _SAVING, str(file), str(number.value), moment],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])},
        timeout=120,
    )
    assert done.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL), done.stderr
    talk = Conversation(make())
    talk.load(file)
    assert talk.system == ("another system message" if moment == "after" else "a system message")
    assert moment == "after" or file.read_bytes() == before
    if number == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == [file]


def test_saving_again_keeps_who_may_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk = Conversation(make())
    talk.save(file)
    file.chmod(0o600)
    talk.save(file)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_while_it_saves_costs_a_line_and_no_file(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk.json"
    talk = Conversation(make(), "a system message")
    talk.save(file)
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        talk.system = "another"
        with pytest.raises(ConversationError, match=os.strerror(code)[1:]):
            talk.save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
