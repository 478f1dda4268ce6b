"""Text in, text out: a model, its memory, its scheduler and its tokenizer in one object."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal, cast

import torch

from blockmanager.manager import BlockManager
from gpu_backend.attention.select import choose
from gpu_backend.config import ModelConfig
from gpu_backend.engine import Engine, Progress, RequestError
from gpu_backend.executor import Executor
from gpu_backend.graphs import DecodeGraphs
from gpu_backend.kv_cache import KVCache, KVDtype
from gpu_backend.memory import KVBudget, budget, bytes_per_block, peak_bytes
from gpu_backend.model import Decoder
from gpu_backend.outputs import Piece, RequestOutput
from gpu_backend.sampler import Sampler, SamplerState
from gpu_backend.sampling import SamplingParams
from gpu_backend.tokenizer import Message, Tokenizer, load_tokenizer
from gpu_backend.weights import SMOLLM2, find_model, load_model
from scheduler.config import SchedulerConfig
from scheduler.policies import load_policy
from scheduler.scheduler import Scheduler

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MAX_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}

_WARM_UP_TOKENS = 16

Prompt = str | Seq[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is made of. ``None`` = chosen for the model and the device, and said so."""

    model: str | ModelConfig = "smollm2"
    """A Hugging Face folder, a .gguf file, ``smollm2``, or a configuration for random weights."""
    weights_seed: int | None = None
    """Of random weights."""
    device: str | None = None
    """``cuda`` where there is one, else ``cpu``."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    attention: str = "auto"
    kv_cache_dtype: KVDtype = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    """Usable blocks; else ``kv_bytes``; else what the device has left."""
    kv_bytes: int | None = None
    memory_utilization: float | None = None
    swap_bytes: int = 0
    """Host memory for preemption by swap."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    """Share of the blocks that an admission leaves free."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    parallel_sampling: Literal["fork", "separate"] = "fork"
    scheduling_policy: str = "fcfs"
    cuda_graphs: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An engine and what it was made of."""

    engine: Engine
    tokenizer: Tokenizer | None
    model: Decoder
    config: SchedulerConfig
    kv: KVBudget
    attention: str
    lines: list[str]
    """What was chosen, line by line, for people."""


def build(
    options: EngineOptions,
    *,
    tell_tokens: bool = True,
    executor_type: type[Executor] = Executor,
) -> Built:
    """Load the model, measure a largest step, take the KV memory.

    Raises ``ValueError``, one line, for options that make no engine.
    """
    _check(options)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:  # torch knows no such device
        device = torch.device("meta")
    if device.type not in _MAX_BATCHED_TOKENS:
        raise ValueError(f"device {options.device!r} is neither cpu nor cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch finds no GPU here")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    dtype = DTYPES[options.dtype]
    attention = choose(device, options.attention)
    policy = load_policy(options.scheduling_policy)
    model = load_model(options.model, dtype=dtype, device=device, seed=options.weights_seed)
    if options.model == SMOLLM2:  # as the catalogue calls it, not as its file does
        model.config = replace(model.config, name="smollm2-135m")
    tokenizer = None
    if not isinstance(options.model, ModelConfig):
        tokenizer = load_tokenizer(find_model(options.model))
    max_model_len = options.max_model_len
    if max_model_len is None:
        max_model_len = model.config.max_model_len
    if max_model_len > model.config.max_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len}, {model.config.name} was made for at most "
            f"{model.config.max_model_len}"
        )
    max_num_batched_tokens = options.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = _MAX_BATCHED_TOKENS[device.type]
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        preemption_mode=options.preemption_mode,
        parallel_sampling=options.parallel_sampling,
    )

    def cache_of(num_blocks: int, num_host_blocks: int = 0) -> KVCache:
        return KVCache(
            model.config.num_layers,
            num_blocks,
            options.block_size,
            model.config.num_kv_heads,
            model.config.head_dim,
            dtype,
            device,
            options.kv_cache_dtype,
            num_host_blocks,
        )

    def largest_step() -> None:
        executor = Executor(model, cache_of(1), choose(device, options.attention))
        logits = executor.warm_up(config.max_num_batched_tokens, config.max_num_seqs)
        state = SamplerState(SamplingParams(top_p=0.9), (), seed=0, eos_ids=())
        Sampler()(logits, [state] * len(logits)).tokens()

    kv = budget(
        model.config,
        device,
        block_size=options.block_size,
        dtype=dtype,
        kv_dtype=options.kv_cache_dtype,
        weight_bytes=model.num_bytes,
        num_blocks=options.num_blocks,
        kv_bytes=options.kv_bytes,
        utilization=options.memory_utilization,
        activation_peak=lambda: peak_bytes(device, largest_step),
    )
    each = bytes_per_block(model.config, options.block_size, dtype, options.kv_cache_dtype)
    num_host_blocks = options.swap_bytes // each
    if options.preemption_mode == "swap" and not num_host_blocks:
        raise ValueError(
            f"preemption_mode is swap, but {options.swap_bytes} bytes of swap space hold no block of "
            f"{each}"
        )
    cache = cache_of(kv.num_blocks, num_host_blocks)
    graphs = None
    # torch's own path keeps a tensor of the step that a graph would not renew.
    if device.type == "cuda" and options.cuda_graphs and options.attention != "varlen":
        graphs = DecodeGraphs(
            model,
            cache,
            attention,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )
    executor = executor_type(model, cache, attention, graphs)
    # A GPU's allocator should have seen the largest step; a CPU's kernels are only to be compiled.
    executor.warm_up(config.max_num_batched_tokens if device.type == "cuda" else _WARM_UP_TOKENS, 1)
    blocks = BlockManager(
        kv.num_blocks,
        options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        # Of the blocks as vLLM counts them, its null block included.
        watermark_blocks=int(options.watermark * (kv.num_blocks + 1)),
        num_swap_blocks=num_host_blocks,
    )
    engine = Engine(
        executor,
        Scheduler(config, blocks, policy),
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_token_ids if tokenizer is not None else (),
        seed=options.seed,
        tell_tokens=tell_tokens,
    )
    name: str = getattr(attention, "__name__", type(attention).__name__)
    lines = [
        f"{model.config.name} in {options.dtype} on {device}, attention {name}",
        *kv.lines,
        f"max_num_seqs {config.max_num_seqs}, max_num_batched_tokens "
        f"{config.max_num_batched_tokens}, max_model_len {max_model_len}",
    ]
    return Built(engine, tokenizer, model, config, kv, name, lines)


def _check(options: EngineOptions) -> None:
    """What nothing further down refuses in its own words."""
    for name, least in (("block_size", 1), ("swap_bytes", 0)):
        value = getattr(options, name)
        if value < least:
            raise ValueError(f"{name} is {value}, must be at least {least}")
    given = ("num_blocks", "kv_bytes", "memory_utilization")
    if sum(getattr(options, name) is not None for name in given) > 1:
        raise ValueError(f"{', '.join(given)}: at most one of them can be given")
    if not 0 <= options.watermark < 1:
        raise ValueError(f"watermark is {options.watermark}, must be at least 0 and below 1")


def _without_id(error: ValueError) -> str:
    """What is wrong with a request, without the engine's number of it."""
    return re.sub(r"^request \S+: ", "", str(error))


