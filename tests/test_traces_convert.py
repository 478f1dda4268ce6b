"""``traces convert``: lossless where the target can hold it, and a list of what was dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmanager.content import HashedContent, TokenContent
from scheduler.request import Request
from traces import Arrival, Trace, TraceError, default_trace_path, read_trace
from traces.convert import TARGETS, Losses, convert, lines_of, write_new
from traces.prefix import ideal_prefix_hits

NAMES = st.text("ab,\"' -é#=", min_size=1, max_size=6).filter(lambda name: name.strip())


def told(arrival: Arrival) -> dict[str, Any]:
    """All that a request knows, comparable."""
    request, content = arrival.request, arrival.request.content
    known: Any = None
    if isinstance(content, TokenContent):
        known = content.token_ids.tolist()
    elif isinstance(content, HashedContent):
        known = content.hash_ids.tolist(), content.hash_block_size, content.num_tokens
    return {
        "output": arrival.output_tokens,
        "content": known,
        **{
            name: getattr(request, name)
            for name in Request.__dataclass_fields__
            if name != "content"
        },
    }


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(st.integers(1, 20))
    row: dict[str, Any] = {
        "arrival_s": draw(st.integers(0, 10**6)),
        "prompt_tokens": prompt,
        "output_tokens": draw(st.integers(1, 9)),
    }
    for key, values in {
        "session_id": NAMES,
        "lora": NAMES,
        "salt": NAMES,
        "n": st.integers(1, 4),
        "priority": st.integers(-3, 3),
        "max_tokens": st.integers(1, 9),
        "deadline_s": st.integers(1, 99),
    }.items():
        if draw(st.booleans()):
            row[key] = draw(values)
    kind = draw(st.sampled_from(["none", "tokens", "up", "down"]))
    if kind == "tokens":
        row["token_ids"] = draw(st.lists(st.integers(-5, 5), min_size=prompt, max_size=prompt))
    elif kind != "none":
        size = draw(st.integers(1, 25))
        blocks = -(-prompt // size) if kind == "up" else prompt // size
        row["hash_block_size"] = size
        row["hash_ids"] = draw(
            st.lists(st.integers(-(2**63), 2**63 - 1), min_size=blocks, max_size=blocks)
        )
    return row


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(rows(), min_size=1, max_size=4), own_ids=st.booleans())
@pytest.mark.parametrize("target", ["native", "csv"])
def test_native_and_csv_hold_everything(
    tmp_path_factory: pytest.TempPathFactory,
    target: str,
    rows: list[dict[str, Any]],
    own_ids: bool,
) -> None:
    folder = tmp_path_factory.mktemp("convert", numbered=True)
    lines = []
    for index, row in enumerate(sorted(rows, key=lambda row: row["arrival_s"])):
        given_id = {"id": f'r,"{index}'} if own_ids else {}
        lines.append(json.dumps({**given_id, **row}))
    source = folder / "from"
    source.write_text("\n".join(lines) + "\n")
    before = read_trace(source)
    done = convert(before, folder / "to", target)
    assert (done.dropped, done.requests) == ((), len(rows))
    after = read_trace(folder / "to", strict=True)
    assert after.format == target
    shift = 1 if target == "csv" and not own_ids else 0  # a header is a line
    for a, b in zip(before.arrivals, after.arrivals, strict=True):
        old, new = told(a), told(b)
        if not own_ids:
            assert int(new.pop("id")[5:]) == int(old.pop("id")[5:]) + shift
        assert new == old


def test_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    times = [1, 10**9 + 1, 123_456_789_012_345_678]
    arrivals = [
        Arrival(Request(id=f"r{time}", arrival_ns=time, num_prompt_tokens=1), 1) for time in times
    ]
    for target in ("native", "csv"):
        path = tmp_path / target
        path.write_text("".join(lines_of(arrivals, target)))
        assert [a.request.arrival_ns for a in read_trace(path)] == times


def trace_of(tmp_path: Path, *rows: dict[str, Any]) -> Trace:
    path = tmp_path / "source"
    common = {"arrival_s": 0, "output_tokens": 1}
    path.write_text("".join(json.dumps({**common, **row}) + "\n" for row in rows))
    return read_trace(path)


def test_mooncake_says_what_it_drops(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        {"id": "a", "arrival_s": 0.0004, "prompt_tokens": 600, "session_id": "s", "max_tokens": 9},
        {"id": "b", "prompt_tokens": 600, "n": 2, "hash_ids": [1] * 19, "hash_block_size": 32},
        {"id": "b", "prompt_tokens": 600},
    )
    done = convert(trace, tmp_path / "to", "mooncake")
    assert done.dropped == (
        "n dropped: 1 row",
        "id dropped: 2 rows",
        "prefixes shared by less than whole blocks of 512 tokens: 1 row",
        "max_tokens dropped: 1 row",
        "session_id dropped: 1 row",
        "time rounded to a millisecond: 1 row",
        "no hash_ids, as what prompts share is unknown (read it with --format mooncake): 1 row",
        "skipped on reading: duplicate id ('b' is at line 2 already): 1 row, line 3",
    )
    written = [json.loads(line) for line in (tmp_path / "to").read_text().splitlines()]
    assert written == [
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 600, "output_length": 1},
    ]


def test_dates_and_unknown_keys_are_lost_and_said(tmp_path: Path) -> None:
    path = tmp_path / "azure"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00,5,1\n2023-11-16 18:00:01.5,5,1\n"
    )
    done = convert(read_trace(path), tmp_path / "to", "native")
    assert done.dropped == ("dates: time 0 is that of the earliest row",)
    trace = trace_of(tmp_path, {"prompt_tokens": 1, "mood": "good"})
    assert convert(trace, tmp_path / "two", "csv").dropped == (
        "Unknown keys ignored: mood (1 row).",
    )


def test_mooncake_ids_keep_apart_what_adapters_and_tails_keep_apart(tmp_path: Path) -> None:
    ids = list(range(40))
    rows = [
        {"prompt_tokens": 600, "token_ids": [7] * 600},
        {"prompt_tokens": 600, "token_ids": [7] * 600},
        {"prompt_tokens": 600, "token_ids": [7] * 599 + [8]},
        {"prompt_tokens": 600, "token_ids": [7] * 600, "lora": "x"},
        {"prompt_tokens": 1300, "hash_ids": ids, "hash_block_size": 32},  # 20 tokens unknown
        {"prompt_tokens": 1300, "hash_ids": ids, "hash_block_size": 32},
    ]
    convert(trace_of(tmp_path, *rows), tmp_path / "to", "mooncake")
    written = [json.loads(line) for line in (tmp_path / "to").read_text().splitlines()]
    assert [row["hash_ids"] for row in written] == [
        [0, 1],
        [0, 1],
        [0, 2],
        [3, 4],
        [5, 6, 7],
        [5, 6, 8],
    ]


def test_mooncake_keeps_the_hits_of_whole_blocks(tmp_path: Path) -> None:
    trace = read_trace(default_trace_path())
    convert(trace, tmp_path / "to", "mooncake")
    before, after = (
        ideal_prefix_hits(t.arrivals, 512) for t in (trace, read_trace(tmp_path / "to"))
    )
    assert before is not None
    assert after is not None
    assert after.hit_blocks == before.hit_blocks > 0


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_real_mooncake_files_go_round(shared: Path, tmp_path: Path, name: str, target: str) -> None:
    trace = read_trace(shared / f"traces/mooncake/{name}_trace.jsonl")
    done = convert(trace, tmp_path / "to", target)
    assert done.dropped == ()
    again = read_trace(tmp_path / "to", strict=True)
    assert again.format == target
    for a, b in zip(trace.arrivals, again.arrivals, strict=True):
        assert a.request.arrival_ns == b.request.arrival_ns
        assert a.output_tokens == b.output_tokens
        assert a.request.content is not None
        assert b.request.content is not None
        assert a.request.content.num_tokens == b.request.content.num_tokens
        assert np.array_equal(a.request.content.hash_ids, b.request.content.hash_ids)  # type: ignore[attr-defined]


def test_content_that_covers_a_part_of_its_prompt_is_dropped_and_counted() -> None:
    content = HashedContent(np.arange(2), 4, 8)

    for known in (content, TokenContent.of([1, 2])):
        losses = Losses()
        request = Request(id="a", num_prompt_tokens=100, content=known)
        (line,) = lines_of([Arrival(request, 1)], "native", losses)
        assert "hash_ids" not in line
        assert "cover only a part of their prompt: 1 row" in losses.sentences()[0]


def test_nothing_is_written_where_the_target_is_unknown_or_there(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {"prompt_tokens": 1})
    with pytest.raises(TraceError, match="no format 'parquet' to convert to; there are native"):
        convert(trace, tmp_path / "to", "parquet")
    assert not (tmp_path / "to").exists()
    (tmp_path / "to").write_text("precious")
    with pytest.raises(TraceError, match="exists"):
        convert(trace, tmp_path / "to", "native")
    assert (tmp_path / "to").read_text() == "precious"
    done = convert(trace, tmp_path / "to", "native", force=True)
    assert done.written.sha256 == read_trace(tmp_path / "to").sha256


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "one\n"
        raise TraceError("stop")

    with pytest.raises(TraceError, match="stop"):
        write_new(tmp_path / "to", broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0,1", "not the header's number of fields"),
        ("x,1,1,,", "arrival_s is not a finite number"),
        ("0,,1,,", "prompt_tokens missing"),
        ("0,8,1,4,1  2", "hash_ids holds something that is not an integer"),
        ("0,8,1,4,1 2 3", "hash_ids do not match the prompt length"),
        ("0,8,1,,1 2", "hash_ids without hash_block_size"),
        ("0,1,1,4," + "9" * 30, "hash_ids holds something that is not an integer"),
    ],
)
def test_bad_rows_of_a_csv_are_skipped_with_a_reason(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "csv"
    path.write_text(
        f"arrival_s,prompt_tokens,output_tokens,hash_block_size,hash_ids\n0,8,1,4,1 2\n{row}\n0,3,1,4,\n"
    )
    trace = read_trace(path)
    assert [(group.reason, group.lines) for group in trace.skipped] == [(reason, [3])]
    short = trace.arrivals[1].request.content
    assert short is not None
    assert short.num_tokens == 0  # shorter than a block: known to share nothing
