"""Stop strings in text that arrives in pieces: nothing of one gets out, nothing else is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_core.errors import GenerationError
from fuel_core.generation import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    out = [matcher.push(piece) for piece in pieces]
    return [*out, "" if matcher.matched else matcher.flush()], matcher.matched


def test_stop_string_over_two_pieces_is_not_sent() -> None:
    out, matched = run(["own fox"], ["the qu", "ick br", "own", " fox", " jumps"])
    assert "".join(out) == "the quick br"
    assert matched == "own fox"


def test_stop_string_over_four_pieces_sends_none_of_it() -> None:
    out, _ = run(["DEFGHIJ"], ["ABC", "DE", "FG", "HI", "JK"])
    assert out == ["ABC", "", "", "", "", ""]


def test_stop_tail_that_comes_to_nothing_is_sent_after_all() -> None:
    out, matched = run(["own fox"], ["br", "own", " f", "ish", "ow"])
    assert out == ["br", "", "", "own fish", "", "ow"]
    assert matched is None


def test_stop_string_that_repeats_its_beginning_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], "aab")


def test_stop_strings_of_which_one_contains_another() -> None:
    # "bc" is complete first, however the text is cut.
    for pieces in (["abcd"], ["ab", "cd"], list("abcd")):
        out, matched = run(["abcd", "bc"], pieces)
        assert ("".join(out), matched) == ("a", "bc")
    # Complete at the same place: the longer one, so that nothing of it is sent.
    assert run(["cd", "abcd"], list("xabcd"))[1] == "abcd"


def test_stop_after_a_match_nothing_passes() -> None:
    matcher = StopStrings("x")
    assert matcher.push("axb") == "a"
    assert matcher.push("more") == ""


def test_stop_without_strings_holds_nothing_back() -> None:
    assert StopStrings().push("any") == "any"


@pytest.mark.parametrize("stop", [[""], [5], ["a", ""]])
def test_stop_refuses_what_cannot_be_found(stop: list[str]) -> None:
    with pytest.raises(GenerationError, match="non-empty strings"):
        StopStrings(stop)


@given(
    text=st.text(alphabet="abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=8),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_result_does_not_depend_on_the_pieces(text: str, cuts: list[int], stops: list[str]) -> None:
    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    out, matched = run(stops, pieces)
    # Restated without pieces: the end of the first complete stop string, and the longest that ends there.
    ends = [i for i in range(1, len(text) + 1) if any(text[:i].endswith(stop) for stop in stops)]
    if not ends:
        assert ("".join(out), matched) == (text, None)
    else:
        longest = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert ("".join(out), matched) == (text[: ends[0] - len(longest)], longest)
