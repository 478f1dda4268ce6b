"""The ledger of one question as a record: computed once, shown as text or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blockmanager.ledger import (
    KVLayout,
    MaxModelLenCheck,
    blocks_in_budget,
    check_max_model_len,
    requests_that_fit,
)
from blockmanager.ledger_gpu import GPUBudget, WeightBytes, gpu_budget, weight_bytes
from blockmanager.ledger_savings import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    Saving,
    compute_rate,
    savings,
)
from catalog import GPU, ModelShape, num_active_parameters, num_parameters, peak_flops

MAX_TABLE_TOKENS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the ledger; ``None`` where nothing was given."""

    shape: ModelShape
    context: int
    """Tokens a request holds."""
    batch: int
    """Requests that shall fit at once."""
    kv_dtype: str
    weight_dtype: str
    block_size: int
    tp: int
    gpu: GPU
    kv_bytes: int | None
    """Measured or wanted KV memory of one GPU: usable, every block of it."""
    num_gpu_blocks: int | None
    """As vLLM prints it, its null block included."""
    max_model_len: int | None
    gpu_memory_utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    reserve_bytes: int
    window_in_flight: bool
    """Count window layers by vLLM's rule."""
    prompt_tokens: int
    gpu_given: bool
    """False where the GPU is the default and does not set the budget unless it has to."""
    given: str = ""
    """The command line."""
    assumed: tuple[str, ...] = ()
    """What the caller filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The answer."""

    question: Question
    layout: KVLayout
    weights: WeightBytes
    budget: GPUBudget
    """What the GPU would leave for KV."""
    pool_bytes: int
    """KV memory that counts: measured where given, else the budget's."""
    pool_source: str
    null_block_in_pool: bool
    """The pool's blocks were counted as vLLM does, so one of them is nobody's."""
    requests: int
    """Of the asked length, all blocks usable."""
    requests_null_block: int
    """With one block given to no one."""
    model_len: MaxModelLenCheck
    savings: tuple[Saving, ...]
    enough_tp: int | None
    """Smallest larger TP degree at which the batch fits, where it does not."""

    @property
    def requests_fit(self) -> int:
        """The count that answers the question."""
        return self.requests_null_block if self.null_block_in_pool else self.requests

    @property
    def batch_fits(self) -> bool:
        return self.requests_fit >= self.question.batch

    @property
    def holds(self) -> bool:
        """The batch fits, and so does a request of ``max_model_len`` where one was given."""
        return self.batch_fits and (self.question.max_model_len is None or self.model_len.fits)

    @property
    def usable_bytes(self) -> int:
        """The pool without a null block."""
        null = self.layout.bytes_per_block if self.null_block_in_pool else 0
        return max(0, self.pool_bytes - null)

    @property
    def budget_difference(self) -> float | None:
        """How much more than the measured KV memory the budget comes to, as a fraction."""
        if self.pool_source == "budget" or not self.question.gpu_given:
            return None
        return self.budget.kv_bytes / self.pool_bytes - 1


def make_ledger(question: Question) -> Ledger:
    """Compute everything; ``ValueError`` for what cannot be (TP, dtypes, a pool of no block)."""
    q = question
    layout = _layout(q, q.tp)
    weights = weight_bytes(q.shape, q.weight_dtype, q.tp)
    budget = _budget(q, q.tp)
    pool, source = budget.kv_bytes, "budget"
    if q.kv_bytes is not None:
        pool, source = q.kv_bytes, "--kv-gb"
    elif q.num_gpu_blocks is not None:
        if not layout.is_uniform:
            raise ValueError(
                "--num-gpu-blocks says nothing of a model whose layers keep KV in different ways; "
                "expected --kv-gb"
            )
        pool, source = q.num_gpu_blocks * layout.bytes_per_block, "--num-gpu-blocks"
    null_block = source == "--num-gpu-blocks"
    usable = pool - (layout.bytes_per_block if null_block else 0)
    if source != "budget" and usable < max(1, layout.bytes_per_block):
        raise ValueError(
            f"{source} leaves {max(0, usable):,} bytes of KV memory, expected at least one block "
            f"of {layout.bytes_per_block:,}"
        )
    max_len = q.max_model_len or q.shape.max_model_len
    fit = requests_that_fit(pool, q.context, layout)
    fit_null = requests_that_fit(pool, q.context, layout, null_block=True)
    enough = None
    if source == "budget" and fit < q.batch:
        enough = _enough_tp(q)
    return Ledger(
        question=q,
        layout=layout,
        weights=weights,
        budget=budget,
        pool_bytes=pool,
        pool_source=source,
        null_block_in_pool=null_block,
        requests=fit,
        requests_null_block=fit_null,
        model_len=check_max_model_len(max(0, usable), max_len, layout),
        savings=savings(
            q.shape,
            layout,
            q.gpu,
            prompt_tokens=q.prompt_tokens,
            output_tokens=table_lengths(q.context - q.prompt_tokens),
            weight_dtype=q.weight_dtype,
        ),
        enough_tp=enough,
    )


