"""Shaping: what each step does to times, lengths, ids and shared prefixes, and what it says of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager.content import Content, ExtraKeys, HashedContent, TokenContent
from scheduler.request import Request
from traces import Arrival, TraceError, default_trace_path, read_trace
from traces.prefix import ideal_prefix_hits
from traces.shape import (
    Shaped,
    cut_warm_up,
    merge,
    repeat,
    sample,
    scale_lengths,
    shape,
    stretch_time,
    superpose,
    thin,
    time_window,
)

S = 1_000_000_000


def arrival(
    time_s: float,
    name: str = "",
    *,
    prompt: int = 8,
    output: int = 4,
    content: Content | None = None,
    session: str | None = None,
    patience_s: int | None = None,
) -> Arrival:
    time = int(time_s * S)
    request = Request(
        id=name or f"at {time_s:g}",
        arrival_ns=time,
        num_prompt_tokens=prompt,
        content=content,
        session_id=session,
        deadline_ns=None if patience_s is None else time + patience_s * S,
    )
    return Arrival(request, output)


def shaped(*times_s: float) -> Shaped:
    return Shaped([arrival(time) for time in times_s])


def ids(found: Shaped) -> list[str]:
    return [a.request.id for a in found.arrivals]


def times(found: Shaped) -> list[float]:
    return [a.request.arrival_ns / S for a in found.arrivals]


def hashed(*hash_ids: int, size: int = 4, covered: int | None = None) -> HashedContent:
    return HashedContent(np.array(hash_ids, dtype=np.int64), size, covered or len(hash_ids) * size)


def hit_tokens(found: Shaped) -> int:
    hits = ideal_prefix_hits(found.arrivals)
    assert hits is not None
    return hits.hit_tokens


def test_a_window_starts_its_clock_and_moves_deadlines() -> None:
    before = Shaped([arrival(1), arrival(2, patience_s=5), arrival(3.5), arrival(4)])
    found = time_window(before, 2 * S, 4 * S)
    assert times(found) == [0, 1.5]
    assert found.arrivals[0].request.deadline_ns == 5 * S
    assert found.trail == (
        "window from 2 s to 4 s, its start is time 0; caches start cold (4 -> 2 requests)",
    )
    assert times(time_window(before, 2 * S, None)) == [0, 1.5, 2]


def test_a_warm_up_is_counted_from_the_first_arrival() -> None:
    assert times(cut_warm_up(shaped(5, 6, 8, 9), 2 * S)) == [1, 2]
    with pytest.raises(TraceError, match=r"warm-up.*no request is left"):
        cut_warm_up(shaped(5, 6), 2 * S)


def test_stretching_divides_gaps_exactly_and_leaves_patience() -> None:
    before = Shaped([arrival(2), arrival(3, patience_s=5), arrival(8)])
    found = stretch_time(before, Fraction("0.1"))
    assert times(found) == [2, 12, 62]
    assert found.arrivals[1].request.deadline_ns == 17 * S
    thirds = stretch_time(before, Fraction(3))
    assert [a.request.arrival_ns for a in thirds.arrivals] == [2 * S, 2 * S + S // 3, 4 * S]


def test_thinning_keeps_the_share_and_whole_sessions() -> None:
    before = Shaped([arrival(i, session=f"s{i // 10}") for i in range(5_000)])
    found = thin(before, Fraction(1, 4), seed=3)
    assert len(found.arrivals) == pytest.approx(1_250, abs=4 * (5_000 * 3 / 16) ** 0.5)
    assert "sessions lose turns" in found.trail[0]
    assert ids(found) == ids(thin(before, Fraction(1, 4), seed=3))
    assert ids(found) != ids(thin(before, Fraction(1, 4), seed=4))
    whole = thin(before, Fraction(1, 4), seed=3, unit="session")
    assert set(Counter(a.request.session_id for a in whole.arrivals).values()) == {10}
    assert "sessions lose turns" not in whole.trail[0]


def test_superposed_copies_are_turned_and_have_ids_of_their_own() -> None:
    before = shaped(10, 11, 13, 16)
    found = superpose(before, Fraction(3), seed=1)
    assert len(set(ids(found))) == 12
    assert times(found) == sorted(times(found))
    period = 8.0  # the span and one mean gap
    for copy in (1, 2):
        mine = sorted(
            a.request.arrival_ns / S for a in found.arrivals if a.request.id.endswith(f"#{copy}")
        )
        assert all(10 <= time < 10 + period for time in mine)
        gaps = sorted(b - a for a, b in pairwise([*mine, mine[0] + period]))
        assert gaps == pytest.approx([1, 2, 2, 3], abs=1e-6)


def test_a_fraction_of_a_copy_is_thinned() -> None:
    before = Shaped([arrival(i / 10) for i in range(4_000)])
    found = superpose(before, Fraction("1.25"), seed=7)
    assert len(found.arrivals) == pytest.approx(5_000, abs=4 * (4_000 * 3 / 16) ** 0.5)
    assert len(set(ids(found))) == len(found.arrivals)
    assert times(superpose(before, Fraction(1), seed=7)) == times(before)


def test_copies_share_blocks_only_where_asked() -> None:
    before = Shaped([arrival(i, f"r{i}", content=hashed(1, 10 + i)) for i in range(4)])
    assert hit_tokens(before) == 3 * 4
    assert hit_tokens(superpose(before, Fraction(2), seed=0)) == 2 * 12
    assert hit_tokens(repeat(before, 2)) == 2 * 12
    assert hit_tokens(repeat(before, 2, "shared")) == 12 + 4 * 8
    assert "share no blocks" in repeat(before, 2).trail[0]


def test_ids_that_look_like_copies_stay_apart() -> None:
    before = Shaped([arrival(0, "a"), arrival(1, "a#1")])
    assert len(set(ids(repeat(before, 3)))) == 6


def test_repeating_leaves_a_mean_gap_between() -> None:
    assert times(repeat(shaped(1, 3, 5), 2)) == [1, 3, 5, 7, 9, 11]
    assert times(repeat(shaped(1), 3)) == [1, 2, 3]


def test_tr_03_more_requests_than_there_are_is_an_error_that_names_a_way() -> None:
    with pytest.raises(TraceError, match=r"10 requests asked for, the trace has 4 \(repeat"):
        sample(shaped(0, 1, 2, 3), 10, seed=0)
    found = sample(repeat(shaped(0, 1, 2, 3), 3), 10, seed=0)
    assert len(set(ids(found))) == 10
    assert len(found.trail) == 2


def test_a_sample_keeps_order_and_times() -> None:
    before = Shaped([arrival(i, session=f"s{i // 2}") for i in range(20)])
    found = sample(before, 5, seed=2)
    assert len(found.arrivals) == 5
    assert set(times(found)) < set(times(before))
    assert times(found) == sorted(times(found))
    whole = sample(before, 3, seed=2, unit="session")
    assert sorted(Counter(a.request.session_id for a in whole.arrivals).values()) == [2, 2, 2]


def test_merging_names_tenants_and_keeps_their_caches_apart() -> None:
    one = Shaped([arrival(0, "x", content=hashed(1, 2), session="s"), arrival(2, "y")], ("cut",))
    two = Shaped([arrival(0, "x", content=hashed(1, 2)), arrival(1, "z")])
    found = merge([("a", one), ("b", two)])
    assert ids(found) == ["a/x", "b/x", "b/z", "a/y"]
    assert found.arrivals[0].request.session_id == "a/s"
    assert found.arrivals[0].request.extra_keys == ExtraKeys(salt="a")
    assert found.trail == (
        "a: cut",
        "merged a with 2, b with 2 requests; tenants share no blocks",
    )
    assert hit_tokens(found) == 0
    assert hit_tokens(merge([("a", one), ("b", two)], "shared")) == 8
    with pytest.raises(TraceError, match="a name of its own"):
        merge([("a", one), ("a", two)])


def test_lengths_round_up_and_take_max_tokens_along() -> None:
    a = arrival(0, prompt=3, output=5)
    before = Shaped([a._replace(request=replace(a.request, max_tokens=10))])
    found = scale_lengths(before, Fraction("0.5"), Fraction("1.5")).arrivals[0]
    assert (found.request.num_prompt_tokens, found.output_tokens) == (2, 8)
    assert found.request.max_tokens == 15


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=4),
    factor=st.fractions(Fraction(1, 5), Fraction(4), max_denominator=7),
)
def test_scaled_token_ids_share_what_the_originals_shared(
    prompts: list[list[int]], factor: Fraction
) -> None:
    before = Shaped(
        [arrival(i, prompt=len(p), content=TokenContent.of(p)) for i, p in enumerate(prompts)]
    )
    after = scale_lengths(before, factor)
    contents = [a.request.content for a in after.arrivals]
    for a, b in pairwise(range(len(prompts))):
        first, second = contents[a], contents[b]
        assert isinstance(first, TokenContent)
        assert isinstance(second, TokenContent)
        shared = _common(prompts[a], prompts[b])
        scaled = _common(first.token_ids.tolist(), second.token_ids.tolist())
        whole = min(len(first.token_ids), len(second.token_ids))
        # Tokens that stand for a prefix within the shared one, and those only.
        assert scaled == min(int(shared * factor), whole) or (
            scaled == whole and prompts[a][:shared] in (prompts[a], prompts[b])
        )


def _common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    rounds_up=st.booleans(),
    size=st.integers(2, 16),
    factor=st.fractions(Fraction(1, 5), Fraction(4), max_denominator=9),
)
def test_scaled_hash_ids_cover_as_the_originals_did(
    lengths: list[int], rounds_up: bool, size: int, factor: Fraction
) -> None:
    before = []
    for i, length in enumerate(lengths):
        blocks = -(-length // size) if rounds_up else length // size
        covered = length if rounds_up else blocks * size
        content = HashedContent(np.arange(blocks), size, covered)
        before.append(arrival(i, prompt=length, content=content))
    after = scale_lengths(Shaped(before), factor)
    for a in after.arrivals:
        content = a.request.content
        assert isinstance(content, HashedContent)
        other, prompt = content.hash_block_size, a.request.num_prompt_tokens
        assert content.num_tokens in (prompt, prompt // other * other)
        assert other == max(2, round(size * factor))
    if Fraction(size * factor).denominator != 1:
        assert "as their ids now stand for" in after.trail[0]


def test_steps_are_done_in_the_order_of_the_flags() -> None:
    arrivals = [arrival(i) for i in range(100)]
    found = shape(
        arrivals,
        [
            "window:from=10,to=60s",
            "rate:factor=2,by=stretch",
            "sample:count=20,seed=1",
            "repeat:times=2",
            "lengths:prompt=2",
            "first:count=25",
        ],
    )
    assert len(found.arrivals) == 25
    assert len(found.trail) == 6
    assert "(100 -> 50 requests)" in found.trail[0]
    assert all(a.request.num_prompt_tokens == 16 for a in found.arrivals)
    assert max(times(found)[:20]) < 25


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("crop:from=1", "no way to shape a trace"),
        ("window:from=5,to=2", "not after its start"),
        ("window:from=-1", "from is negative"),
        ("window:from=1,until=2", "until has no effect"),
        ("window:from=1000", "no request is left"),
        ("rate:factor=2", "by is missing, expected stretch or thin or superpose"),
        ("rate:factor=nan,by=thin", "factor is not a finite number"),
        ("rate:factor=2,by=thin", "must be at most 1"),
        ("rate:factor=0.5,by=superpose", "must be at least 1"),
        ("rate:factor=0,by=stretch", "must be within"),
        ("rate:factor=2,by=stretch,seed=3", "seed has no effect"),
        ("rate:factor=1e6,by=superpose,seed=3", "at most 50,000,000 are made"),
        ("sample:count=x", "expected a whole number"),
        ("sample:count=1,unit=user", "expected request or session"),
        ("sample:count=1,count=2", "each key once"),
        ("repeat:times=0", "must be at least 1"),
        ("repeat", "times is missing"),
        ("lengths:prompt=1e6,output=1e12", "must be within"),
    ],
)
def test_a_step_that_cannot_be_done_is_one_line(step: str, message: str) -> None:
    with pytest.raises(TraceError) as refused:
        shape([arrival(i) for i in range(100)], [step])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_shipped_trace_keeps_its_hit_rate_when_prompts_double() -> None:
    trace = read_trace(default_trace_path())
    before, after = (
        ideal_prefix_hits(arrivals)
        for arrivals in (trace.arrivals, shape(trace.arrivals, ["lengths:prompt=2"]).arrivals)
    )
    assert before is not None
    assert after is not None
    assert after.hit_tokens == 2 * before.hit_tokens
    assert after.prompt_tokens == pytest.approx(2 * before.prompt_tokens, rel=1e-3)
