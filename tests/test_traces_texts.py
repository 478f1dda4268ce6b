"""Traces of texts: what a tokenizer makes of them, and what is said without one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockmanager.content import TokenContent
from simulator.run import run
from simulator.settings import Options, resolve
from traces import Trace, TraceError, read_trace, stream_trace
from traces.__main__ import main
from traces.formats.base import BadRow, Row
from traces.formats.texts import ShareGpt
from traces.tokenizer import TextTokenizer
from traces.turns import closed_loop

CHAT = {
    "id": "c1",
    "conversations": [
        {"from": "system", "value": "be of use"},
        {"from": "human", "value": "a b c"},
        {"from": "gpt", "value": "d e"},
        {"from": "human", "value": "f"},
        {"from": "gpt", "value": "g h i j"},
    ],
}


@pytest.fixture(scope="module")
def words(word_tokenizer: Path) -> TextTokenizer:
    return TextTokenizer(word_tokenizer)


def write(path: Path, *conversations: Any, as_list: bool = True) -> Path:
    path.write_text(
        json.dumps(conversations, indent=1)
        if as_list
        else "".join(json.dumps(conversation) + "\n" for conversation in conversations)
    )
    return path


def read(path: Path, words: TextTokenizer, **options: Any) -> Trace:
    return read_trace(path, arrivals="constant:rate=1", tokenizer=words, **options)


def said(*messages: tuple[Any, Any], id: Any = None) -> dict[str, Any]:  # noqa: A002
    return {"id": id, "conversations": [{"from": who, "value": text} for who, text in messages]}


@pytest.mark.parametrize("as_list", [True, False])
def test_a_row_for_each_answer_after_all_before_it(
    tmp_path: Path, words: TextTokenizer, as_list: bool
) -> None:
    other = said(("user", "a b"), ("assistant", "c"))
    trace = read(write(tmp_path / "t", CHAT, other, as_list=as_list), words, strict=True)
    assert trace.format == "sharegpt"
    assert [(a.request.num_prompt_tokens, a.output_tokens) for a in trace] == [
        (6, 2),
        (9, 4),
        (2, 1),
    ]
    assert [a.request.session_id for a in trace][:2] == ["c1", "c1"]
    assert re.fullmatch(r"conversation-2-[0-9a-f]{12}", trace.arrivals[2].request.session_id or "")
    assert [a.request.id for a in trace] == ["answer-1", "answer-2", "answer-3"]
    first, second, _ = (a.request.content for a in trace)
    assert isinstance(first, TokenContent)
    assert isinstance(second, TokenContent)
    assert second.token_ids[:6].tolist() == first.token_ids.tolist()
    assert len(second.token_ids) == 9
    told = " ".join(trace.notes)
    assert "without a chat template" in told
    assert re.search(r"tokenizer\.json \(sha256 [0-9a-f]{16}", told)


def test_every_answer_is_a_row_or_has_a_reason(tmp_path: Path, words: TextTokenizer) -> None:
    path = write(
        tmp_path / "t",
        said(("gpt", "a"), ("human", "b"), ("gpt", ""), ("gpt", "c")),
        said(("human", "a")),
        said(("human", "a"), ("owl", "b")),
        said(("human", 7), ("gpt", "b")),
        said(("human", "\ud800"), ("gpt", "b")),
        {"id": "x", "conversations": "a"},
        {"id": "x", "conversations": [3]},
        {
            "id": [],
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        },
        [1],
    )
    trace = read(path, words)
    assert [(a.request.num_prompt_tokens, a.output_tokens) for a in trace] == [(2, 1)]
    assert {group.reason: group.lines for group in trace.skipped} == {
        "an answer to nothing": [1],
        "an empty answer": [2],
        "a conversation without an answer": [4],
        "unknown speaker": [5],
        "value is not a text": [6],
        "value is not valid text": [7],
        "conversations is not a list": [8],
        "a message is not a JSON object": [9],
        "id is neither text nor an integer": [10],
        "not a JSON object": [11],
    }
    assert trace.num_rows == 11
    assert "answers 1" not in str(trace.skipped[0])
    assert str(trace.skipped[0]).endswith("1 row, answer 1")
    with pytest.raises(TraceError, match=r"answer 1: an answer to nothing \(in 'conversation-1-"):
        read(path, words, strict=True)


def test_the_answers_of_a_conversation_are_hit_in_closed_loop(
    tmp_path: Path, words: TextTokenizer
) -> None:
    long = said(
        ("human", "a " * 40), ("gpt", "b " * 25), ("human", "c " * 16), ("gpt", "d " * 8), id="c"
    )
    trace = closed_loop(read(write(tmp_path / "t", long), words), 50)
    summary = run(resolve(Options(kv_gb="1")), trace).record.summary
    # Of the first turn's 40 + 25 tokens all but the last are computed: four blocks of the next prompt.
    assert summary["kv"]["prefix_hit_rate"] == pytest.approx(64 / (40 + 81))


def test_a_file_of_blank_lines_holds_no_rows(tmp_path: Path, words: TextTokenizer) -> None:
    path = tmp_path / "t"
    path.write_text("\n \n")
    with pytest.raises(TraceError, match="no row can be used: it holds no rows"):
        read(path, words, format="sharegpt")


def test_a_tokenizer_has_to_be_named(tmp_path: Path, words: TextTokenizer) -> None:
    path = write(tmp_path / "t", CHAT)
    for reading in (read_trace, lambda *a, **k: list(stream_trace(*a, **k))):
        with pytest.raises(TraceError, match=r"--tokenizer FILE \(a tokenizer\.json\)"):
            reading(path, arrivals="all-at-once")
    assert stream_trace(path, arrivals="all-at-once", tokenizer=words).num_requests == 2
    with pytest.raises(TraceError, match="name a process"):
        read_trace(path, tokenizer=words)
    counts = tmp_path / "counts.csv"
    counts.write_text("num_prefill_tokens,num_decode_tokens\n5,5\n")
    with pytest.raises(TraceError, match="--tokenizer has no effect: vidur has counts"):
        read(counts, words)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a b c", "timestamp": 1500, "output_length": 7}, (3, 7)),
        ({"texts": ["a b", "c"], "session_id": "s", "timestamp": 0, "output_length": 7}, (3, 7)),
        ({"text_input": "a b", "timestamp": 3, "session_id": 4, "output_length": 1}, (2, 1)),
        ({"text": "a", "timestamp": 0}, "output_length missing"),
        ({"text": " ", "timestamp": 0, "output_length": 1}, "tokens of the prompt is zero"),
        ({"texts": "a", "timestamp": 0, "output_length": 1}, "texts is not a list"),
        ({"texts": [], "timestamp": 0, "output_length": 1}, "text missing"),
        ({"texts": [3], "timestamp": 0, "output_length": 1}, "texts[0] is not a text"),
        (
            {"text": "a", "image": "b.png", "timestamp": 0, "output_length": 1},
            "holds image: only texts are counted",
        ),
        ({"session_id": "s", "turns": [{"text": "a"}]}, "turns of a conversation"),
        (
            {"messages": [], "timestamp": 0, "session_id": "s", "text_input": None},
            "messages without input_length: a chat template would be needed",
        ),
    ],
    ids=str,
)
def test_texts_of_aiperf(
    tmp_path: Path, words: TextTokenizer, row: dict[str, Any], expected: tuple[int, int] | str
) -> None:
    path = tmp_path / "t"
    is_turn = row.keys() & {"text", "texts", "turns", "image"}
    path.write_text(json.dumps(row) + "\n")
    name = "aiperf-turns" if is_turn else "aiperf-mooncake"
    if isinstance(expected, str):
        with pytest.raises(TraceError, match=re.escape(expected)):
            read_trace(path, name, tokenizer=words)
        return
    (arrival,) = read_trace(path, strict=True, tokenizer=words)
    assert (arrival.request.num_prompt_tokens, arrival.output_tokens) == expected
    assert arrival.request.arrival_ns == row["timestamp"] * 1_000_000
    assert isinstance(arrival.request.content, TokenContent)


@pytest.mark.parametrize("name", ["text", "text_input"])
def test_later_turns_of_aiperf_hold_answers_that_are_not_told(
    tmp_path: Path, words: TextTokenizer, name: str
) -> None:
    rows = [
        {name: "a b", "session_id": session, "timestamp": i, "output_length": 3}
        for i, session in enumerate("stst")
    ]
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path, tokenizer=words)
    assert [a.request.session_id for a in trace] == ["s", "t"]
    assert [(group.reason, group.lines) for group in trace.skipped] == [
        ("turns of a conversation, whose answers are not told", [3, 4])
    ]


def test_conversations_of_one_id_are_two(tmp_path: Path, words: TextTokenizer) -> None:
    path = write(
        tmp_path / "t",
        said(("human", "a"), ("gpt", "b"), id="x"),
        said(("human", "c"), ("gpt", "d"), id="x"),
    )
    trace = read(path, words)
    assert len({a.request.session_id for a in trace}) == 2
    assert "Conversations with the id of one before, taken as others: 1 row." in trace.notes
    folder = tmp_path / "shards"
    folder.mkdir()
    for text in "ab":
        write(folder / text, said(("human", text), ("gpt", "c")))
    assert len({a.request.session_id for a in read(folder, words)}) == 2


def test_a_tokenizer_does_neither_cut_nor_fill(
    tmp_path: Path, word_tokenizer: Path, words: TextTokenizer
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer.from_file(str(word_tokenizer))
    backend.enable_truncation(2)
    backend.enable_padding(length=32)
    file = tmp_path / "tokenizer.json"
    backend.save(str(file))
    other = TextTokenizer(file)
    assert other.ids("a b c", "text").tolist() == words.ids("a b c", "text").tolist()
    path = write(tmp_path / "t", CHAT)
    assert read(path, words).sha256 != read(path, other).sha256
    poor = Tokenizer(models.WordLevel({"a": 0}, "[UNK]"))
    poor.pre_tokenizer = pre_tokenizers.Whitespace()
    poor.save(str(file))
    with pytest.raises(TraceError, match="cannot be tokenised"):
        read(path, TextTokenizer(file))


def test_a_tokenizer_that_cannot_be_used(
    tmp_path: Path, word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(TextTokenizer(word_tokenizer.parent).ids("a b", "text")) == 2
    with pytest.raises(TraceError, match=r"none/tokenizer\.json: cannot be read: No such file"):
        TextTokenizer(tmp_path / "none" / "tokenizer.json")
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": 3}')
    with pytest.raises(TraceError, match=r"is no tokenizer\.json: ") as caught:
        TextTokenizer(broken)
    assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TraceError, match=r"kvplan\[text\]"):
        TextTokenizer(word_tokenizer)


def test_from_the_command_line(
    tmp_path: Path, word_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.json", CHAT)
    process = ("--arrivals", "constant:rate=1")
    assert main(["inspect", str(path), *process, "--tokenizer", str(word_tokenizer)]) == 0
    assert "without a chat template" in " ".join(capsys.readouterr().out.split())
    native = tmp_path / "native.jsonl"
    argv = f"convert {path} --to native --out {native} --tokenizer {word_tokenizer}".split()
    assert main([*argv, *process]) == 0
    assert [a.request.session_id for a in read_trace(native, strict=True)] == ["c1", "c1"]


JUNK = st.one_of(st.none(), st.integers(), st.text(max_size=4), st.just("\ud800"), st.just([1]))
MESSAGES = st.one_of(
    JUNK,
    st.fixed_dictionaries(
        {
            "from": st.one_of(st.sampled_from(["human", "gpt", "system", "owl"]), JUNK),
            "value": st.one_of(st.sampled_from(["a", "a b", ""]), JUNK),
        }
    ),
)
CONVERSATIONS = st.one_of(
    JUNK,
    st.fixed_dictionaries(
        {"conversations": st.one_of(JUNK, st.lists(MESSAGES, max_size=4))}, optional={"id": JUNK}
    ),
)


@given(conversations=st.lists(CONVERSATIONS, min_size=1, max_size=4), as_list=st.booleans())
def test_any_conversation_ends_in_rows_or_in_reasons(
    tmp_path_factory: pytest.TempPathFactory,
    words: TextTokenizer,
    conversations: list[Any],
    as_list: bool,
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "chats", *conversations, as_list=as_list)
    try:
        with path.open("rb") as source:
            rows: list[Row | BadRow] = list(ShareGpt(words).rows(source))
    except TraceError:
        assert not as_list  # a first line that is no JSON object
        return
    assert [row.line for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= len(conversations) - sum(c == [] for c in conversations)
    for row in rows:
        assert row.reason if isinstance(row, BadRow) else row.prompt_tokens > 0