def table_lengths(longest: int) -> tuple[int, ...]:
    """Output lengths for the table: powers of 4 from 16, and the longest."""
    longest = max(1, min(longest, MAX_TABLE_TOKENS))
    lengths = [4**k for k in range(2, 10) if 4**k < longest]
    return (*lengths, longest)


def _layout(q: Question, tp: int) -> KVLayout:
    in_flight = q.max_num_batched_tokens if q.window_in_flight else None
    return KVLayout.of(q.shape, q.kv_dtype, tp, q.block_size, max_num_batched_tokens=in_flight)


def _budget(q: Question, tp: int) -> GPUBudget:
    return gpu_budget(
        q.gpu,
        q.shape,
        weight_dtype=q.weight_dtype,
        tp=tp,
        gpu_memory_utilization=q.gpu_memory_utilization,
        max_num_batched_tokens=q.max_num_batched_tokens,
        max_num_seqs=q.max_num_seqs,
        reserve_bytes=q.reserve_bytes,
    )


def _enough_tp(q: Question) -> int | None:
    for factor in (2, 4, 8, 16):
        tp = q.tp * factor
        try:
            layout, budget = _layout(q, tp), _budget(q, tp)
        except ValueError:
            return None
        if requests_that_fit(budget.kv_bytes, q.context, layout) >= q.batch:
            return tp
    return None


# As JSON.


def as_dict(ledger: Ledger) -> dict[str, Any]:
    """The ledger for machines: bytes as integers, per GPU."""
    q, layout = ledger.question, ledger.layout
    usable_blocks = blocks_in_budget(ledger.usable_bytes, layout)
    return {
        "model": {
            "name": q.shape.name,
            "parameters": num_parameters(q.shape),
            "active_parameters": num_active_parameters(q.shape),
            "max_model_len": q.shape.max_model_len,
            "source": q.shape.source,
        },
        "settings": {
            "context": q.context,
            "batch": q.batch,
            "kv_dtype": q.kv_dtype,
            "weight_dtype": q.weight_dtype,
            "block_size": q.block_size,
            "tp": q.tp,
            "gpu": q.gpu.name,
            "gpu_memory_utilization": q.gpu_memory_utilization,
            "max_num_batched_tokens": q.max_num_batched_tokens,
            "max_num_seqs": q.max_num_seqs,
        },
        "given": q.given,
        "assumed": list(assumptions(ledger)),
        "kv": {
            "bytes_per_token": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
            "fixed_bytes_per_request": layout.fixed_bytes_per_request(q.context),
            "bytes_per_request": layout.bytes_per_request(q.context),
            "bytes_allocated_per_request": layout.bytes_allocated(q.context),
            "blocks_per_request": layout.request_blocks(q.context),
            "bytes_per_batch": q.batch * layout.bytes_allocated(q.context),
            "groups": [asdict(group) for group in layout.groups],
        },
        "weights": {**ledger.weights._asdict(), "total": ledger.weights.total},
        "budget": {
            "lines": [line._asdict() for line in ledger.budget.lines],
            "kv_bytes": ledger.budget.kv_bytes,
            "more_than_measured": ledger.budget_difference,
        },
        "pool": {
            "bytes": ledger.usable_bytes,
            "source": ledger.pool_source,
            # Blocks of models with several kinds of layers differ in size: no one count says all.
            "usable_blocks": usable_blocks if layout.is_uniform else None,
            "tokens": usable_blocks * layout.block_size if layout.is_uniform else None,
            "requests": ledger.requests_fit,
            "requests_all_blocks_usable": ledger.requests,
            "requests_with_null_block": ledger.requests_null_block,
        },
        "max_model_len": ledger.model_len._asdict(),
        "cache_saves": {
            "prompt_tokens": q.prompt_tokens,
            "compute_efficiency": COMPUTE_EFFICIENCY,
            "bandwidth_efficiency": BANDWIDTH_EFFICIENCY,
            "rows": [row._asdict() for row in ledger.savings],
        },
        "enough_tp": ledger.enough_tp,
        "fits": ledger.holds,
    }


