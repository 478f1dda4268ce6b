"""``traces inspect``: published figures of public traces, and small ones checked by hand."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager.content import ExtraKeys, HashedContent, KeyChain, TokenContent
from scheduler.request import Request
from traces import Arrival, TraceError, default_trace_path, read_trace
from traces.__main__ import main
from traces.describe import Peak, describe, describe_arrivals
from traces.pictures import dispersion_by_window, write_picture
from traces.prefix import PrefixHits, ideal_prefix_hits, prompt_chains
from traces.reuse import ReuseCurve, reuse_curve

S = 1_000_000_000


def hashed(hash_ids: list[int], num_tokens: int, size: int = 4, lora: str | None = None) -> Arrival:
    content = HashedContent(np.array(hash_ids, dtype=np.int64), size, num_tokens)
    return Arrival(
        Request(
            id="r", num_prompt_tokens=num_tokens, content=content, extra_keys=ExtraKeys(lora=lora)
        ),
        1,
    )


def hits(*arrivals: Arrival, block_size: int | None = None) -> PrefixHits:
    found = ideal_prefix_hits(arrivals, block_size)
    assert found is not None
    return found


def test_hits_are_leading_runs_looked_up_before_insertion() -> None:
    found = hits(hashed([1, 2, 3], 10), hashed([1, 9, 3], 12), hashed([1, 2, 3], 10))
    assert (found.blocks, found.hit_blocks, found.unique_blocks) == (9, 0 + 1 + 3, 5)
    assert (found.prompt_tokens, found.hit_tokens) == (32, 0 + 4 + 10)
    assert found.counts_partial_blocks
    assert found.requests_with_hits == 2


def test_at_a_given_block_size_only_full_blocks_hit() -> None:
    found = hits(hashed([1, 2, 3], 10), hashed([1, 2, 3], 10), block_size=4)
    assert (found.blocks, found.hit_blocks, found.hit_tokens) == (4, 2, 8)
    assert not found.counts_partial_blocks


def test_an_adapter_shares_nothing_with_another() -> None:
    assert hits(hashed([1], 4, lora="a"), hashed([1], 4, lora="b"), hashed([1], 4)).hit_blocks == 0
    assert hits(hashed([1], 4, lora="a"), hashed([1], 4, lora="a")).hit_blocks == 1


def test_token_ids_are_cut_into_blocks_of_sixteen() -> None:
    content = TokenContent.of(range(40))
    arrival = Arrival(Request(id="r", num_prompt_tokens=40, content=content), 1)
    found = hits(arrival, arrival)
    assert (found.block_size, found.blocks, found.hit_blocks, found.hit_tokens) == (16, 4, 2, 32)


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    size=st.integers(1, 6),
    block_size=st.integers(1, 8),
)
def test_the_trie_agrees_with_the_keys_of_an_engine(
    prompts: list[tuple[list[int], int]], size: int, block_size: int
) -> None:
    arrivals = []
    seen: set[bytes] = set()
    want = 0
    for ids, cut in prompts:
        covered = max(0, len(ids) * size - min(cut, size - 1))
        content = HashedContent(np.array(ids, dtype=np.int64), size, covered)
        arrivals.append(Arrival(Request(id="r", num_prompt_tokens=covered + 1, content=content), 1))
        keys = KeyChain(content, block_size).keys
        for key in keys:
            if key not in seen:
                break
            want += 1
        seen.update(keys)
    found = hits(*arrivals, block_size=block_size)
    assert (found.hit_blocks, found.unique_blocks) == (want, len(seen))
    assert found.hit_tokens == want * block_size


def test_si_11_without_identity_the_hit_rate_is_unknown_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00,512,10\n2023-11-16 18:00:01,512,10\n"
    )
    assert describe(read_trace(path)).prefix is None
    assert main(["inspect", str(path)]) == 0
    assert "hit rate unknown" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix"] is None


def test_arrivals_by_hand() -> None:
    found = describe_arrivals((np.array([20, 25, 34, 34, 120]) * (S // 10)).astype(np.int64))
    assert (found.first_s, found.span_s) == (2.0, 10.0)
    assert found.rate_per_s == 4 / 10
    assert (found.gap_mean_s, found.gap_max_s, found.shared_timestamps) == (2.5, 8.6, 1)
    gaps = np.array([0.5, 0.9, 0, 8.6])
    assert found.gap_cv == pytest.approx(gaps.std() / 2.5)
    counts = np.array([2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    assert found.count_dispersion_1s == pytest.approx(counts.var() / counts.mean())
    # 2.5, 3.4, 3.4 lie within one second, but not within one that starts at 2, 3, ...
    assert found.peaks == (Peak(1, 3, 2), Peak(10, 4, 4))
    assert found.window_requests == (4, 0, 0, 0, 1)


def test_one_arrival_has_no_rate() -> None:
    found = describe_arrivals(np.array([5 * S]))
    assert (found.rate_per_s, found.gap_cv, found.count_dispersion_1s) == (None, None, None)
    assert (found.peaks, found.window_requests) == ((), ())


@given(st.lists(st.integers(0, 200 * S), min_size=1, max_size=40))
def test_windows_hold_every_arrival(times: list[int]) -> None:
    found = describe_arrivals(np.sort(np.array(times, dtype=np.int64)))
    if found.span_s > 0:
        assert sum(found.window_requests) == len(times)
    for peak in found.peaks:
        assert len(times) >= peak.requests >= peak.aligned_requests >= 1
        assert peak.requests <= 2 * peak.aligned_requests


def test_percentiles_are_linearly_interpolated(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    row = '{{"arrival_s":0,"prompt_tokens":{},"output_tokens":1,"session_id":{}}}\n'
    path.write_text("".join(row.format(length, length // 2) for length in (1, 2, 3, 4)))
    found = describe(read_trace(path))
    lengths = found.prompt_tokens
    assert (lengths.min, lengths.p50, lengths.max, lengths.mean, lengths.total) == (
        1,
        2.5,
        4,
        2.5,
        10,
    )
    assert lengths.p95 == pytest.approx(3.85)
    assert found.sessions is not None
    assert (found.sessions.count, found.sessions.requests, found.sessions.requests_max) == (3, 4, 2)


@pytest.mark.parametrize(
    ("name", "rate", "cv", "dispersion", "peak", "prompt", "output"),
    [
        (
            "code",
            2.566,
            13.15,
            13.2,
            67,
            (3, 75, 1469, 7303, 7436, 7437),
            (6, 6, 13, 90, 251, 1899),
        ),
        (
            "conv",
            5.530,
            1.09,
            1.39,
            16,
            (2, 181, 1020, 4083, 4142, 14050),
            (7, 41, 129, 451, 601, 1000),
        ),
    ],
)
def test_azure_figures(
    shared: Path,
    name: str,
    rate: float,
    cv: float,
    dispersion: float,
    peak: int,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
) -> None:
    found = describe(read_trace(shared / f"traces/azure2023/AzureLLMInferenceTrace_{name}.csv"))
    assert found.arrivals.rate_per_s == pytest.approx(rate, abs=5e-4)
    assert found.arrivals.gap_cv == pytest.approx(cv, abs=5e-3)
    assert found.arrivals.count_dispersion_1s == pytest.approx(dispersion, abs=0.05)
    assert found.arrivals.peaks[0].aligned_requests == peak
    assert found.prefix is None
    for lengths, want in ((found.prompt_tokens, prompt), (found.output_tokens, output)):
        got = (lengths.min, lengths.p5, lengths.p50, lengths.p95, lengths.p99, lengths.max)
        assert got == pytest.approx(want, abs=0.5)


@pytest.mark.parametrize(
    ("name", "token_rate", "full_blocks_rate", "block_rate", "unique", "blocks", "shared_times"),
    [
        ("conversation", 0.3736, 0.3734, 0.3664, 182_790, 288_500, 10_851),
        ("synthetic", 0.6512, 0.6504, 0.6396, 43_924, 121_877, 11),
    ],
)
def test_mooncake_figures(
    shared: Path,
    name: str,
    token_rate: float,
    full_blocks_rate: float,
    block_rate: float,
    unique: int,
    blocks: int,
    shared_times: int,
) -> None:
    trace = read_trace(shared / f"traces/mooncake/{name}_trace.jsonl")
    found = describe(trace)
    assert found.prefix is not None
    assert found.prefix.token_hit_rate == pytest.approx(token_rate, abs=5e-5)
    assert found.prefix.block_hit_rate == pytest.approx(block_rate, abs=5e-5)
    assert (found.prefix.unique_blocks, found.prefix.blocks) == (unique, blocks)
    full = ideal_prefix_hits(trace.arrivals, 512)
    assert full is not None
    assert full.token_hit_rate == pytest.approx(full_blocks_rate, abs=5e-5)
    assert found.arrivals.shared_timestamps == shared_times
    assert any("ticks of about 3 s" in note for note in trace.notes) == (name == "conversation")


def test_the_report_says_what_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 4}
    rows: list[dict[str, Any]] = [
        {**good, "hash_ids": [1, 2], "hash_block_size": 32},
        {**good, "arrival_s": 70, "hash_ids": [1, 3], "hash_block_size": 32},
        {**good, "arrival_s": 30, "output_tokens": 0},
        {**good, "arrival_s": 30},
    ]
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "4: 3 used, 1 skipped" in text
    assert "1 skipped: output_tokens is zero; line 3" in text
    assert "ideal hit rate 40.0% of tokens, 25.00% of blocks (32 tokens a block" in text
    assert "1 requests of unknown content left out" in text
    assert "Sorted by arrival" in text
    assert max(map(len, text.splitlines())) <= 100

    assert main(["inspect", str(path), "--json", "--block-size", "16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == {"total": 4, "used": 3, "skipped": 1}
    assert report["skipped"][0]["lines"] == [3]
    assert report["prefix"]["hit_tokens"] == 32
    assert report["arrivals"]["span_s"] == 70.0

    assert main(["inspect", str(path), "--strict"]) == 2
    error = capsys.readouterr().err
    assert "line 3: output_tokens is zero" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["inspect"], ["inspect", "x", "--block-size", "0"]],
)
def test_wrong_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def curve(*arrivals: Arrival, block_size: int | None = None) -> ReuseCurve:
    found = reuse_curve(arrivals, block_size)
    assert found is not None
    return found


def chain(*path: int, tail: int = 4) -> Arrival:
    """A prompt of blocks of 4 tokens, its ids made from the path, so that they form a tree."""
    ids = [hash(path[: depth + 1]) for depth in range(len(path))]
    return hashed(ids, 4 * (len(ids) - 1) + tail)


def test_a_block_needs_a_pool_as_deep_as_what_came_between() -> None:
    a, b = chain(1, 2), chain(5, 6, 7)
    found = curve(a, b, a)
    # After b, 3 blocks are above a's head, and its tail lies one deeper.
    assert found.needed_blocks.tolist() == [4, 5]
    assert [found.lru(n) for n in (0, 3, 4, 5, 99)] == [0, 0, 4 / 28, 8 / 28, 8 / 28]
    assert (found.ideal, found.largest, found.unique_blocks) == (8 / 28, 5, 5)
    # Whoever knows that b does not come back keeps a.
    assert [found.ceiling(n) for n in (0, 1, 2, 3)] == [0, 4 / 28, 8 / 28, 8 / 28]


PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12
)


@given(prompts=PROMPTS)
def test_the_curve_is_what_an_lru_pool_of_each_size_does(prompts: list[tuple[int, ...]]) -> None:
    arrivals = [chain(*path) for path in prompts]
    found = curve(*arrivals)
    for size in range(1, 20):
        pool: OrderedDict[tuple[int, ...], None] = OrderedDict()
        hit = 0
        for path in prompts:
            keys = [path[: depth + 1] for depth in range(len(path))]
            hit += next((i for i, key in enumerate(keys) if key not in pool), len(keys))
            for key in reversed(keys):
                pool[key] = None
                pool.move_to_end(key)
            while len(pool) > size:
                pool.popitem(last=False)
        assert found.lru(size) == pytest.approx(4 * hit / found.prompt_tokens)
    ideal = ideal_prefix_hits(arrivals)
    assert ideal is not None
    assert found.ideal == pytest.approx(ideal.token_hit_rate)
    assert found.unique_blocks == ideal.unique_blocks


@given(prompts=PROMPTS.filter(lambda prompts: len(prompts) <= 6))
def test_no_choice_of_what_to_keep_beats_the_ceiling(prompts: list[tuple[int, ...]]) -> None:
    """All subsets of the blocks at hand are tried after each request."""
    found = curve(*(chain(*path) for path in prompts))
    for size in (1, 2, 3):
        best: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
        for path in prompts:
            keys = [path[: depth + 1] for depth in range(len(path))]
            after: dict[frozenset[tuple[int, ...]], int] = {}
            for pool, hits_before in best.items():
                hit = next((i for i, key in enumerate(keys) if key not in pool), len(keys))
                there = sorted(pool | set(keys))
                for kept in itertools.combinations(there, min(size, len(there))):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits_before + hit)
            best = after
        assert found.ceiling(size) == pytest.approx(4 * max(best.values()) / found.prompt_tokens)


@given(prompts=PROMPTS)
def test_curves_rise_to_the_ideal_and_lru_stays_below_the_ceiling(
    prompts: list[tuple[int, ...]],
) -> None:
    found = curve(*(chain(*path) for path in prompts))
    rates = [(found.lru(n), found.ceiling(n)) for n in range(30)]
    for (lru, ceiling), (next_lru, next_ceiling) in itertools.pairwise(rates):
        assert lru <= ceiling + 1e-12
        assert lru <= next_lru
        assert ceiling <= next_ceiling
    assert rates[-1] == (found.ideal, found.ideal)
    assert rates[min(found.largest, 29)][0] == found.ideal


def test_chains_know_where_each_block_came_before() -> None:
    chains = prompt_chains([chain(1, 2, tail=1), chain(1, 2, tail=3), chain(1, 3)])
    assert chains is not None
    assert chains.previous.tolist() == [-1, -1, 0, 1, 2, -1]
    assert chains.hit_tokens.tolist() == [0, 0, 4, 1, 4, 0]
    assert chains.depth.tolist() == [0, 1, 0, 1, 0, 1]
    assert prompt_chains([Arrival(Request(id="r", num_prompt_tokens=1), 1)]) is None


def test_prompts_without_a_whole_block_have_an_empty_curve() -> None:
    short = Arrival(Request(id="r", num_prompt_tokens=3, content=TokenContent.of([1, 2, 3])), 1)
    found = curve(short, short)
    assert (found.ideal, found.largest, found.ceiling(5), found.sizes()) == (0, 0, 0, [1])


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("conversation", (4.5, 11.4, 21.6, 33.2, 36.2, 37.1)),
        ("synthetic", (8.6, 28.5, 43.2, 63.6, 65.1, 65.1)),
    ],
)
def test_mooncake_hit_rates_by_pool_size(
    shared: Path, name: str, published: tuple[float, ...]
) -> None:
    trace = read_trace(shared / f"traces/mooncake/{name}_trace.jsonl")
    found = curve(*trace.arrivals)
    sizes = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)
    assert [100 * found.lru(size) for size in sizes] == pytest.approx(published, abs=0.06)
    ideal = ideal_prefix_hits(trace.arrivals)
    assert ideal is not None
    assert found.ideal == ideal.token_hit_rate
    assert found.unique_blocks == ideal.unique_blocks
    ceilings = [found.ceiling(size) for size in sizes]
    assert all(found.lru(size) <= ceiling for size, ceiling in zip(sizes, ceilings, strict=True))
    assert ceilings[-1] == pytest.approx(found.ideal)


def test_the_report_has_the_curve_and_what_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    row = {"prompt_tokens": 64, "output_tokens": 1, "hash_block_size": 32}
    ids = ([1, 2], [3, 4], [1, 2], [3, 5])
    rows = [{**row, "arrival_s": i, "hash_ids": pair} for i, pair in enumerate(ids)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "token hit rate by pool size" in text
    assert "which requests are turns of one conversation" in " ".join(text.split())
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reuse"]["ideal"] == 3 / 8
    assert report["reuse"]["points"] == [{"blocks": 5, "lru": 3 / 8, "ceiling": 3 / 8}]
    assert report["reuse"]["ideal_from_blocks"] == 4
    assert report["not_told"][-1] == "how many tokens clients allowed (max_tokens)"


def test_a_trace_that_tells_all_has_little_left_untold(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    row = {"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "token_ids": [1]}
    path.write_text(json.dumps({**row, "session_id": 1, "max_tokens": 1}) + "\n")
    (left,) = describe(read_trace(path)).not_told
    assert left.startswith("what the outputs say")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_one_trace_one_picture(tmp_path: Path, suffix: str) -> None:
    found = describe(read_trace(default_trace_path()))
    first, second = (write_picture(found, tmp_path / f"{name}.{suffix}") for name in "ab")
    data = first.read_bytes()
    assert data == second.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def picture_text(tmp_path: Path, lines: str) -> str:
    path = tmp_path / "tr$ace$"
    path.write_text(lines)
    picture = write_picture(describe(read_trace(path)), tmp_path / "picture.svg")
    return picture.read_text()


def test_an_unknown_hit_rate_is_not_drawn_as_zero(tmp_path: Path) -> None:
    known = '{"arrival_s":%d,"prompt_tokens":32,"output_tokens":1,"hash_block_size":32,"hash_ids":[%d]}\n'
    bare = '{"arrival_s":%d,"prompt_tokens":32,"output_tokens":1}\n'
    unknown = picture_text(tmp_path, "".join(bare % i for i in range(9)))
    assert "unknown: the trace does not tell" in unknown
    assert "LRU eviction" not in unknown
    never = picture_text(tmp_path, "".join(known % (i, i) for i in range(9)))
    assert "no block comes twice" in never
    again = picture_text(tmp_path, "".join(known % (i, i % 3) for i in range(9)))
    assert "ideal (never evicts): 66.7 %" in again
    one = picture_text(tmp_path, bare % 1)
    assert "all requests arrive at one time" in one
    assert "too few arrivals to tell" in one


def test_pictures_are_png_or_svg_and_can_be_written(tmp_path: Path) -> None:
    found = describe(read_trace(default_trace_path()))
    with pytest.raises(TraceError, match=r"a picture is \.png or \.svg"):
        write_picture(found, tmp_path / "picture.pdf")
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        write_picture(found, tmp_path / "no" / "picture.png")


def test_dispersion_is_one_for_poisson_and_falls_for_a_regular_clock() -> None:
    rng = np.random.default_rng(1)
    windows, poisson = dispersion_by_window(np.cumsum(rng.exponential(size=20_000)))
    assert poisson[windows < 20] == pytest.approx(1, abs=0.15)
    assert poisson == pytest.approx(1, abs=4 * (2 / 50) ** 0.5)  # 50 windows at the least
    _, regular = dispersion_by_window(np.arange(2_000) * 1.0)
    assert regular[-1] < 0.01
    assert len(dispersion_by_window(np.arange(99) * 1.0)[0]) == 0
