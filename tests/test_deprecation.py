"""What is going away is said once, with what to use instead."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest

from fuel_core import deprecation
from fuel_core.deprecation import warn_deprecated


@pytest.fixture(autouse=True)
def _nothing_announced_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_announced", set())


def _old() -> None:
    warn_deprecated("old()", instead="new()", removal="0.3")


def test_warning_names_replacement_removal_and_the_calling_line() -> None:
    with pytest.warns(DeprecationWarning, match="old") as caught:
        _old()
    (warning,) = caught
    assert str(warning.message) == "old() is deprecated and goes away in fuel-core 0.3; use new()"
    assert Path(warning.filename) == Path(__file__)
    assert Path(__file__).read_text().splitlines()[warning.lineno - 1] == "        _old()"


def test_each_thing_is_announced_once_in_a_process_whoever_calls() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=_old) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _old()
        warn_deprecated("other()", instead="new()", removal="0.3")
    assert [str(w.message).split()[0] for w in caught] == ["old()", "other()"]


def test_every_call_raises_where_warnings_are_errors() -> None:
    for _ in "ab":
        with pytest.raises(DeprecationWarning, match="use new"):
            _old()