def assumptions(ledger: Ledger) -> tuple[str, ...]:
    """Everything that was not given and does not follow."""
    q = ledger.question
    uses_gpu_budget = ledger.pool_source == "budget" or q.gpu_given
    texts = [*q.assumed, *q.shape.assumptions, *ledger.layout.notes]
    texts.append(
        f"matrix products reach {COMPUTE_EFFICIENCY:.0%} of the peak, reads "
        f"{BANDWIDTH_EFFICIENCY:.0%} of the bandwidth (time estimates)"
    )
    if ledger.weights.note:
        texts.append(ledger.weights.note)
    if uses_gpu_budget:
        texts.append(
            f"activation peak of steps of {q.max_num_batched_tokens:,} tokens and "
            f"{q.max_num_seqs:,} sequences, and the engine's reserve, are estimates"
        )
        texts.extend(q.gpu.assumptions)
    return tuple(dict.fromkeys(texts))


# As text.


def size(num_bytes: float) -> str:
    """``2 GiB``, ``8 MiB``: binary, at most two decimals."""
    sign, value = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{sign}{_short(value / scale)} {unit}"
    return f"{sign}{value:,.0f} B"


def decimal_size(num_bytes: float) -> str:
    """The same in powers of ten, ``2.15 GB``; exact below a megabyte."""
    sign, value = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= scale:
            return f"{sign}{_short(value / scale)} {unit}"
    return f"{sign}{value:,.0f} B"


def _short(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def seconds_text(seconds: float) -> str:
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def flops_text(value: float) -> str:
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}FLOP"
    return f"{value:.3g} FLOP"


