"""From what was asked to what is run: every setting resolved, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from blockmanager.ledger import (
    GIB,
    KVLayout,
    blocks_in_budget,
    check_max_model_len,
    parse_bytes,
    requests_that_fit,
)
from blockmanager.ledger_gpu import (
    DEFAULT_RESERVE_BYTES,
    DEFAULT_UTILIZATION,
    activation_bytes,
    gpu_budget,
    weight_bytes,
)
from blockmanager.manager import BlockManager
from catalog import (
    DTYPE_BITS,
    GPU,
    KVDtype,
    ModelShape,
    WeightDtype,
    load_gpu,
    load_model,
    pipeline_stage,
)
from catalog.gpus import peak_flops
from records.slo import NO_LIMITS, Limits, parse_limits
from scheduler.config import SchedulerConfig
from scheduler.policies import load_policy
from scheduler.scheduler import Scheduler
from simulator.cost import cost_model_from_flag, factors_for
from simulator.cost.calibration import Calibration
from simulator.cost.step import CostModel

Source = Literal["given", "derived", "assumed"]

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_GPU = "h100-sxm"
DEFAULT_BLOCK_SIZE = 16
MAX_INT = 2**31 - 1
"""Of a count in a flag; more is a slip of the finger."""
MAX_BYTES = 2**60


class Band(NamedTuple):
    """How much longer or shorter than predicted steps may well be."""

    low: float
    high: float
    why: str


class Setting(NamedTuple):
    value: Any
    source: Source
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user said; ``None`` = nothing. Names are those of the flags."""

    model: str | None = None
    gpu: str | None = None
    weight_dtype: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    kv_gb: str | None = None
    num_gpu_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int | None = None
    enable_prefix_caching: bool | None = None
    scheduler_reserve_full_isl: bool | None = None
    scheduling_policy: str | None = None
    watermark: float | None = None
    preemption_mode: str | None = None
    swap_space: str | None = None
    parallel_sampling: str | None = None
    cost_model: str | None = None
    calibration: str | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    frontend_latency: float | None = None
    max_tokens: int | None = None
    deadline: float | None = None
    warm_start: int | None = None
    until: float | None = None
    slo: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """A run that is ready to start."""

    shape: ModelShape
    gpu: GPU
    layout: KVLayout
    num_blocks: int
    watermark_blocks: int
    num_swap_blocks: int
    enable_prefix_caching: bool
    config: SchedulerConfig
    policy_name: str
    cost: CostModel
    limits: Limits
    settings: Mapping[str, Setting]
    warnings: list[str] = field(default_factory=list)
    weight_bytes: int = 0
    async_scheduling: bool = False
    frontend_ns: int = 0
    band: Band | None = None
    peak_flops: float = 0.0
    """FLOP/s of one GPU at the weights' dtype."""

    def scheduler(self) -> Scheduler:
        """A new scheduler over empty memory."""
        blocks = BlockManager(
            self.num_blocks,
            self.layout.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            watermark_blocks=self.watermark_blocks,
            num_swap_blocks=self.num_swap_blocks,
        )
        return Scheduler(self.config, blocks, load_policy(self.policy_name))


