"""The named ranges of a step, as torch.profiler sees them."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.profiler import ProfilerActivity, profile
from toy_backbone import new_cache, toy

from fuel_core import profiling
from fuel_core.generation import Generation
from fuel_core.persistent_decode import InferenceContext


def ranges_of(wanted: bool) -> Counter[str]:
    model = toy()
    generation = Generation(model, [3, 1, 4], max_new_tokens=4, cache=new_cache(model), ctx=InferenceContext("cpu"))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        if wanted:
            with profiling.profile_ranges():
                list(generation)
        else:
            list(generation)
    return Counter(event.name for event in seen.events() if event.name.startswith("fuel."))


def test_every_part_of_every_step_has_its_range_and_none_unless_asked() -> None:
    assert ranges_of(wanted=False) == Counter()
    found = ranges_of(wanted=True)
    assert set(found) == set(profiling.RANGES)
    assert found["fuel.sampling"] == 4
    # A prompt and three decode steps. The first of those is the build, whose run is a part of it.
    assert found["fuel.token_data"] == found["fuel.upload"] >= 4
    assert found["fuel.run"] >= 3


def test_ranges_nest_and_end_with_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), profiling.profile_ranges(), profiling.profile_ranges():
        raise ValueError("stop")
    assert profiling.span("fuel.run") is profiling._OFF