def _rows(rows: Sequence[Sequence[str]], align: str, indent: str = "  ") -> list[str]:
    """Columns of even width; ``align`` has one of ``<`` and ``>`` for each."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(align))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def render(ledger: Ledger) -> str:
    """The report for a terminal."""
    q = ledger.question
    sections = [
        [
            f"KV ledger: {q.shape.name}, {q.batch:,} x {q.context:,} tokens, "
            f"KV in {q.kv_dtype}" + (f", TP {q.tp}" if q.tp > 1 else "")
        ],
        [f"Given: {q.given}" if q.given else ""],
        ["Model", *_model_lines(ledger)],
        ["KV memory" + (" (of each GPU)" if q.tp > 1 else ""), *_kv_lines(ledger)],
    ]
    if ledger.pool_source == "budget" or q.gpu_given:
        sections.append([f"Budget of one {q.gpu.name}", *_budget_lines(ledger)])
    sections.append(["What fits", *_fit_lines(ledger)])
    sections.append(["What the cache saves", *_saving_lines(ledger)])
    sections.append(["Assumed", *(f"  - {text}" for text in assumptions(ledger))])
    sections.append([_verdict(ledger)])
    return "\n\n".join("\n".join(lines) for lines in sections if any(lines))


def _model_lines(ledger: Ledger) -> list[str]:
    shape = ledger.question.shape
    total, active = num_parameters(shape), num_active_parameters(shape)
    text = f"  {total / 1e9:,.2f} B parameters, {shape.num_layers} layers"
    text += f", hidden {shape.hidden_size:,}"
    if shape.num_experts:
        text += (
            f", {shape.num_experts} experts ({shape.num_experts_per_token} a token, "
            f"{active / 1e9:,.2f} B active)"
        )
    lines = [text]
    for layers in shape.attention:
        if layers.kind == "recurrent":
            lines.append(f"  {layers.num_layers} recurrent layers")
            continue
        if layers.kind == "mla":
            what = (
                f"MLA, {layers.num_heads} heads, latent {layers.kv_lora_rank} + rotary "
                f"{layers.rope_head_dim}"
            )
        else:
            kinds = {1: "MQA", layers.num_heads: "MHA"}
            kind = kinds.get(layers.num_kv_heads, "GQA")
            window = f", window {layers.window:,}" if layers.kind == "sliding" else ""
            what = (
                f"{kind}, {layers.num_heads} query and {layers.num_kv_heads} KV heads of "
                f"{layers.head_dim}{window}"
            )
        lines.append(f"  {layers.num_layers} layers of {what}")
    lines.append(f"  context up to {shape.max_model_len:,} tokens")
    lines.append(f"  source: {shape.source}")
    return lines


def _kv_lines(ledger: Ledger) -> list[str]:
    q, layout = ledger.question, ledger.layout
    rows: list[tuple[str, str, str, str]] = []

    def row(label: str, text: str, num_bytes: int) -> None:
        rows.append((label, text, size(num_bytes), decimal_size(num_bytes)))

    for group in layout.groups:
        if group.grows:
            row("token", group.formula, group.bytes_per_token)
    for group in layout.groups:
        held = layout.held_tokens(group, q.context)
        if group.state_bytes:
            row("state", group.formula, group.state_bytes)
        elif group.window:
            row(
                "window",
                f"{group.formula} x {held:,} tokens",
                group.bytes_per_token * held,
            )
    per_token = layout.bytes_per_block // layout.block_size
    if per_token:
        row("block", f"{layout.block_size} tokens x {per_token:,} bytes", layout.bytes_per_block)
    allocated = layout.bytes_allocated(q.context)
    fixed = layout.fixed_bytes_per_request(q.context)
    blocks = layout.request_blocks(q.context)
    text = f"{q.context:,} tokens in {blocks:,} blocks"
    if layout.is_uniform:
        text += f" x {layout.bytes_per_block:,} bytes"
    elif layout.bytes_per_token:
        text += f", and {size(fixed)} beside them"
    row("request", text, allocated)
    row("batch", f"{q.batch:,} x {size(allocated)}", q.batch * allocated)
    ratio = q.batch * allocated / ledger.weights.total
    row(
        "weights",
        f"{q.weight_dtype}; the batch's KV is {ratio:.2f} x as much",
        ledger.weights.total,
    )
    lines = _rows(rows, "<<>>")
    if not layout.is_uniform:
        lines.append(f"  blocks: {_block_rule(layout)}")
    return lines


def _block_rule(layout: KVLayout) -> str:
    parts = []
    for group in layout.groups:
        if group.state_bytes:
            parts.append(f"{size(group.state_bytes)} of state")
        elif group.window and layout.max_num_batched_tokens is not None:
            parts.append(
                f"ceil(min(n, {group.window:,} - 1 + {layout.max_num_batched_tokens:,}) / "
                f"{layout.block_size}) + 1 of {group.num_layers} window layers"
            )
        elif group.window:
            parts.append(
                f"ceil(min(n, {group.window:,}) / {layout.block_size}) of {group.num_layers} "
                "window layers"
            )
        else:
            parts.append(f"ceil(n / {layout.block_size}) of {group.num_layers} growing layers")
    return "a request of n tokens holds " + ", ".join(parts)


def _budget_lines(ledger: Ledger) -> list[str]:
    rows = [
        (line.label, size(line.num_bytes), decimal_size(line.num_bytes), line.note)
        for line in ledger.budget.lines
    ]
    left = ledger.budget.kv_bytes
    note = "" if left > 0 else "nothing is left: the weights and the rest do not fit"
    rows.append(("left for KV", size(left), decimal_size(left), note))
    lines = _rows(rows, "<>><")
    difference = ledger.budget_difference
    if difference is not None:
        lines.append(
            f"  {ledger.pool_source} gives {size(ledger.pool_bytes)} and wins; the budget above "
            f"differs by {difference:+.1%}"
        )
    return lines


def _fit_lines(ledger: Ledger) -> list[str]:
    q, layout = ledger.question, ledger.layout
    blocks = blocks_in_budget(ledger.usable_bytes, layout)
    where = {
        "budget": f"what {q.gpu.name} has left (derived)",
        "--kv-gb": "given with --kv-gb; without a unit that is GiB",
        "--num-gpu-blocks": f"{q.num_gpu_blocks or 0:,} blocks as vLLM counts them, one is null",
    }[ledger.pool_source]
    rows = [
        ("KV memory", f"{size(ledger.usable_bytes)} = {decimal_size(ledger.usable_bytes)}", where)
    ]
    if layout.is_uniform:
        rows.append(("blocks", f"{blocks:,} usable", f"{blocks * layout.block_size:,} tokens"))
    else:
        held = ledger.requests_fit * q.context
        rows.append(("tokens", f"{held:,}", "in the requests of the next line"))
    if ledger.null_block_in_pool:
        other = f"{ledger.requests:,} if every block were usable"
    else:
        other = (
            f"{ledger.requests_null_block:,} as vLLM counts, which keeps one block as null block"
        )
    rows.append((f"requests of {q.context:,}", f"{ledger.requests_fit:,}", other))
    check = ledger.model_len
    what = "given" if q.max_model_len else "the model's"
    answer = "holds" if check.fits else "does not hold one"
    if layout.is_uniform:
        needs = f"needs {check.blocks_needed:,} blocks, the pool has {check.num_blocks:,}"
    else:
        needs = f"needs {size(layout.bytes_allocated(check.max_model_len))}"
    rows.append(
        (
            f"max_model_len {check.max_model_len:,}",
            f"{check.concurrency:.4g} x",
            f"{answer} ({what}); {needs}",
        )
    )
    return _rows(rows, "<><")


def _saving_lines(ledger: Ledger) -> list[str]:
    q = ledger.question
    header = ("output", "FLOPs: cache", "no cache", "", "time: cache", "no cache", "")
    rows = [(*header, "last token: cache", "no cache")]
    rows.extend(
        (
            f"{row.num_tokens:,}",
            flops_text(row.flops_cached),
            flops_text(row.flops_uncached),
            f"{row.flops_uncached / row.flops_cached:,.1f} x",
            seconds_text(row.seconds_cached),
            seconds_text(row.seconds_uncached),
            f"{row.seconds_uncached / row.seconds_cached:,.1f} x",
            flops_text(row.last_token_flops_cached),
            flops_text(row.last_token_flops_uncached),
        )
        for row in ledger.savings
    )
    rate = compute_rate(q.gpu, q.weight_dtype)
    dtype = "bf16" if q.weight_dtype in ("int4", "mxfp4") else q.weight_dtype
    used = peak_flops(q.gpu, dtype).dtype
    return [
        f"  one request with a prompt of {q.prompt_tokens:,} tokens, on {q.tp} x {q.gpu.name}",
        "  work of the S-th token: O(S) with the cache, O(S^2) without (all before it once more)",
        *_rows(rows, ">>>>>>>>>"),
        f"  time: the longer of FLOPs at {COMPUTE_EFFICIENCY:.0%} of {rate / 1e12:,.4g} TFLOP/s "
        f"({used}) and bytes at {BANDWIDTH_EFFICIENCY:.0%} of "
        f"{q.gpu.memory_bandwidth / 1e12:.4g} TB/s",
    ]


def _verdict(ledger: Ledger) -> str:
    q = ledger.question
    count = f"{q.batch:,} request{'s' if q.batch != 1 else ''} of {q.context:,} tokens"
    if ledger.budget.kv_bytes <= 0 and ledger.pool_source == "budget":
        text = f"Does not fit: {q.gpu.name} has no memory left for KV beside the weights"
    elif not ledger.batch_fits:
        text = f"Does not fit: {count} wanted, {ledger.requests_fit:,} fit"
    elif not ledger.holds:
        check = ledger.model_len
        text = (
            f"Does not hold: one request of max_model_len {check.max_model_len:,} needs more than "
            f"the {check.capacity_tokens:,} tokens of the pool ({check.concurrency:.4f} x)"
        )
    else:
        return f"Fits: {count}; {ledger.requests_fit:,} would."
    if ledger.enough_tp:
        text += f"; with --tp {ledger.enough_tp} it would"
    return text + "."