class _Resolver:
    """Notes each setting with its source as it is decided."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.settings: dict[str, Setting] = {}
        self.warnings: list[str] = []

    def take(self, name: str, default: Any, note: str = "", source: Source = "assumed") -> Any:
        """The option as given, or its default."""
        given = getattr(self.options, name)
        if isinstance(given, int) and abs(given) > MAX_INT:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {given}, expected at most {MAX_INT}")
        if given is not None:
            self.note(name, given, "given")
            return given
        self.note(name, default, source, note)
        return default

    def note(self, name: str, value: Any, source: Source, note: str = "") -> None:
        self.settings[name] = Setting(value, source, note)


def resolve(options: Options) -> Setup:
    """Decide everything that was left open, and check that it can be run.

    Raises ``ValueError`` (``CatalogError`` among them) with one clear line.
    """
    r = _Resolver(options)
    shape = load_model(r.take("model", DEFAULT_MODEL))
    gpu = load_gpu(r.take("gpu", DEFAULT_GPU))
    tp = r.take("tensor_parallel_size", 1)
    weight_dtype = r.take("weight_dtype", shape.native_dtype, "the model's own")
    if weight_dtype not in DTYPE_BITS:
        raise ValueError(
            f"--weight-dtype is {weight_dtype!r}, expected one of {', '.join(DTYPE_BITS)}"
        )
    own_kv = shape.native_dtype if DTYPE_BITS[shape.native_dtype] == 16 else "bf16"
    kv_dtype = r.take("kv_cache_dtype", own_kv, "as the activations")
    kv_dtypes = [name for name in DTYPE_BITS if name != "mxfp4"]
    if kv_dtype not in kv_dtypes:
        raise ValueError(
            f"--kv-cache-dtype is {kv_dtype!r}, expected one of {', '.join(kv_dtypes)}"
        )
    block_size = r.take("block_size", DEFAULT_BLOCK_SIZE, "vLLM's default")
    config = _scheduler_config(r, shape, gpu)
    pp = r.take("pipeline_parallel_size", 1)
    if not 1 <= pp <= shape.num_layers:
        raise ValueError(
            f"--pipeline-parallel-size is {pp}, expected from 1 to {shape.num_layers}, the model's layers"
        )
    stage = pipeline_stage(shape, pp)
    layout = KVLayout.of(stage, kv_dtype, tp, block_size)
    num_blocks, config = _num_blocks(r, stage, gpu, layout, weight_dtype, tp, config)
    swap_blocks = _swap_blocks(r, layout, config)
    watermark = r.take("watermark", 0.0, "vLLM V1's default")
    if not 0 <= watermark < 1:
        raise ValueError(f"--watermark is {watermark:g}, expected a fraction from 0 to below 1")
    policy_name = r.take("scheduling_policy", "fcfs", "vLLM's default")
    load_policy(policy_name)
    caching = r.take("enable_prefix_caching", True, "vLLM V1's default")
    cost, serving = _cost(
        r, shape, gpu, weight_dtype, kv_dtype, tp, pp, block_size, config.max_num_seqs
    )
    limits = parse_limits(options.slo) if options.slo is not None else NO_LIMITS
    r.note("slo", str(limits) if limits else None, "given" if limits else "assumed")
    _driver_settings(r)
    if tp > 8:
        r.warnings.append(
            f"GPU: {tp} GPUs are more than one machine usually holds; the links between machines are "
            f"not modelled, all are taken to be {gpu.link}"
        )
    r.warnings += [f"model: {text}" for text in shape.assumptions]
    r.warnings += [f"GPU: {text}" for text in gpu.assumptions]
    r.warnings += [f"KV: {text}" for text in layout.notes]
    return Setup(
        shape=shape,
        gpu=gpu,
        layout=layout,
        num_blocks=num_blocks,
        # vLLM takes the fraction of all blocks, the null block included.
        watermark_blocks=int(watermark * (num_blocks + 1)),
        num_swap_blocks=swap_blocks,
        enable_prefix_caching=caching,
        config=config,
        policy_name=policy_name,
        cost=cost,
        limits=limits,
        settings=r.settings,
        warnings=r.warnings,
        weight_bytes=weight_bytes(stage, weight_dtype, tp).total,
        async_scheduling=serving.async_scheduling,
        frontend_ns=serving.frontend_ns,
        band=serving.band,
        peak_flops=peak_flops(gpu, weight_dtype).flops,
    )


class _Serving(NamedTuple):
    async_scheduling: bool
    frontend_ns: int
    band: Band | None


def _cost(
    r: _Resolver,
    shape: ModelShape,
    gpu: GPU,
    weight_dtype: WeightDtype,
    kv_dtype: KVDtype,
    tp: int,
    pp: int,
    block_size: int,
    max_num_seqs: int,
) -> tuple[CostModel, _Serving]:
    """The cost model, and what of a server is not in its steps."""
    flag = r.take("cost_model", "physical", "datasheet figures x fitted shares")
    is_physical = flag.strip() in ("physical", "no-cache")
    given = r.options.calibration
    if given is not None and not is_physical:
        raise ValueError(f"--calibration has no effect with --cost-model {flag}")
    for name in ("enforce_eager", "pipeline_parallel_size"):
        if getattr(r.options, name) not in (None, False, 1) and not is_physical:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --cost-model {flag}")
    factors = factors_for(gpu)
    if given is not None:
        factors = Calibration.read(Path(given)).apply(
            factors,
            model=shape.name,
            gpu=gpu.name,
            tp=tp,
            pp=pp,
            weight_dtype=weight_dtype,
            kv_cache_dtype=kv_dtype,
        )
    r.note("calibration", given, "given" if given else "assumed")
    latency = r.take(
        "frontend_latency",
        factors.serving.frontend_s if is_physical else 0.0,
        "HTTP, tokenisation and back, fitted" if is_physical else "none beside given step times",
    )
    if not 0 <= latency <= 3600:
        raise ValueError(f"--frontend-latency is {latency:g} s, expected from 0 to 3,600")
    asynchronous = r.take(
        "async_scheduling",
        is_physical and pp == 1,
        ("vLLM's default since 0.14" if pp == 1 else "vLLM has none with pipeline stages")
        if is_physical
        else "given step times are taken as they are",
    )
    cost = cost_model_from_flag(
        flag,
        shape=shape,
        gpu=gpu,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        tp=tp,
        pp=pp,
        block_size=block_size,
        async_scheduling=asynchronous,
        enforce_eager=r.take("enforce_eager", False, "CUDA graphs, as vLLM's default"),
        max_num_seqs=max_num_seqs,
        factors=factors,
    )
    band = None
    if is_physical:
        low, high = factors.band
        band = Band(low, high, f"step times: {factors.basis}")
    return cost, _Serving(asynchronous, round(latency * 1e9), band)


def _scheduler_config(r: _Resolver, shape: ModelShape, gpu: GPU) -> SchedulerConfig:
    max_model_len = r.take("max_model_len", shape.max_model_len, "the model's", "derived")
    chunked = r.take("enable_chunked_prefill", True, "vLLM V1's default")
    # As vLLM's server chooses (vllm/engine/arg_utils.py).
    is_large = gpu.memory_bytes >= 70 * GIB and "a100" not in gpu.name.lower()
    budget, max_num_seqs = (8192, 1024) if is_large else (2048, 256)
    note = f"vLLM's server on {'a GPU of 70 GiB or more, no A100' if is_large else 'this GPU'}"
    seqs_note = note
    if not chunked and max_model_len > budget:
        budget, note = max_model_len, "max_model_len, as chunked prefill is off"
    budget = r.take("max_num_batched_tokens", budget, note)
    if 0 < budget < max_num_seqs:
        max_num_seqs, seqs_note = budget, "no more than max_num_batched_tokens, as in vLLM"
    max_num_seqs = r.take("max_num_seqs", max_num_seqs, seqs_note)
    if budget < max_num_seqs:
        r.warnings.append(
            f"scheduler: vLLM would refuse max_num_batched_tokens {budget:,} below max_num_seqs "
            f"{max_num_seqs:,}"
        )
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=r.take("long_prefill_token_threshold", 0, "off, as in vLLM"),
        scheduler_reserve_full_isl=r.take("scheduler_reserve_full_isl", True, "vLLM's default"),
        preemption_mode=r.take("preemption_mode", "recompute", "the only one vLLM V1 has"),
        parallel_sampling=r.take("parallel_sampling", "fork", "vLLM V1: separate"),
    )


def _num_blocks(
    r: _Resolver,
    shape: ModelShape,
    gpu: GPU,
    layout: KVLayout,
    weight_dtype: str,
    tp: int,
    config: SchedulerConfig,
) -> tuple[int, SchedulerConfig]:
    """Usable blocks of one GPU, from whichever way the memory was given.

    Where a request has a fixed part (windows, states) that is set aside from the budget for as
    many requests as can be there at once; the configuration is returned with no more slots.
    """
    options = r.options
    given = [flag for flag in ("kv_gb", "num_gpu_blocks") if getattr(options, flag) is not None]
    if len(given) > 1:
        raise ValueError("--kv-gb and --num-gpu-blocks are both given, expected one of them")
    if given and options.gpu_memory_utilization is not None:
        raise ValueError(
            f"--gpu-memory-utilization has no effect beside --{given[0].replace('_', '-')}, which says "
            "how much memory there is"
        )
    if options.num_gpu_blocks is not None:
        if not 2 <= options.num_gpu_blocks <= MAX_INT:
            raise ValueError(
                f"--num-gpu-blocks is {options.num_gpu_blocks}, expected from 2 to {MAX_INT}: vLLM's "
                "count includes a null block that is never handed out"
            )
        num_blocks = options.num_gpu_blocks - 1
        r.note("num_gpu_blocks", options.num_gpu_blocks, "given", "with vLLM's null block")
        r.note("kv_bytes", num_blocks * layout.bytes_per_block, "derived", "the blocks' size")
    else:
        if options.kv_gb is not None:
            budget = _size("--kv-gb", options.kv_gb)
            r.note("kv_bytes", budget, "given", "a GPU, usable blocks")
        else:
            budget = _budget_left(r, shape, gpu, weight_dtype, tp, config)
            r.note("kv_bytes", budget, "derived", "what the GPU has left")
        fixed = 0
        if not layout.is_uniform and layout.bytes_per_token:
            longest = max((group.window for group in layout.groups), default=0)
            fixed = min(config.max_num_seqs, requests_that_fit(budget, max(longest, 1), layout))
            if 0 < fixed < config.max_num_seqs:
                if r.options.max_num_seqs is not None:
                    r.warnings.append(
                        f"KV: max_num_seqs {config.max_num_seqs:,} as given is lowered to {fixed:,}, as "
                        "many windows as the memory holds"
                    )
                config = replace(config, max_num_seqs=fixed)
                r.note("max_num_seqs", fixed, "derived", "as many windows as the memory holds")
            r.warnings.append(
                f"KV: the window and state layers of {fixed} requests are set aside from the budget, "
                "and no more may run at once; the pool's blocks are those of the layers that grow"
            )
        num_blocks = blocks_in_budget(budget, layout, num_requests=fixed)
        if num_blocks < 1:
            raise ValueError(_no_block(budget, layout))
        r.note("num_gpu_blocks", num_blocks + 1, "derived", "as vLLM counts: with its null block")
    if not layout.bytes_per_token:
        r.warnings.append(
            "KV: every layer has a window, but the simulated pool charges the whole context of a "
            "request: an upper bound"
        )
    r.note("num_blocks", num_blocks, "derived", "usable")
    _check_room(r, shape, gpu, layout, num_blocks, weight_dtype, tp, config)
    check = check_max_model_len(r.settings["kv_bytes"].value, config.max_model_len, layout)
    if not check.fits:
        r.warnings.append(
            f"KV: the pool holds {check.capacity_tokens:,} tokens, less than one request of "
            f"max_model_len {config.max_model_len:,}; vLLM would not start with this"
        )
    return num_blocks, config


def _size(flag: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    if size > MAX_BYTES:
        raise ValueError(f"{flag} is {text}, expected at most 2^60 bytes (1 EiB)")
    return size


def _budget_left(
    r: _Resolver, shape: ModelShape, gpu: GPU, weight_dtype: str, tp: int, config: SchedulerConfig
) -> int:
    share = r.take(
        "gpu_memory_utilization", DEFAULT_UTILIZATION, "vLLM's default up to 0.24, 0.92 since"
    )
    budget = gpu_budget(
        gpu,
        shape,
        weight_dtype=weight_dtype,
        tp=tp,
        gpu_memory_utilization=share,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    if budget.kv_bytes <= 0:
        lines = ", ".join(f"{line.label} {line.num_bytes / GIB:.1f}" for line in budget.lines)
        raise ValueError(
            f"{shape.name} in {weight_dtype} leaves no memory for KV on {tp} x {gpu.name} "
            f"(GiB: {lines}); take more GPUs (--tensor-parallel-size) or smaller weights"
        )
    return budget.kv_bytes


def _no_block(budget: int, layout: KVLayout) -> str:
    text = (
        f"a KV budget of {budget / GIB:.6g} GiB holds not one block: a block of {layout.block_size} "
        f"tokens takes {layout.bytes_per_block:,} bytes"
    )
    if not layout.is_uniform:
        text += ", besides the window and state layers of each request"
    return text


def _check_room(
    r: _Resolver,
    shape: ModelShape,
    gpu: GPU,
    layout: KVLayout,
    num_blocks: int,
    weight_dtype: str,
    tp: int,
    config: SchedulerConfig,
) -> None:
    """Warn where the memory that was asked for is not on the GPU."""
    kv = num_blocks * layout.bytes_per_block
    weights = weight_bytes(shape, weight_dtype, tp).total
    activations = activation_bytes(
        shape, tp, config.max_num_batched_tokens, config.max_num_seqs
    ).peak
    need = kv + weights + activations + DEFAULT_RESERVE_BYTES
    share = r.options.gpu_memory_utilization or DEFAULT_UTILIZATION
    if need > gpu.memory_bytes * share:
        r.warnings.append(
            f"memory: {kv / GIB:.1f} GiB of KV, {weights / GIB:.1f} of weights and about "
            f"{activations / GIB:.1f} of activations and {DEFAULT_RESERVE_BYTES / GIB:.0f} of reserve are "
            f"{need / GIB:.1f} GiB of {gpu.name}'s "
            f"{gpu.memory_bytes / GIB:.1f}: "
            + (
                "more than it has"
                if need > gpu.memory_bytes
                else f"needs gpu_memory_utilization {need / gpu.memory_bytes:.2f} or more"
            )
        )


def _swap_blocks(r: _Resolver, layout: KVLayout, config: SchedulerConfig) -> int:
    if r.options.swap_space is None:
        if config.preemption_mode == "swap":
            raise ValueError("--preemption-mode swap needs --swap-space, e.g. --swap-space 16GiB")
        return 0
    if config.preemption_mode != "swap":
        raise ValueError("--swap-space has no effect without --preemption-mode swap")
    blocks = _size("--swap-space", r.options.swap_space) // layout.bytes_per_block
    if blocks < 1:
        raise ValueError(
            f"--swap-space {r.options.swap_space} holds not one block of "
            f"{layout.bytes_per_block:,} bytes"
        )
    r.note("swap_space", parse_bytes(r.options.swap_space), "given", f"{blocks:,} blocks a GPU")
    return blocks


def _driver_settings(r: _Resolver) -> None:
    """What the driver adds to the requests of the trace."""
    options = r.options
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ValueError(f"--max-tokens is {options.max_tokens}, expected at least 1")
    if options.deadline is not None and not options.deadline > 0:
        raise ValueError(f"--deadline is {options.deadline:g} s, expected more than 0")
    if options.warm_start is not None and options.warm_start < 0:
        raise ValueError(f"--warm-start is {options.warm_start}, expected 0 or more requests")
    if options.warm_start and options.enable_prefix_caching is False:
        raise ValueError("--warm-start has no effect with --no-enable-prefix-caching")
    if options.deadline is not None and options.deadline < 1e-9:
        raise ValueError(f"--deadline is {options.deadline:g} s, expected at least 1 ns")
    for name in ("deadline", "until"):
        if (getattr(options, name) or 0) > 9e9:
            raise ValueError(
                f"--{name} is {getattr(options, name):g} s, expected at most 9e9 (285 years)"
            )
    if options.until is not None and not options.until > 0:
        raise ValueError(f"--until is {options.until:g} s, expected more than 0")
    r.take("max_tokens", None, "rows that do not say may grow to max_model_len")
    r.take("deadline", None, "clients of rows that do not say wait for ever")
    r.take("warm_start", 0, "the prefix cache starts empty")
    r.take("until", None, "until everything is served")
