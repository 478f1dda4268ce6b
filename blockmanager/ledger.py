"""The KV ledger: what a token, a block and a request cost in KV memory, and how many fit.

Pure functions of a model's shape; bytes are per GPU unless said otherwise.

One rule counts all models. Layers fall into groups: those whose KV grows with every token (full
attention, MLA), those that keep a window of tokens (sliding, chunked), and those that keep a state
of fixed size (recurrent). A request of ``n`` tokens holds

    ceil(n / B) blocks of the growing layers,
    ceil(min(n, W) / B) blocks of each group with window W, and its states,

with B the block size; a block of a group has B tokens of all of the group's layers. A pool is
shared by the groups in bytes, so that requests fit as ``budget // bytes_allocated(n)``. vLLM puts a
little more into window layers, because a step's tokens are written before old ones are freed: give
``max_num_batched_tokens`` to ``KVLayout.of`` for its rule, W - 1 + that many tokens and one block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from catalog import AttentionLayers, ModelShape

GIB = 2**30
_UNITS: Mapping[str, int] = {
    "": GIB,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def cdiv(a: int, b: int) -> int:
    """Ceiling of ``a / b``."""
    return -(-a // b)


def parse_bytes(text: str) -> int:
    """Bytes in ``60`` (GiB), ``60GiB``, ``60GB`` or ``500 MiB``, rounded down.

    Raises ``ValueError`` where it is no positive size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"size is {text!r}, expected a number of GiB or one with GB, GiB or MiB")
    whole, _, fraction = match[1].partition(".")
    # Integer arithmetic: 10.55 GiB must not depend on how a float rounds.
    scale: int = 10 ** len(fraction)
    size = int((whole or "0") + fraction) * unit // scale
    if size <= 0:
        raise ValueError(f"size is {text!r}, expected more than 0 bytes")
    return size


class KVFormat(NamedTuple):
    """How one K or V vector is stored: ``bits`` an element, and a scale for each ``group``."""

    name: str
    bits: int
    scale_bytes: int = 0
    group: int = 0
    """Elements that share a scale, along the head dimension; 0 = no scales stored."""

    def vector_bytes(self, num_elements: int) -> int:
        """Bytes of one vector; a last group that is not full takes a whole one."""
        if not self.group:
            return cdiv(num_elements * self.bits, 8)
        group_bytes = cdiv(self.group * self.bits, 8) + self.scale_bytes
        return cdiv(num_elements, self.group) * group_bytes

    @property
    def text(self) -> str:
        """Bytes of an element in words, ``34/32 bytes`` where groups share scales."""
        if not self.group:
            return f"{self.bits / 8:g} byte{'' if self.bits == 8 else 's'}"
        group_bytes = cdiv(self.group * self.bits, 8) + self.scale_bytes
        return f"{group_bytes}/{self.group} bytes"


KV_FORMATS: Mapping[str, KVFormat] = {
    form.name: form
    for form in (
        KVFormat("fp32", 32),
        KVFormat("bf16", 16),
        KVFormat("fp16", 16),
        KVFormat("fp8", 8),
        KVFormat("int8", 8),
        KVFormat("int4", 4),
        # ggml's block types: https://github.com/ggml-org/llama.cpp, ggml-common.h
        KVFormat("q8_0", 8, scale_bytes=2, group=32),
        KVFormat("q4_0", 4, scale_bytes=2, group=32),
    )
}
_FORMAT_ALIASES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}


def kv_format(name: str | KVFormat) -> KVFormat:
    """A KV format by name, or ``BITS+SCALE_BYTES/GROUP``: ``4+1/16`` is 4 bits, a byte per 16.

    Raises ``ValueError`` with the names there are.
    """
    if isinstance(name, KVFormat):
        return name
    key = name.strip().lower()
    key = _FORMAT_ALIASES.get(key, key)
    if key in KV_FORMATS:
        return KV_FORMATS[key]
    match = re.fullmatch(r"([0-9]+)\+([0-9]+)/([0-9]+)", key)
    if match and 0 < int(match[1]) <= 64 and int(match[3]) > 0:
        return KVFormat(key, int(match[1]), int(match[2]), int(match[3]))
    raise ValueError(
        f"KV dtype is {name!r}, expected one of {', '.join(KV_FORMATS)}, or bits+scale bytes/group "
        "such as 4+1/16"
    )


