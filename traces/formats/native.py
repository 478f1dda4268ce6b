"""The native format: one JSON object a line, seconds from the start of the trace."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from blockmanager.content import NO_EXTRA_KEYS, Content, ExtraKeys, HashedContent, TokenContent
from scheduler.request import MAX_N
from traces.formats.base import (
    INT64_MAX,
    SECONDS,
    JsonLinesFormat,
    Row,
    RowError,
    int64_list,
    label,
    time_ns,
    tokens,
    whole,
)


class Native(JsonLinesFormat):
    """``arrival_s``, ``prompt_tokens``, ``output_tokens`` and what else a row may know."""

    name = "native"
    recognised_by = "JSON lines with arrival_s, prompt_tokens, output_tokens"
    units = "seconds, tokens"
    clock: ClassVar[Literal["relative", "absolute"]] = "relative"
    prefix_identity = "token_ids, or hash_ids with hash_block_size (rounded up or down)"
    licence = "whoever wrote the file"
    required = frozenset({"arrival_s", "prompt_tokens", "output_tokens"})
    signature = required
    optional = frozenset(
        {
            "id",
            "n",
            "priority",
            "session_id",
            "deadline_s",
            "max_tokens",
            "lora",
            "salt",
            "token_ids",
            "hash_ids",
            "hash_block_size",
        }
    )

    def parse(self, line: int, record: dict[str, Any]) -> Row:
        given = {key: value for key, value in record.items() if value is not None}
        arrival_ns = time_ns(given["arrival_s"], "arrival_s", SECONDS)
        prompt_tokens = tokens(given["prompt_tokens"], "prompt_tokens")
        deadline_ns = None
        if "deadline_s" in given:
            deadline_ns = time_ns(given["deadline_s"], "deadline_s", SECONDS)
            if deadline_ns == 0 or arrival_ns + deadline_ns > INT64_MAX:
                raise RowError("deadline_s is out of range", str(given["deadline_s"]))
        extra_keys = NO_EXTRA_KEYS
        if "lora" in given or "salt" in given:
            extra_keys = ExtraKeys(
                **{key: label(given[key], key) for key in ("lora", "salt") if key in given}
            )
        return Row(
            line=line,
            arrival_ns=arrival_ns,
            prompt_tokens=prompt_tokens,
            output_tokens=tokens(given["output_tokens"], "output_tokens"),
            id=label(given["id"], "id") if "id" in given else None,
            content=_content(given, prompt_tokens),
            max_tokens=tokens(given["max_tokens"], "max_tokens") if "max_tokens" in given else None,
            n=whole(given.get("n", 1), "n", least=1, most=MAX_N),
            priority=whole(given.get("priority", 0), "priority", least=None),
            deadline_ns=deadline_ns,
            session_id=label(given["session_id"], "session_id") if "session_id" in given else None,
            extra_keys=extra_keys,
        )


def _content(given: dict[str, Any], prompt_tokens: int) -> Content | None:
    if "token_ids" in given:
        if "hash_ids" in given:
            raise RowError("both token_ids and hash_ids")
        token_ids = int64_list(given["token_ids"], "token_ids")
        if len(token_ids) != prompt_tokens:
            raise RowError(
                "token_ids do not match prompt_tokens",
                f"{len(token_ids)} ids for {prompt_tokens} tokens",
            )
        return TokenContent.of(token_ids)
    if "hash_ids" not in given:
        return None
    if "hash_block_size" not in given:
        raise RowError("hash_ids without hash_block_size")
    size = whole(given["hash_block_size"], "hash_block_size", least=1)
    hash_ids = int64_list(given["hash_ids"], "hash_ids")
    return hashed(hash_ids, size, prompt_tokens, may_round_down=True)


def hashed(
    hash_ids: list[int], size: int, prompt_tokens: int, *, may_round_down: bool
) -> HashedContent:
    """Identity of a prompt by block ids.

    Rounded up, the last id stands for a partial block; rounded down, only full blocks have ids and
    the tail is unknown. Raises `RowError` where the number of ids fits neither.
    """
    full, tail = divmod(prompt_tokens, size)
    if len(hash_ids) == full + bool(tail):
        covered = prompt_tokens
    elif may_round_down and len(hash_ids) == full:
        covered = full * size
    else:
        need = f"{full + bool(tail)}" + (f" or {full}" if may_round_down and tail else "")
        raise RowError(
            "hash_ids do not match the prompt length",
            f"{len(hash_ids)} ids for {prompt_tokens} tokens, {size} tokens an id need {need}",
        )
    return HashedContent(np.array(hash_ids, dtype=np.int64), size, covered)
