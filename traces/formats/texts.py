"""Conversations as texts, which become requests where a tokenizer is named (``--tokenizer``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple

import numpy as np

from blockmanager.content import TokenContent
from traces.formats.base import (
    BadRow,
    Head,
    Row,
    RowError,
    TextFormat,
    TraceError,
    label,
    shown,
    text_lines,
)
from traces.formats.documents import json_documents

_ANSWERS = frozenset({"gpt", "chatgpt", "bing", "bard", "assistant", "model", "function_call"})
_OTHERS = frozenset({"human", "user", "system", "tool", "observation"})


class ShareGpt(TextFormat):
    """``conversations`` of ``from`` and ``value``: a row for each answer, after all that was said before.

    The messages are tokenised one by one, so that a prompt begins with the prompt and the answer before it.
    """

    name = "sharegpt"
    recognised_by = "JSON, a list or lines, of objects with conversations of from, value"
    units = "texts (--tokenizer); no arrivals"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    counted_as = "answer"
    prefix_identity = "token ids"
    licence = "whoever published the conversations"

    _names = frozenset({"conversations", "from", "value"})

    def match(self, head: Head) -> int:
        return len(self._names) if self._names <= head.names else 0

    def rows(self, source: BinaryIO) -> Iterator[Row | BadRow]:
        if self.tokenizer is None:
            raise TraceError(
                "holds texts, whose tokens a tokenizer has to count: name the model's with "
                "--tokenizer FILE (a tokenizer.json)"
            )
        number = 0
        names: set[str] = set()
        for _, document in json_documents(text_lines(source)):
            for conversation in document if isinstance(document, list) else [document]:
                for found in self._answers(conversation, names):
                    number += 1
                    if isinstance(found, RowError):
                        yield BadRow(number, found.reason, found.detail)
                    else:
                        yield found._replace(line=number)

    def _answers(self, conversation: object, names: set[str]) -> Iterator[Row | RowError]:
        """A row for each answer, without its number; ``names`` are those of the conversations before."""
        assert self.tokenizer is not None
        try:
            messages = _messages(conversation)
            assert isinstance(conversation, dict)
            given = conversation.get("id")
            given = None if given in (None, "") else label(given, "id")
            ids = [self.tokenizer.ids(message.text, "value") for message in messages]
        except RowError as error:
            yield error
            return
        whole, start = np.concatenate(ids), 0
        # Unlike any other name, in this file and in the other shards of a folder.
        made = f"conversation-{len(names) + 1}-{hashlib.sha256(whole.tobytes()).hexdigest()[:12]}"
        is_new = given is not None and given not in names
        name = given if given is not None and is_new else made
        names.add(name)
        remarks = {self.tokenizer.about}
        if given is not None and not is_new:
            remarks.add("Conversations with the id of one before, taken as others")
        for message, own in zip(messages, ids, strict=True):
            end = start + len(own)
            if message.is_answer:
                if not start:
                    yield RowError("an answer to nothing", f"in {shown(name)}")
                elif not len(own):
                    yield RowError("an empty answer", f"in {shown(name)}")
                else:
                    yield Row(
                        line=0,
                        arrival_ns=None,
                        prompt_tokens=start,
                        output_tokens=len(own),
                        content=TokenContent(whole[:start]),  # a view: all of them share one array
                        session_id=name,
                        remarks=frozenset(remarks),
                    )
            start = end


class _Message(NamedTuple):
    is_answer: bool
    text: Any


def _messages(conversation: object) -> list[_Message]:
    if isinstance(conversation, RowError):
        raise conversation
    if not isinstance(conversation, dict):
        raise RowError("not a JSON object", shown(conversation))
    listed = conversation.get("conversations")
    if not isinstance(listed, list):
        raise RowError("conversations is not a list", shown(listed))
    messages = []
    for message in listed:
        if not isinstance(message, dict):
            raise RowError("a message is not a JSON object", shown(message))
        speaker = message.get("from")
        if not isinstance(speaker, str) or speaker not in _ANSWERS | _OTHERS:
            raise RowError("unknown speaker", shown(speaker))
        messages.append(_Message(speaker in _ANSWERS, message.get("value")))
    if not any(message.is_answer for message in messages):
        raise RowError("a conversation without an answer")
    return messages