def kv_heads_per_gpu(num_kv_heads: int, tp: int) -> int:
    """KV heads that one of ``tp`` GPUs holds: a share, or one replicated head.

    Raises ``ValueError`` where neither number divides the other.
    """
    if tp < 1:
        raise ValueError(f"TP is {tp}, expected at least 1")
    if num_kv_heads % tp == 0:
        return num_kv_heads // tp
    if tp % num_kv_heads == 0:
        return 1
    raise ValueError(f"TP {tp} refused: {num_kv_heads} KV heads not divisible")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that hold KV by the same rule; bytes per GPU, all layers of the group together."""

    kind: str
    """``full``, ``sliding``, ``mla`` or ``recurrent``."""
    num_layers: int
    bytes_per_token: int = 0
    window: int = 0
    """0 = every token is kept."""
    state_bytes: int = 0
    """Per request."""
    formula: str
    """``bytes_per_token`` or ``state_bytes``, spelled out."""

    @property
    def grows(self) -> bool:
        return self.window == 0 and self.bytes_per_token > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one GPU's KV memory holds for a model, a dtype and a TP degree; make it with ``of``."""

    format: KVFormat
    tp: int
    block_size: int
    """Tokens in a block."""
    groups: tuple[KVGroup, ...]
    max_num_batched_tokens: int | None = None
    """Tokens in flight that window layers hold besides their window (vLLM's rule); None = none."""
    notes: tuple[str, ...] = ()
    """What follows from sharding or was assumed of the format."""

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        kv_dtype: str | KVFormat = "bf16",
        tp: int = 1,
        block_size: int = 16,
        *,
        max_num_batched_tokens: int | None = None,
    ) -> KVLayout:
        """The layout of ``shape``.

        Raises ``ValueError`` for an unknown dtype, a block size below 1, or a TP degree that the
        heads cannot be split over.
        """
        if block_size < 1:
            raise ValueError(f"block size is {block_size}, expected at least 1")
        form = kv_format(kv_dtype)
        notes: list[str] = []
        if form.bits < 16 and not form.group:
            notes.append(f"{form.name} KV: scales are not counted (one per tensor)")
        for layers in shape.attention:
            if layers.kind in ("full", "sliding"):
                kv_heads_per_gpu(layers.num_kv_heads, tp)
            if tp > 1 and layers.num_heads % tp:
                raise ValueError(f"TP {tp} refused: {layers.num_heads} query heads not divisible")
            if layers.kind in ("full", "sliding") and tp > layers.num_kv_heads:
                notes.append(
                    f"{layers.num_kv_heads} KV heads on {tp} GPUs: each holds one, replicated"
                )
            if layers.kind == "mla" and tp > 1:
                notes.append("MLA: every GPU holds the whole latent vector (replicated)")
        return cls(
            format=form,
            tp=tp,
            block_size=block_size,
            groups=tuple(_group(layers, form, tp) for layers in shape.attention),
            max_num_batched_tokens=max_num_batched_tokens,
            notes=tuple(dict.fromkeys(notes)),
        )

    @property
    def bytes_per_token(self) -> int:
        """What one more token costs for as long as a request lives (growing layers)."""
        return sum(group.bytes_per_token for group in self.groups if group.grows)

    @property
    def is_uniform(self) -> bool:
        """One kind of block and nothing else: a block count says all."""
        return len([group for group in self.groups if group.bytes_per_token]) == 1 and not any(
            group.state_bytes for group in self.groups
        )

    @property
    def bytes_per_block(self) -> int:
        """A block of the growing layers; of the window layers where nothing grows."""
        per_token = self.bytes_per_token or sum(group.bytes_per_token for group in self.groups)
        return self.block_size * per_token

    def held_tokens(self, group: KVGroup, tokens: int) -> int:
        """Tokens of a request of ``tokens`` that ``group`` keeps."""
        if not group.window:
            return tokens
        if self.max_num_batched_tokens is None:
            return min(tokens, group.window)
        in_flight = min(group.window - 1 + self.max_num_batched_tokens, tokens)
        return (cdiv(in_flight, self.block_size) + 1) * self.block_size

    def fixed_bytes_per_request(self, tokens: int) -> int:
        """Window and recurrent parts of a request of ``tokens``: once full, they stay the same."""
        return sum(
            self.held_tokens(group, tokens) * group.bytes_per_token + group.state_bytes
            for group in self.groups
            if not group.grows
        )

    def bytes_per_request(self, tokens: int) -> int:
        """What the tokens fill, to the byte."""
        return tokens * self.bytes_per_token + self.fixed_bytes_per_request(tokens)

    def bytes_allocated(self, tokens: int) -> int:
        """What the request takes from the pool: whole blocks, and its states."""
        total = 0
        for group in self.groups:
            blocks = cdiv(self.held_tokens(group, tokens), self.block_size)
            total += blocks * self.block_size * group.bytes_per_token + group.state_bytes
        return total

    def request_blocks(self, tokens: int) -> int:
        """Blocks of ``bytes_per_block`` that a request of ``tokens`` holds."""
        if self.bytes_per_token:
            return cdiv(tokens, self.block_size)
        return max(cdiv(self.held_tokens(group, tokens), self.block_size) for group in self.groups)