@dataclass(frozen=True, slots=True)
class _Mail:
    """What has come for one call of ``generate`` or ``stream``."""

    pieces: list[Piece] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


class LLM:
    """Generates text.

    ``LLM("smollm2").generate(["The capital of France is"], SamplingParams(temperature=0))``; keyword
    arguments are those of ``EngineOptions``.
    """

    def __init__(self, model: str | ModelConfig = "smollm2", **options: object) -> None:
        self.built = build(EngineOptions(model=model, **options))  # type: ignore[arg-type]
        self.engine = self.built.engine
        self._lock = threading.RLock()
        """One call at a time touches the engine; between its steps others may."""
        self._mail: dict[str, _Mail] = {}
        """Of each request under way: several calls of ``stream`` may take turns."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ``ValueError`` where random weights came without one."""
        if self.built.tokenizer is None:
            raise ValueError("a model of random weights has no tokenizer, expected token ids")
        return self.built.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of each prompt, in their order.

        A prompt that cannot be served has its reason in ``RequestOutput.error``; the others are not
        affected. ``params`` are one for all (``None`` = the defaults of ``SamplingParams``) or one each.
        """
        requests = self._requests(prompts, params)
        results: dict[int, RequestOutput] = {}
        numbers: dict[str, int] = {}
        mail = _Mail()
        try:
            for number, (prompt, chosen) in enumerate(requests):
                try:
                    numbers[self._add(prompt, chosen, mail)] = number
                except ValueError as error:
                    ids = list(prompt) if isinstance(prompt, list | tuple) else []
                    reason = f"prompt {number}: {_without_id(error)}"
                    results[number] = RequestOutput(str(number), ids, [], error=reason)
            while len(results) < len(requests):
                self._step(mail)
                results |= {numbers[result.request_id]: result for result in mail.finished}
                mail.finished.clear()
                mail.pieces.clear()
        finally:
            self._withdraw(numbers)
        return [results[number] for number in range(len(requests))]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Generator[Piece, None, None]:
        """Pieces of all outputs as they come; ``request_id`` is the number of the prompt. Whatever is
        not finished when the iterator is closed is aborted.

        Raises ``RequestError`` for a prompt that cannot be served, before anything is generated.
        """
        requests = self._requests(prompts, params)
        numbers: dict[str, str] = {}
        mail = _Mail()
        try:
            for number, (prompt, chosen) in enumerate(requests):
                try:
                    numbers[self._add(prompt, chosen, mail)] = str(number)
                except RequestError as error:
                    raise RequestError(f"prompt {number}: {_without_id(error)}") from None
            while mail.pieces or len(mail.finished) < len(requests):
                if not mail.pieces:
                    self._step(mail)
                pieces = mail.pieces.copy()
                mail.pieces.clear()
                for piece in pieces:
                    yield replace(piece, request_id=numbers[piece.request_id])
        finally:
            self._withdraw(numbers)

    def chat(self, messages: Seq[Message], params: SamplingParams | None = None) -> RequestOutput:
        """The answer to a conversation, by the model's chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], params)[0]

    def _add(self, prompt: Prompt, params: SamplingParams, mail: _Mail) -> str:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with self._lock:
            request_id = self.engine.add(ids, params)
            self._mail[request_id] = mail
        return request_id

    def _step(self, mail: _Mail) -> None:
        """A step, unless somebody else's has brought something while this call waited."""
        with self._lock:
            if not mail.pieces and not mail.finished:
                self._deliver(self.engine.step().progress)

    def _deliver(self, progress: Progress) -> None:
        for piece in progress.pieces:
            if piece.request_id in self._mail:
                self._mail[piece.request_id].pieces.append(piece)
        for result in progress.finished:
            if result.request_id in self._mail:
                self._mail[result.request_id].finished.append(result)

    def _withdraw(self, request_ids: Iterable[str]) -> None:
        """The call is over: whatever it has not waited for may not run on."""
        with self._lock:
            for request_id in request_ids:
                del self._mail[request_id]
                self._deliver(self.engine.abort(request_id))

    def _requests(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        each = cast("Seq[Prompt]", [prompts] if is_one else prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(each)
        if len(params) != len(each):
            raise ValueError(f"{len(params)} sampling params for {len(each)} prompts")
        return list(zip(each, params, strict=True))