def _group(layers: AttentionLayers, form: KVFormat, tp: int) -> KVGroup:
    n = layers.num_layers
    if layers.kind == "recurrent":
        per_layer = cdiv(layers.state_bytes, tp)
        shard = f" / {tp} GPUs" if tp > 1 else ""
        return KVGroup(
            kind=layers.kind,
            num_layers=n,
            state_bytes=n * per_layer,
            formula=f"{n} recurrent layers x {layers.state_bytes:,} bytes of state{shard}",
        )
    if layers.kind == "mla":
        width = layers.kv_lora_rank + layers.rope_head_dim
        return KVGroup(
            kind=layers.kind,
            num_layers=n,
            bytes_per_token=n * form.vector_bytes(width),
            formula=f"{n} layers x ({layers.kv_lora_rank} latent + {layers.rope_head_dim} rotary) "
            f"x {form.text}",
        )
    heads = kv_heads_per_gpu(layers.num_kv_heads, tp)
    v_dim = layers.v_head_dim or layers.head_dim
    vectors = form.vector_bytes(layers.head_dim) + form.vector_bytes(v_dim)
    dims = (
        f"2 (K and V) x {n} layers x {heads} KV heads x {layers.head_dim} head_dim"
        if v_dim == layers.head_dim
        else f"{n} layers x {heads} KV heads x ({layers.head_dim} K + {v_dim} V)"
    )
    return KVGroup(
        kind=layers.kind,
        num_layers=n,
        bytes_per_token=n * heads * vectors,
        window=layers.window if layers.kind == "sliding" else 0,
        formula=f"{dims} x {form.text}",
    )


def kv_bytes_per_token(shape: ModelShape, kv_dtype: str | KVFormat = "bf16", tp: int = 1) -> int:
    """Bytes that one more token costs on each GPU (growing layers)."""
    return KVLayout.of(shape, kv_dtype, tp).bytes_per_token


def blocks_in_budget(budget_bytes: int, layout: KVLayout, *, num_requests: int = 0) -> int:
    """Whole blocks in a budget, after the fixed parts of ``num_requests`` long requests.

    The fixed parts are full windows and states; they are nothing where all layers grow.
    """
    if not layout.bytes_per_block:
        return 0
    fixed = 0
    if layout.bytes_per_token:
        longest = max((group.window for group in layout.groups), default=0)
        longest += layout.max_num_batched_tokens or 0
        fixed = num_requests * layout.fixed_bytes_per_request(longest)
    return max(0, budget_bytes - fixed) // layout.bytes_per_block


def requests_that_fit(
    budget_bytes: int, tokens: int, layout: KVLayout, *, null_block: bool = False
) -> int:
    """Requests of ``tokens`` that the budget holds at once.

    ``null_block``: as vLLM counts, which gives one block of the pool to no one.
    """
    if tokens < 1:
        raise ValueError(f"context is {tokens} tokens, expected at least 1")
    if null_block:
        budget_bytes -= layout.bytes_per_block
    return max(0, budget_bytes) // layout.bytes_allocated(tokens)


def common_blocks(blocks_by_rank: Sequence[int]) -> int:
    """Blocks that all ranks of a TP group can use: those of the rank with the fewest."""
    if not blocks_by_rank:
        raise ValueError("no ranks, expected the blocks of each")
    return min(blocks_by_rank)


class MaxModelLenCheck(NamedTuple):
    """Whether a pool can hold one request of ``max_model_len``; engines refuse to start if not."""

    max_model_len: int
    fits: bool
    blocks_needed: int
    num_blocks: int
    capacity_tokens: int
    """Tokens the pool holds in requests of this length."""
    concurrency: float
    """Requests of ``max_model_len`` that the pool holds, as a fraction."""


def check_max_model_len(
    budget_bytes: int, max_model_len: int, layout: KVLayout
) -> MaxModelLenCheck:
    """The concurrency figure that vLLM prints at start-up, and whether it lets the engine start."""
    if max_model_len < 1:
        raise ValueError(f"max_model_len is {max_model_len}, expected at least 1")
    num_blocks = blocks_in_budget(budget_bytes, layout)
    if layout.is_uniform and layout.bytes_per_token:
        capacity = num_blocks * layout.block_size
    else:
        capacity = budget_bytes * max_model_len // layout.bytes_allocated(max_model_len)
    return MaxModelLenCheck(
        max_model_len=max_model_len,
        fits=layout.bytes_allocated(max_model_len) <= budget_bytes,
        blocks_needed=layout.request_blocks(max_model_len),
        num_blocks=num_blocks,
        capacity_tokens=capacity,
        concurrency=capacity / max_model_len,
    )
